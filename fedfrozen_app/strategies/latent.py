"""FedFrozen-Latent and FLITE (arXiv:2607.18343, Algorithm 1): only a latent travels.

theta_l(z) = theta_l^pre + U_l V_l^T z_l, with U and V made from a seed on every client.

Rounds 1..T_warm: any rule of ours on the weights, as in FedFrozen.
Then: theta^pre = the model as it is, broadcast once, by digest like a frozen block; z = 0.
Each round the server sends z, clients train it on their data and send z_k, and the server
takes the mean of the z_k. The map is affine and the same for all, so

    mean_k theta(z_k) = theta(mean_k z_k)

and the mean of latents IS FedAvg on the mapped weights. Only entries that the selection leaves
active are mapped; biases, norms and the head rest. T_warm = 0 is FLITE on the pretrained base.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from logging import INFO
from typing import Any, Literal, Self, get_args

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Result,
    Strategy,
)
from flwr.supercore import log

from fedfrozen_app.models.generators import Generator, Memory
from fedfrozen_app.models.head import head_entries
from fedfrozen_app.models.latent import LatentMapping, identity_error, mapped_entries
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.strategies.fedfrozen import FedFrozen, FreezeState
from fedfrozen_app.strategies.mean import Tensors
from fedfrozen_app.strategies.schedule import FreezeSchedule
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.block import FrozenBlock
from fedfrozen_app.transport.payload import LATENT, LATENT_MAPPING, mark_latent

CENTRAL_PRIVACY = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)


@dataclass(frozen=True)
class LatentConfig:
    """What fixes the map, the same on server and clients.

    Attributes
    ----------
    dim : int
        d, latents per mapped tensor.
    rank : int
        r, columns of the factors.
    generator : {"gaussian-qr", "sketch"}
        How the factors are made.
    memory : {"stored", "regenerated"}
        Whether a client keeps the gaussian factors or makes them again in every pass.
    seed : int
        What they are made from.

    Raises
    ------
    ValueError
        For a value that no map can have, before any round rather than at the freeze.
    """

    dim: int = 64
    rank: int = 32
    generator: Generator = "gaussian-qr"
    memory: Memory = "stored"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.dim:
            raise ValueError(
                f"rank must be in 1..dim={self.dim}, got {self.rank}; lower it or raise dim"
            )
        for name, names in (("generator", get_args(Generator)), ("memory", get_args(Memory))):
            if getattr(self, name) not in names:
                raise ValueError(
                    f"{name} must be {' or '.join(names)}, got {getattr(self, name)!r}"
                )

    def mapping(self, selection: Selection, device: str | torch.device = "cpu") -> LatentMapping:
        """Return the map over the entries that a selection leaves active."""
        return LatentMapping(selection, device=device, **asdict(self))

    def to_text(self) -> str:
        """Return GENERATOR/DIM/RANK/SEED[/MEMORY]; every byte of it is in every message."""
        memory = "" if self.memory == "stored" else f"/{self.memory}"
        return f"{self.generator}/{self.dim}/{self.rank}/{self.seed}{memory}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what a message carries.

        Raises
        ------
        ValueError
            If it is not such a text.
        """
        generator, *rest = text.split("/")
        numbers, memory = rest[:3], rest[3:] or ["stored"]
        if len(memory) != 1 or not (len(numbers) == 3 and all(n.isdecimal() for n in numbers)):
            raise ValueError(
                f"{LATENT_MAPPING} must be GENERATOR/DIM/RANK/SEED[/MEMORY], got {text[:80]!r}"
            )
        dim, rank, seed = map(int, numbers)
        named: dict[str, Any] = {"generator": generator, "memory": memory[0]}
        return cls(dim=dim, rank=rank, seed=seed, **named)


def check_averages_latents(strategy: Strategy, bits: int) -> None:
    """Raise ValueError for what cannot average latents, wrapped for central privacy or not."""
    rule = strategy
    if isinstance(strategy, CENTRAL_PRIVACY):
        rule = strategy.strategy
        if bits != 32:
            raise ValueError(
                f"bits={bits} cannot go with {type(strategy).__name__}, which clips and noises "
                "plain numbers; set bits=32"
            )
    if not (isinstance(rule, ServerRule) and rule.any_entries):
        raise ValueError(
            f"{type(rule).__name__} cannot average latents: it must be a rule of this package that "
            "does not count gradient steps, for example FedAvg or FedAvgM, alone or in one of "
            f"{', '.join(kind.__name__ for kind in CENTRAL_PRIVACY)}"
        )


