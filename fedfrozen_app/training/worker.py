"""What one process needs to train and test: one resident model, one copy of the data."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from fedfrozen_app.config import RunConfig
from fedfrozen_app.data.cache import cache_root
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import make_partition
from fedfrozen_app.data.partitioners import Indices
from fedfrozen_app.models.freeze import freeze_, train_mode_, unfreeze_
from fedfrozen_app.models.latent import LatentMapping, LatentTraining
from fedfrozen_app.models.registry import create_model, model_spec
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.models.weights import load_weights
from fedfrozen_app.strategies.latent import LatentConfig
from fedfrozen_app.training.features import Backbone, FeatureExamples, FeatureStore
from fedfrozen_app.training.hooks import Hook
from fedfrozen_app.training.local import (
    Examples,
    LocalResult,
    evaluate,
    evaluation_batch_size,
    local_work,
    resolve_device,
    train,
)
from fedfrozen_app.training.memory import keep_freed_memory
from fedfrozen_app.training.pretrain import base_weights
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.payload import LATENT, NUM_EXAMPLES, Payload

NODE_KEYS = ("data-dir", "cache-dir", "device", "threads")  # what a node may set for itself


class Worker:
    """The model, the data and the frozen-block cache of a process.

    Server and clients of the in-process engine share one worker: whoever takes a turn
    loads what it needs. ``digest`` names the frozen block the model holds, "" if none.
    """

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.resolved_threads)
        keep_freed_memory()
        self.config = config
        self.device = resolve_device(config.device)
        self.spec = model_spec(config)
        self.dataset = load_dataset(config)
        self.partition = make_partition(config, self.dataset)
        # every use loads a whole state first, so the weights need no initialisation
        self.model = create_model(config, self.dataset.num_outputs, init=False).to(self.device)
        self.buffers = [name for name, _ in self.model.named_buffers()]
        self.cache = FrozenCache(cache_root(config) / "frozen")
        self.digest = ""
        self._test_examples = self._examples("test", self.partition.test)
        self._validation_examples = self._examples("train", self.partition.validation)
        self._state = self.model.state_dict()
        self._selections: dict[str, Selection] = {}
        self.selection = self._selection_of("all")
        self._maps: dict[str, LatentMapping] = {}
        self._base: Mapping[str, torch.Tensor] = {}  # theta^pre of the latents
        self._latent: LatentTraining | None = None  # None: the weights themselves train
        self._features = FeatureStore()
        self._features_of = ""  # the digest of the frozen block they come from
        self._backbone: Backbone | None = None

    def _examples(self, split: str, rows: Indices) -> Examples:
        return self.dataset.examples(split, rows, self.spec, self.device)

    @property
    def num_clients(self) -> int:
        """Number of partitions; fewer than the config's where the data has fewer writers."""
        return len(self.partition.clients)

    # --- model ------------------------------------------------------------------------
    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return the whole state the run starts from, on the CPU.

        It comes from a model of its own: the resident one may have been trained already.
        """
        source = self.config.resolved_weights
        if source == "base":
            source = str(base_weights(self.config, self.dataset, self.partition))
        model = create_model(self.config, self.dataset.num_outputs)
        load_weights(model, source, self.config)
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def load_whole(self, arrays: Mapping[str, torch.Tensor], digest: str = "") -> None:
        """Copy a whole state into the model; ``digest`` names its frozen half, if known."""
        _copy(arrays, self._state)
        if digest != self.digest:
            self.digest = ""

    def load(self, payload: Payload) -> None:
        """Load what a message brought and freeze what it says is frozen.

        Raises
        ------
        ValueError
            If the entries are not those of this model; the model is then unchanged.
        """
        selection = self._selection_of(payload.selection)
        if payload.latent:
            self._load_latent(payload, selection)
            return
        self._latent = None
        if payload.frozen is None:
            incoming, own = selection.parts(payload.active), selection.views(self._state)
        else:
            incoming, own = selection.merge(payload.active, payload.frozen), self._state
        _check_layout(incoming, own)
        _copy(incoming, own)
        self.digest = payload.digest
        self._select(selection)

    def _load_latent(self, payload: Payload, selection: Selection) -> None:
        """Load base and latent of a message; the weights are set to what they stand for."""
        fresh = payload.frozen is not None
        if payload.frozen is not None:
            _check_layout(payload.frozen, self._state)
            self._base = payload.frozen
        key = f"{payload.latent} {payload.selection}"
        if key not in self._maps:
            config = LatentConfig.from_text(payload.latent)
            self._maps = {key: config.mapping(selection, self.device)}
            fresh = True
        if fresh:  # what this map leaves alone may have been moved by the one before
            _copy(self._base, self._state)
        mapping = self._maps[key]
        self._select(mapping.selection)
        base = {name: tensor.to(self.device) for name, tensor in self._base.items()}
        z = payload.active[LATENT].to(self.device)
        self._latent = LatentTraining(mapping, self.model, z, base)
        self.digest = payload.digest

    def _selection_of(self, spec: str) -> Selection:
        if spec not in self._selections:
            self._selections[spec] = Selection.build(spec, self._state)
        return self._selections[spec]

    def _select(self, selection: Selection) -> None:
        if selection == self.selection:
            return
        unfreeze_(self.model)
        if not selection.is_all:
            freeze_(self.model, selection)
        self.selection = selection
        self._state = self.model.state_dict()

    @property
    def entries(self) -> Mapping[str, torch.Tensor]:
        """The whole state of the model, to read."""
        return self._state

    @property
    def client_states(self) -> Path:
        """The folder where clients of this machine keep what is large between rounds."""
        return cache_root(self.config) / "clients"

    def active(self) -> dict[str, torch.Tensor]:
        """Return a copy of the active entries, on the CPU."""
        if self._latent is not None:
            return {LATENT: self._latent.latent.detach().to("cpu", copy=True)}
        half = self._state if self.selection.is_all else self.selection.split(self._state)[0]
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in half.items()}

    # --- training and testing ---------------------------------------------------------
    def train(
        self, partition_id: int, server_round: int, hooks: Sequence[Hook] = ()
    ) -> LocalResult:
        """Train the loaded model on one client's data.

        Raises
        ------
        ValueError
            If there is no such partition.
        """
        if not 0 <= partition_id < len(self.partition.clients):
            raise ValueError(
                f"partition-id {partition_id} is not one of the {len(self.partition.clients)} "
                "partitions; num-clients and the nodes' partition ids must agree"
            )
        rows = self.partition.clients[partition_id]
        examples, forward = self._as_features(
            partition_id,
            lambda: self._examples("train", rows),
            varied=self.dataset.augment != "none",
        )
        return train(
            self.model,
            examples,
            local_work(self.config, server_round, partition_id, latent=self._latent is not None),
            seed=self.config.seed,
            server_round=server_round,
            partition_id=partition_id,
            hooks=hooks,
            latent=self._latent,
            forward=forward,
        )

    def _as_features(
        self, key: int | str, make: Callable[[], Examples], *, varied: bool = False
    ) -> tuple[Examples, nn.Module]:
        """Return examples as features of a backbone that does not train, and the head for them.

        Where there is no such backbone, or examples are ``varied`` from pass to pass, return
        what ``make`` gives, and the model; it is not called for features that are kept. ``key``
        names the examples within the run.
        """
        if not self.digest or self._latent is not None or varied:
            return make(), self.model
        if self._features_of != self.digest:
            self._features.clear()
            train_mode_(self.model)
            x, _ = self._test_examples.batch(torch.zeros(1, dtype=torch.int64), None)
            self._backbone = Backbone.of(self.model, x)
            self._features_of = self.digest
        if (backbone := self._backbone) is None:
            return make(), self.model
        bf16 = self.config.precision == "bf16"
        kept = self._features.get(key, lambda: FeatureExamples(make(), backbone, bf16))
        return kept, backbone.head

    def test(self) -> tuple[float, float]:
        """Return mean loss and accuracy of the loaded model on the global test set.

        For text both are per token: exp(loss) is the perplexity.
        """
        return self._evaluate("test", self._test_examples)

    def validate(self) -> tuple[float, float] | None:
        """Return what :meth:`test` does, on the validation share; None where there is none."""
        examples = self._validation_examples
        return self._evaluate("validation", examples) if len(examples) else None

    def test_client(
        self, partition_id: int, server_round: int, *, personalise: bool = False
    ) -> dict[str, float]:
        """Test the loaded model on a client's own held-out examples.

        Returns ``num-examples``, ``loss`` and ``accuracy``; with ``personalise`` also
        ``loss_after`` and ``accuracy_after`` a round of local training, as in round
        ``server_round``, with no rule's hooks. The active entries are then the client's. All are
        0 where the client holds no such examples.
        """
        rows = self.partition.client_tests[partition_id]
        names = ["loss", "accuracy", *(["loss_after", "accuracy_after"] if personalise else [])]
        found = {NUM_EXAMPLES: float(len(rows)), **dict.fromkeys(names, 0.0)}
        if len(rows) == 0:
            return found
        key, held_out = f"client-test-{partition_id}", self._examples("train", rows)
        found["loss"], found["accuracy"] = self._evaluate(key, held_out)
        if personalise:
            self.train(partition_id, server_round)
            found["loss_after"], found["accuracy_after"] = self._evaluate(key, held_out)
        return found

    def _evaluate(self, key: str, examples: Examples) -> tuple[float, float]:
        shown, model = self._as_features(key, lambda: examples)
        return evaluate(
            model,
            shown,
            batch_size=evaluation_batch_size(self.config),
            precision=self.config.precision,
        )


def _copy(incoming: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Write entries into a model's own, all in one call."""
    names = list(incoming)
    torch._foreach_copy_([own[name] for name in names], [incoming[name] for name in names])


def _check_layout(incoming: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    if incoming.keys() != own.keys():
        differ = sorted(incoming.keys() ^ own.keys())
        raise ValueError(
            f"the message's entries are not this model's, {len(differ)} differ, first "
            f"{differ[:3]}; server and clients must use the same model and image-size"
        )
    for name, tensor in incoming.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} in the message and {list(own[name].shape)} in "
                "this model; server and clients must use the same model and image-size"
            )


@lru_cache(maxsize=1)
def resident(config: RunConfig) -> Worker:
    """Return this process's worker for a config; the one before is let go of."""
    return Worker(config)


def client_config(run_config: Mapping[str, object], node_config: Mapping[str, object]) -> RunConfig:
    """Return the config of a client: the run's, with what the node says of itself.

    A node may set ``data-dir``, ``cache-dir``, ``device`` and ``threads``. Its folder of data is
    not for bundled data sets.
    """
    own = {key: node_config[key] for key in NODE_KEYS if key in node_config}
    if run_config.get("dataset") == "digits":
        own.pop("data-dir", None)
    return _config(tuple({**run_config, **own}.items()))


@lru_cache(maxsize=4)
def _config(items: tuple[tuple[str, object], ...]) -> RunConfig:
    return RunConfig.from_mapping(dict(items))
