"""Faults in codecs and in error feedback, for :mod:`.mutants`."""

TRANSPORT, TRAINING = "fedfrozen_app/transport/", "fedfrozen_app/training/"
FEEDBACK, MESSAGES = TRANSPORT + "compression.py", TRANSPORT + "codecs.py"
TOP_K, LOW_RANK, INTEGERS = (TRANSPORT + f"{name}.py" for name in ("top_k", "low_rank", "quantise"))
UPLOAD, KEPT = TRAINING + "upload.py", TRAINING + "kept.py"
CLIENT_RULES = TRAINING + "client_rules.py"
WRAPPER, BASE = (f"fedfrozen_app/strategies/{name}.py" for name in ("fedfrozen", "base"))
CODEC_TESTS = "transport/test_compression.py"
CODECS: list[tuple[str, ...]] = [
    # error feedback
    (
        "feedback dropped",
        FEEDBACK,
        "return wide(delta) + error.to(delta.device)",
        "return wide(delta)",
        CODEC_TESTS,
    ),
    ("feedback added twice", FEEDBACK, "+ error.to(", "+ 2 * error.to(", CODEC_TESTS),
    ("sign of the feedback", FEEDBACK, "+ error.to(", "- error.to(", CODEC_TESTS),
    (
        "what an update leaves replaces what earlier ones left",
        FEEDBACK,
        "{name: value - arrived[name] for",
        "{name: wide(delta[name]) - arrived[name] for",
        CODEC_TESTS,
    ),
    (
        "what arrived is kept, not what did not",
        FEEDBACK,
        "{name: value - arrived[name] for",
        "{name: wide(arrived[name]) for",
        CODEC_TESTS,
    ),
    (
        "feedback of another client",
        CLIENT_RULES,
        "run, partition_id, name, own_node=own_node)",
        "run, 0, name, own_node=own_node)",
    ),
    ("feedback is not put away", UPLOAD, "self._kept.put(residual)", "pass"),
    (
        "feedback of a reply that was refused",
        KEPT,
        "self._kept.get(self._accepted)",
        "self._kept.get(self._version - 1)",
    ),
    (
        "replies are noted under another client",
        BASE,
        "clients.append(client_of_reply(reply))",
        "clients.append((client_of_reply(reply) + 1) % 4)",
    ),
    (
        "a stock strategy's refused replies count",
        WRAPPER,
        "self.versions.accept(map(client, good))",
        "self.versions.accept(range(1, 100))",
    ),
    (
        "a stock strategy's feedback never counts",
        WRAPPER,
        "self.versions.accept(map(client, good))",
        "pass",
    ),
    (
        "feedback of whole entries across the freeze",
        UPLOAD,
        "following = reselect(errors, before, selection)",
        "following = errors",
    ),
    (
        "factors of entries that change shape go on",
        UPLOAD,
        "if name in following and following[name].shape == errors[name].shape",
        "if name in following",
    ),
    (
        "the model in place of its update",
        UPLOAD,
        "wide(t) - wide(self._x[n]).to(t.device) if",
        "wide(t) if",
    ),
    (
        "the update in place of the model",
        MESSAGES,
        "wide(x[name]) + wide(decoded[name])",
        "wide(decoded[name])",
    ),
    (
        "the server goes on from what it did not send",
        MESSAGES,
        "return wire, self.down.decode(wire, layout_of_tensors(x))",
        "return wire, x",
    ),
    # top-k
    (
        "the smallest magnitudes",
        TOP_K,
        "magnitudes = values.abs()",
        "magnitudes = -values.abs()",
        CODEC_TESTS,
    ),
    (
        "the largest values, not magnitudes",
        TOP_K,
        "magnitudes = values.abs()",
        "magnitudes = values",
        CODEC_TESTS,
    ),
    ("floor of F n", TOP_K, "return math.ceil(", "return math.floor(", CODEC_TESTS),
    (
        "F n in floats",
        TOP_K,
        "math.ceil(self.fraction * math.prod(shape))",
        "math.ceil(float(self.fraction) * math.prod(shape))",
        CODEC_TESTS,
    ),
    (
        "indices twice",
        TOP_K,
        "(indices[1:] > indices[:-1]).all()",
        "(indices[1:] >= indices[:-1]).all()",
        CODEC_TESTS,
    ),
    (
        "indices in any order",
        TOP_K,
        "(indices[1:] > indices[:-1]).all()",
        "(indices[1:] != indices[:-1]).all()",
        CODEC_TESTS,
    ),
    (
        "indices below zero",
        TOP_K,
        "int(indices[0]) < 0 or int(indices[-1]) >= numel",
        "int(indices[-1]) >= numel",
        CODEC_TESTS,
    ),
    (
        "an index one too far",
        TOP_K,
        "int(indices[-1]) >= numel",
        "int(indices[-1]) > numel",
        CODEC_TESTS,
    ),
    (
        "the last of equal magnitudes",
        TOP_K,
        "equal[: k - len(above)]",
        "equal[len(equal) - k + len(above) :]",
        CODEC_TESTS,
    ),
    # PowerSGD
    (
        "P is not orthonormal",
        LOW_RANK,
        "orthonormalise(matrix @ start.to(torch.float64))",
        "(matrix @ start.to(torch.float64))",
        CODEC_TESTS,
    ),
    (
        "columns of P are orthogonal to the last one only",
        LOW_RANK,
        "before, column = basis[:, :j],",
        "before, column = basis[:, max(j - 1, 0) : j],",
        CODEC_TESTS,
    ),
    (
        "no warm start from Q",
        LOW_RANK,
        "matrix.shape[1], start.get(name)",
        "matrix.shape[1], None",
        CODEC_TESTS,
    ),
    (
        "all entries start from one draw",
        LOW_RANK,
        'f"powersgd:{name}"',
        '"powersgd:"',
        CODEC_TESTS,
    ),
    (
        "every run starts from one draw",
        LOW_RANK,
        "torch_generator(self.seed,",
        "torch_generator(0,",
        CODEC_TESTS,
    ),
    (
        "the client forgets the factors it sent last",
        UPLOAD,
        "wire, residual = with_feedback(self._codec, delta, residual, layout)",
        "residual = {n: t for n, t in residual.items() if n in delta}\n"
        "        wire, residual = with_feedback(self._codec, delta, residual, layout)",
    ),
    # integers
    ("floor for round", INTEGERS, "steps.round_()", "steps.floor_()", CODEC_TESTS),
    (
        "the zero point is not added back",
        INTEGERS,
        ".mul_(step).add_(zero)",
        ".mul_(step)",
        CODEC_TESTS,
    ),
    ("the zero point is not taken off", INTEGERS, ".sub_(zero).div_(", ".div_(", CODEC_TESTS),
    ("2^b steps", INTEGERS, "levels = 2**bits - 1", "levels = 2**bits", CODEC_TESTS),
    (
        "the receiver takes the high half first",
        INTEGERS,
        "torch.stack([packed & 15, packed >> 4], dim=1)",
        "torch.stack([packed >> 4, packed & 15], dim=1)",
        CODEC_TESTS,
    ),
    (
        "the sender puts the first code high",
        INTEGERS,
        "low, high = codes[0::2], codes[1::2]\n    packed = low.clone()",
        "low, high = codes[0::2], codes[1::2]\n"
        "    if len(low) == len(high):\n        return low << 4 | high\n    packed = low.clone()",
        CODEC_TESTS,
    ),
    (
        "codes are not clamped",
        INTEGERS,
        "steps.round_().clamp_(0, levels)",
        "steps.round_()",
        "transport/test_quantise.py",
    ),
    (
        "scale and zero point change places",
        INTEGERS,
        "steps = _unpack_nibbles(codes)[:numel] if bits == 4 else codes\n    step, zero =",
        "steps = _unpack_nibbles(codes)[:numel] if bits == 4 else codes\n    zero, step =",
        CODEC_TESTS,
    ),
    (
        "the sender's scales in another byte order",
        INTEGERS,
        '.astype("<f4").tobytes()',
        '.astype(">f4").tobytes()',
        CODEC_TESTS,
    ),
    (
        "non-finite scales are taken",
        INTEGERS,
        "if not bool(torch.isfinite(scales).all()):",
        "if False:",
        CODEC_TESTS,
    ),
    (
        "negative scales are taken",
        INTEGERS,
        "if bool((scales[:, 0] < 0).any()):",
        "if False:",
        CODEC_TESTS,
    ),
    (
        "scales beyond fp32 are sent",
        INTEGERS,
        "if not bool(torch.isfinite(scale).all()):",
        "if False:",
        CODEC_TESTS,
    ),
    (
        "what fills the last byte is not looked at",
        INTEGERS,
        "numel % 2 and int(codes[-1]) > 15",
        "False",
        CODEC_TESTS,
    ),
    (
        "one scale for the whole model",
        INTEGERS,
        "pairs = [quantise(tensor, self.bits) for tensor in tensors.values()]",
        "every = torch.cat([t.reshape(-1) for t in tensors.values()])\n"
        "        low, high = every.aminmax()\n"
        "        ends = torch.stack([low, high])\n"
        "        pairs = []\n"
        "        for tensor in tensors.values():\n"
        "            codes, scale = quantise(torch.cat([ends, tensor.reshape(-1)]), 8)\n"
        "            codes = codes[2:] if self.bits == 8 else _pack_nibbles(codes[2:] >> 4)\n"
        "            scale[0] *= 255 / (2**self.bits - 1)\n"
        "            pairs.append((codes, scale))",
        CODEC_TESTS,
    ),
]
