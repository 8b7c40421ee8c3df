"""Faults in latents, on the server, in the map and on the client, for :mod:`.mutants`."""

LATENT = "fedfrozen_app/strategies/latent.py"
MAP, FACTORS = "fedfrozen_app/models/latent.py", "fedfrozen_app/models/generators.py"
LOOP, WORKER = "fedfrozen_app/training/local.py", "fedfrozen_app/training/worker.py"
MAP_TESTS, WORKER_TESTS = "models/test_latent.py", "training/test_worker.py"
LOOP_TESTS, WORK_TESTS = "training/test_local.py", "training/test_work.py"
LATENTS: list[tuple[str, ...]] = [
    # the server
    (
        "a weighted mean where none is asked for",
        LATENT,
        'fedfrozen = {"weighting": "uniform", **fedfrozen}',
        "fedfrozen = {**fedfrozen}",
    ),
    (
        "z does not begin at zero",
        LATENT,
        "self.z = self.mapping.flat_zero()",
        "self.z = self.mapping.flat_zero() + 1e-3",
    ),
    (
        "a second run begins at the z of the first",
        LATENT,
        "self._leave_latents(torch.zeros(0))",
        "self._leave_latents(self.z)",
    ),
    (
        "the base is the model before the warm-up",
        LATENT,
        "        if not self.is_frozen(server_round):\n"
        "            super()._enter(server_round, tensors)\n"
        "        elif self.mapping is None:\n"
        "            self._begin_latents(self.schedule.spec(server_round), tensors)",
        "        self._first = getattr(self, '_first', tensors)\n"
        "        if not self.is_frozen(server_round):\n"
        "            super()._enter(server_round, tensors)\n"
        "        elif self.mapping is None:\n"
        "            self._begin_latents(self.schedule.spec(server_round), self._first)",
    ),
    (
        "the warm-up's moments act on latents",
        LATENT,
        "self._rule.forget_moments()",
        "pass",
    ),
    (
        "theta(z) on the model of the round before",
        LATENT,
        "self.mapping.apply_(whole, base, self.z)",
        "self.mapping.apply_(whole, base, self.z)\n        base.update(whole)",
    ),
    (
        "all layers are mapped whatever is frozen",
        LATENT,
        "self.latent.mapping(Selection.build(spec, tensors))",
        'self.latent.mapping(Selection.build("all", tensors))',
    ),
    (
        "latents go down in full precision",
        LATENT,
        "compress(codec, codec)",
        'compress(codec, "none")',
    ),
    (
        "the codecs of latents stay in a new warm-up",
        LATENT,
        "self._rule.compress(*self._warm_codecs)",
        "pass",
    ),
    ("z is not saved", LATENT, '"z": self.z.clone(),', '"z": torch.zeros(0),'),
    (
        "the identity of one client only",
        LATENT,
        "self._seen.append(arrays[LATENT].clone())",
        "self._seen = [arrays[LATENT].clone()]",
    ),
    (
        "the identity of z before they came",
        LATENT,
        "identity_error(self.mapping, self.state.block.tensors, self._seen)",
        "identity_error(self.mapping, self.state.block.tensors, [self.z] * len(self._seen))",
    ),
    (
        "the identity is measured every round",
        LATENT,
        "self._watch if self.identity_round is None else None",
        "self._watch",
    ),
    (
        "the seed of the map is not sent",
        LATENT,
        "{self.rank}/{self.seed}{memory}",
        "{self.rank}/0{memory}",
    ),
    # the map
    ("the head is mapped", MAP, "        and not in_head\n", "", MAP_TESTS),
    ("embeddings are mapped", MAP, "_LOOKUP.search(owner))", "False)", MAP_TESTS),
    ("norms are mapped", MAP, "        and not _NO_LAYER.search(owner)\n", "", MAP_TESTS),
    (
        "rows of V in another order for the gradient",
        MAP,
        "return self.basis_t.to(dtype).t() @",
        "return self.basis_t.to(dtype).t().flip(0) @",
        MAP_TESTS,
    ),
    (
        "weights walk away from the base",
        MAP,
        "self.mapping.apply_(self.weights, self.base, self.latent)",
        "self.mapping.apply_(self.weights, self.mapping.views(self.weights), self.latent)",
        MAP_TESTS,
    ),
    (
        "gradients of weights add up",
        MAP,
        "            weight.grad = None\n",
        "            pass\n",
        MAP_TESTS,
    ),
    (
        "a second gradient replaces the first",
        MAP,
        "gradient if self.latent.grad is None else self.latent.grad + gradient",
        "gradient",
        MAP_TESTS,
    ),
    (
        "the mean's model of the first client's z",
        MAP,
        "center = torch.stack([*zs]).double().mean(0)",
        "center = zs[0].double()",
        MAP_TESTS,
    ),
    (
        "the identity of the first tensor only",
        MAP,
        "worst = max(worst, float((mean",
        "worst = worst or max(worst, float((mean",
        MAP_TESTS,
    ),
    (
        "layers share their columns",
        MAP,
        "seed=self.seed,\n            name=key,\n            memory",
        'seed=self.seed,\n            name="",\n            memory',
        MAP_TESTS,
    ),
    (
        "layers share V",
        MAP,
        "orthonormal_rows(rank, self.dim, seed=self.seed, name=key)",
        'orthonormal_rows(rank, self.dim, seed=self.seed, name="")',
        MAP_TESTS,
    ),
    (
        "columns of the sketch are not of length 1",
        FACTORS,
        "sizes.double().sqrt().reciprocal()",
        "sizes.double().reciprocal()",
        "models/test_generators.py",
    ),
    (
        "signs of the sketch are all plus",
        FACTORS,
        "signed[self.rank :].neg_()",
        "signed[self.rank :].abs_()",
        "models/test_generators.py",
    ),
    (
        "a zero latent turns -0.0 into 0.0",
        FACTORS,
        "signed.masked_fill_(signed == 0, -0.0)",
        "pass",
        MAP_TESTS,
    ),
    (
        "a zero latent turns -0.0 into 0.0 under gaussian factors",
        FACTORS,
        "weights.masked_fill_(weights == 0, -0.0).view",
        "weights.view",
        MAP_TESTS,
    ),
    # the client
    (
        "the client's map has another seed",
        WORKER,
        "config = LatentConfig.from_text(payload.latent)",
        "config = LatentConfig(seed=5)",
        WORKER_TESTS,
    ),
    (
        "the client keeps the map of the message before",
        WORKER,
        "if key not in self._maps:",
        "if not self._maps:",
        WORKER_TESTS,
    ),
    (
        "the client's base is the model it trained last",
        WORKER,
        "LatentTraining(mapping, self.model, z, base)",
        "LatentTraining(mapping, self.model, z)",
        WORKER_TESTS,
    ),
    (
        "the client begins at zero, not at z",
        WORKER,
        "LatentTraining(mapping, self.model, z, base)",
        "LatentTraining(mapping, self.model, 0 * z, base)",
        WORKER_TESTS,
    ),
    (
        "the client sends the z it was sent",
        WORKER,
        "latent=self._latent,",
        "latent=None,",
        WORKER_TESTS,
    ),
    (
        "weights train after latents as latents",
        WORKER,
        "        self._latent = None\n        if payload.frozen is None:",
        "        if payload.frozen is None:",
        WORKER_TESTS,
    ),
    (
        "weights, not the latent, in the optimiser",
        LOOP,
        "trainable_parameters(model) if latent is None else latent.parameters()",
        "trainable_parameters(model)",
        LOOP_TESTS,
    ),
    (
        "the latent's gradient is not clipped",
        LOOP,
        "            if settings.clip_norm > 0:",
        "            if settings.clip_norm > 0 and latent is None:",
        LOOP_TESTS,
    ),
    (
        "the weights do not follow the latent",
        LOOP,
        "                latent.scatter()",
        "                pass",
        LOOP_TESTS,
    ),
    (
        "Adam without weight decay",
        LOOP,
        "kind(params, lr=lr, weight_decay=weight_decay, fused=fused, foreach=foreach)",
        "kind(params, lr=lr, fused=fused, foreach=foreach)",
        LOOP_TESTS,
    ),
    (
        "Adam's decay is decoupled",
        LOOP,
        'torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam',
        "torch.optim.AdamW",
        LOOP_TESTS,
    ),
    (
        "the latent is clipped like the weights",
        LOOP,
        "clip_norm=config.latent_clip_norm,",
        "clip_norm=config.clip_norm,",
        WORK_TESTS,
    ),
    (
        "the latent decays like the weights",
        LOOP,
        "weight_decay=config.latent_weight_decay,",
        "weight_decay=config.weight_decay,",
        WORK_TESTS,
    ),
]