class FedFrozenLatent(FedFrozen):
    """Wrap a rule so that after a warm-up nothing but a latent travels.

    Parameters
    ----------
    strategy : ServerRule, optional
        The rule; by default our ``FedAvg``, unweighted as in the paper. It acts on the
        weights during the warm-up and on the latent afterwards, with fresh state. It may be
        inside one of Flower's wrappers for central differential privacy with clipping by the
        server, which then clip and noise latents: as many numbers as a latent has.
    warmup_rounds : int
        T_warm; 0 is FLITE.
    frozen : str
        What is not mapped, beside biases, norms, embeddings and the head; ``all`` maps every
        layer.
    latent : LatentConfig
        The map.
    bits : {32, 8, 4}
        Bits per latent on the wire, both ways: 4 and 8 are uniform-affine integers.
    schedule : FreezeSchedule, optional
        Instead of ``warmup_rounds`` and ``frozen``: two stages, or one.
    **fedfrozen : Any
        Further arguments of ``FedFrozen``.
    """

    frozen_clients = (
        "train a latent: use fedfrozen_app.models.latent.LatentTraining in the handler, or take "
        "FedFrozen"
    )

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        warmup_rounds: int = 0,
        frozen: str = "all",
        latent: LatentConfig = LatentConfig(),
        bits: Literal[32, 8, 4] = 32,
        schedule: FreezeSchedule | None = None,
        **fedfrozen: Any,
    ) -> None:
        if bits not in (32, 8, 4):
            raise ValueError(f"bits must be 32, 8 or 4, got {bits}")
        if strategy is not None:
            check_averages_latents(strategy, bits)
        if fedfrozen.get("value_l2"):
            raise ValueError(
                f"value_l2={fedfrozen['value_l2']} acts on weights and here a latent trains; set "
                "value_l2=0 and give the latent's optimiser a weight decay"
            )
        if strategy is None:
            fedfrozen = {"weighting": "uniform", **fedfrozen}
        schedule = schedule or FreezeSchedule.warmup(warmup_rounds, frozen)
        super().__init__(strategy, schedule=schedule, **fedfrozen)
        self.latent, self.bits = latent, bits
        self.first_latent_round = schedule.stages[-1][0]
        self._warm_codecs = self._rule.codecs.upload, self._rule.codecs.broadcast
        self.mapping: LatentMapping | None = None  # None: the warm-up
        self.z = torch.zeros(0)
        self.identity_error: float | None = None  # of the first latents that came
        self.identity_round: int | None = None  # when that was
        self._seen: list[torch.Tensor] = []

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the federation as ``FedFrozen.start`` does; a second run has a base of its own."""
        if not self._restored:
            self._leave_latents(torch.zeros(0))
            self.identity_error = self.identity_round = None
        return super().start(*args, **kwargs)

    def check(self, arrays: ArrayRecord) -> None:
        """Raise ValueError, before any training, if the model cannot be mapped."""
        super().check(arrays)
        shapes = {name: torch.empty(a.shape, device="meta") for name, a in arrays.items()}
        selection = Selection.build(self.schedule.specs()[-1], shapes)
        mapped_entries(selection)

    def check_head(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if the base's head is zero: no gradient then reaches a latent."""
        weights = {name: tensors[name] for name in head_entries(tensors) if tensors[name].ndim > 1}
        if weights and not any(tensor.count_nonzero() for tensor in weights.values()):
            raise ValueError(
                f"{min(weights)} of the base is zero and latents do not train it, so nothing would "
                "ever move; set head=frozen-orthogonal, take weights with a trained head, or warm "
                "up first"
            )

    def summary(self) -> None:
        """Log when latents begin, their map, and what ``FedFrozen`` logs."""
        where = f"from round {self.first_latent_round}, {self.bits} bits"
        log(INFO, "\t├──> Latents: %s, %s", where, self.latent)
        super().summary()

    def is_frozen(self, server_round: int) -> bool:
        """Whether only a latent trains in a round."""
        return server_round >= self.first_latent_round

    def _enter(self, server_round: int, tensors: Tensors) -> None:
        if not self.is_frozen(server_round):
            super()._enter(server_round, tensors)
        elif self.mapping is None:
            self._begin_latents(self.schedule.spec(server_round), tensors)

    def _begin_latents(self, spec: str, tensors: Tensors) -> None:
        """Make the present model the base and begin at z = 0; or go on where it was saved."""
        self.check_head(tensors)
        self.mapping = self.latent.mapping(Selection.build(spec, tensors))
        log(INFO, "latents: %s", self.mapping.describe())
        self._selection, self._selected = None, spec
        codec = "none" if self.bits == 32 else f"int{self.bits}"
        self._rule.compress(codec, codec)
        if self.z.numel() == 0:  # else the state was restored
            self.z = self.mapping.flat_zero()
            self.state = FreezeState(spec, FrozenBlock.of(tensors))
            self._rule.forget_moments()

    def _leave_latents(self, z: torch.Tensor) -> None:
        """Be as before the first round of latents, which begins at ``z`` if that is not empty."""
        self.mapping, self.z = None, z
        self._rule.compress(*self._warm_codecs)

    @property
    def _rule(self) -> ServerRule[Any, Any]:
        wrapped = self.strategy
        rule = wrapped.strategy if isinstance(wrapped, CENTRAL_PRIVACY) else wrapped
        assert isinstance(rule, ServerRule)  # for the type checker; see check_averages_latents
        return rule

    # --- down -------------------------------------------------------------------------
    def _shown(self, server_round: int, arrays: ArrayRecord) -> tuple[ArrayRecord, ArrayRecord]:
        tensors = self._tensors(arrays)
        self._enter(server_round, tensors)
        if self.mapping is None:
            return super()._shown(server_round, arrays)
        self._x = {LATENT: self.z}
        shown = to_record(self._x)
        return shown, shown

    def _dress(
        self, messages: Iterable[Message], active: ArrayRecord, grid: Grid, *, train: bool = True
    ) -> list[Message]:
        dressed = super()._dress(messages, active, grid, train=train)
        if self.mapping is not None:
            for message in dressed:
                mark_latent(message, self.latent.to_text())
        return dressed

    # --- up ---------------------------------------------------------------------------
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the rule average the latents; return the model they stand for."""
        if self.mapping is None:
            return super().aggregate_train(server_round, replies)
        self._seen = []
        self._rule.watch = self._watch if self.identity_round is None else None
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        self.z = to_tensors(arrays)[LATENT]
        if self._seen:
            self._check_identity(server_round)
        return to_record(self.model()), metrics

    def _watch(self, arrays: Tensors) -> None:
        self._seen.append(arrays[LATENT].clone())

    def _check_identity(self, server_round: int) -> None:
        """Measure how far the mean of the models is from the model of the mean."""
        assert self.mapping is not None and self.state.block is not None
        self.identity_error = identity_error(self.mapping, self.state.block.tensors, self._seen)
        self.identity_round, self._seen = server_round, []
        log(INFO, "round %d: identity error %.1e", server_round, self.identity_error)

    def model(self) -> Tensors:
        """Return theta(z), the whole model; what is not mapped is the base's own."""
        assert self.mapping is not None and self.state.block is not None
        base = self.state.block.tensors
        mapped = {tensor.entry.name for tensor in self.mapping.tensors}
        whole = {name: t.clone() if name in mapped else t for name, t in base.items()}
        self.mapping.apply_(whole, base, self.z)
        return whole

    # --- state ------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the latent beside what ``FedFrozen`` keeps."""
        identity = {"round": self.identity_round, "error": self.identity_error}
        return {**super().state_dict(), "z": self.z.clone(), "identity": identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state returned by :meth:`state_dict`."""
        super().load_state_dict(state)
        self._leave_latents(state["z"].clone())
        self.identity_round = state["identity"]["round"]
        self.identity_error = state["identity"]["error"]
