"""Every run-config key in one place: type, default, range and meaning.

The same kebab-case keys are used by ``[tool.flwr.app.config]``, an experiment TOML,
``-c key=value`` and ``flwr run --run-config``. Nothing else in the package parses
configuration. Flower's run config holds only str, int, float and bool, so "not set"
is written as ``"auto"`` for names and ``-1`` for numbers.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

ConfigValue = str | int | float | bool

DEFAULT_WARMUP_RATIO = 0.4
DEFAULT_PUBLIC_FRACTION = 0.15
DIGITS_MODEL = "vit-digits"

NAMED_WEIGHTS = ("auto", "pretrained", "base", "none")  # any other value is a file

# The models of the FedFrozen paper's experiments (arXiv:2605.06446) by data set.
DEFAULT_MODELS = {"digits": DIGITS_MODEL, "fashion-mnist": DIGITS_MODEL, "femnist": "vit-s-16"}
# Values that belong to the project's vocabulary but that this version cannot run yet.
NOT_YET = {
    "strategy": ("fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "latent"),
    "model": ("resnet18-gn", "resnet34-gn", "tinygpt"),
    "head": ("frozen-kaiming", "frozen-orthogonal"),
}
# (key, other key, values of the other with which the key acts): elsewhere it would do nothing
ACTS_WITH = (
    ("proximal-mu", "strategy", ("fedprox", "fednova")),
    ("server-lr", "strategy", ("scaffold", "fedavgm", "fedadam")),
    ("server-momentum", "strategy", ("fedavgm",)),
    ("beta1", "strategy", ("fedadam",)),
    ("beta2", "strategy", ("fedadam",)),
    ("tau", "strategy", ("fedadam",)),
    ("latent-dim", "strategy", ("latent",)),
    ("latent-rank", "strategy", ("latent",)),
    ("latent-bits", "strategy", ("latent",)),
    ("generator", "strategy", ("latent",)),
    ("alpha", "partitioner", ("dirichlet",)),
    ("classes-per-client", "partitioner", ("shard",)),
    ("momentum", "optimizer", ("sgd",)),
)


def rounds_of_ratio(ratio: float, rounds: int) -> int:
    """Return the warm-up of a ratio, the nearest round.

    A ratio between 0 and 1 leaves at least one round on each side of the freeze, where
    there are two or more rounds.
    """
    nearest = round(ratio * rounds)
    return min(max(nearest, 1), rounds - 1) if 0 < ratio < 1 else nearest


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ConfigError(ValueError):
    """A run configuration that cannot work; the message names field, value, rule and remedy."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """One validated run. Build it with :meth:`from_mapping`; attributes are snake_case."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=_kebab,
        populate_by_name=True,
        allow_inf_nan=False,
        str_strip_whitespace=True,
    )

    # --- data -------------------------------------------------------------------------
    dataset: str = Field(
        "digits",
        min_length=1,
        description="digits (bundled), cifar10, cifar100, femnist, tinyimagenet, fashion-mnist, "
        "or the Hugging Face hub id of an image data set",
    )
    data_dir: str = Field("", description="local folder with the data set's parquet files")
    image_column: str = Field("", description="image column of a data set given by hub id/folder")
    label_column: str = Field("", description="label column of a data set given by hub id/folder")
    max_train_examples: int = Field(
        0, ge=0, description="seeded class-balanced subset of the training split; 0 = all"
    )
    max_test_examples: int = Field(
        0, ge=0, description="seeded class-balanced subset of the test split; 0 = all"
    )
    public_fraction: float = Field(
        -1.0,
        ge=-1.0,
        lt=1.0,
        description="share of the training data that no client holds and the base is trained on; "
        f"-1 = {DEFAULT_PUBLIC_FRACTION} with weights=base, else 0",
    )
    augment: Literal["auto", "none", "crop", "crop-flip"] = Field(
        "auto", description="training augmentation; auto = what fits the data set"
    )
    # --- partitions -------------------------------------------------------------------
    partitioner: Literal["iid", "dirichlet", "shard", "natural"] = Field(
        "dirichlet", description="how the training data is divided among the clients"
    )
    alpha: float = Field(
        0.5, gt=0, description="Dirichlet concentration; smaller = more unlike clients"
    )
    classes_per_client: int = Field(2, ge=1, description="classes per client of partitioner=shard")
    num_clients: int = Field(
        10, ge=1, description="number of clients; partitioner=natural takes it as an upper bound"
    )
    min_partition_size: int = Field(1, ge=0, description="fewest examples a client may hold")
    # --- model ------------------------------------------------------------------------
    model: str = Field(
        "auto",
        min_length=1,
        description="vit-digits, vit-b-32, vit-s-16 or the name of any timm Vision Transformer; "
        "auto = the paper's model for the data set",
    )
    weights: str = Field(
        "auto",
        min_length=1,
        description="pretrained (hub), base (short central training on the public fraction), "
        "none, or a safetensors file; auto = base for vit-digits, else pretrained",
    )
    image_size: int = Field(
        0, ge=0, description="image side in pixels fed to the model; 0 = the model's own"
    )
    head: Literal["trainable", "frozen-kaiming", "frozen-orthogonal"] = Field(
        "trainable", description="classification head"
    )
    # --- federation -------------------------------------------------------------------
    strategy: Literal[
        "fedavg", "fedfrozen", "fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "latent"
    ] = Field("fedfrozen", description="federated rule; fedfrozen = fedavg + the default freeze")
    rounds: int = Field(12, ge=1, description="communication rounds")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of clients sampled a round")
    min_replies: float = Field(
        0.5, ge=0, le=1, description="share of the cohort that must reply usably, or the run stops"
    )
    round_timeout: float = Field(
        3600.0, gt=0, description="seconds to wait for a round's replies (Flower runtime)"
    )
    eval_every: int = Field(1, ge=0, description="central test every N rounds; 0 = only at the end")
    # --- freeze -----------------------------------------------------------------------
    frozen: str = Field(
        "auto",
        min_length=1,
        description="what the freeze stops training: query-key, value-head (all but value rows "
        "and head), head (all but the head), all (nothing is frozen), or name patterns; auto = "
        "query-key with strategy=fedfrozen, else all",
    )
    warmup_rounds: int = Field(
        -1,
        ge=-1,
        description="rounds before the freeze, for runs that freeze something; -1 = not set",
    )
    warmup_ratio: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="the same as a share of rounds; -1 = not set (neither set: "
        f"{DEFAULT_WARMUP_RATIO})",
    )
    value_l2: float = Field(
        0.0, ge=0, description="lambda of (lambda/2)||W_V||^2 on the value rows after the freeze"
    )
    # --- local training ---------------------------------------------------------------
    local_epochs: int = Field(2, ge=1, description="passes over a client's data each round")
    local_steps: int = Field(0, ge=0, description="optimiser steps instead of epochs; 0 = epochs")
    batch_size: int = Field(32, ge=1, le=2**31 - 1, description="examples per optimiser step")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.01, gt=0, description="local learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum, zero at each round's start")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the local optimiser")
    clip_norm: float = Field(0.0, ge=0, description="gradient norm bound; 0 = no clipping")
    proximal_mu: float = Field(0.0, ge=0, description="FedProx mu")
    # --- server optimisers ------------------------------------------------------------
    server_lr: float = Field(1.0, gt=0, description="server learning rate")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="FedAvgM momentum")
    beta1: float = Field(0.9, ge=0, lt=1, description="FedAdam first-moment decay")
    beta2: float = Field(0.99, ge=0, lt=1, description="FedAdam second-moment decay")
    tau: float = Field(1e-3, gt=0, description="FedAdam adaptivity")
    # --- latents and compression ------------------------------------------------------
    latent_dim: int = Field(64, ge=1, description="latent entries per mapped tensor")
    latent_rank: int = Field(32, ge=1, description="rank of the frozen factors")
    generator: Literal["gaussian-qr", "sketch"] = Field(
        "gaussian-qr", description="how the frozen factors are drawn"
    )
    latent_bits: Literal[32, 8, 4] = Field(32, description="bits per latent entry on the wire")
    compression: str = Field(
        "none", description="upload compression: none | int8 | int4 | topk:F | powersgd:R"
    )
    # --- execution --------------------------------------------------------------------
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16 = autocast in training and testing"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N"
    )
    threads: int = Field(
        0, ge=0, description="torch threads of a process; 0 = 1 for vit-digits, else cores / jobs"
    )
    jobs: int = Field(1, ge=1, description="clients trained at once (in-process engine)")
    seed: int = Field(1, ge=0, description="seed of every random stream of the run")
    engine: Literal["local", "flwr"] = Field(
        "local", description="local = in this process; flwr = Flower's runtime on Ray"
    )
    run_name: str = Field(
        "auto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$",
        description="folder of the run inside run-dir; auto = from data set, strategy and seed",
    )
    run_dir: str = Field("runs", min_length=1, description="folder that holds run folders")
    cache_dir: str = Field(
        "", description="decoded data, base weights and frozen blocks; empty = ~/.cache/fedfrozen"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        """Refuse true and false, which Python would take for the numbers 1 and 0."""
        if isinstance(value, bool):
            raise PydanticCustomError("boolean", "should not be true or false")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse keys that contradict each other or that would silently do nothing."""
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterable[str]:
        yield from self._unavailable()
        yield from self._without_effect()
        yield from self._freeze_problems()
        yield from self._data_problems()

    def _unavailable(self) -> Iterable[str]:
        for key, names in NOT_YET.items():
            if (value := getattr(self, key)) in names:
                yield f"{key}={value} is not available in this version; choose {self._can(key)}"
        if self.compression != "none":
            yield (
                f"compression={self.compression} is not available in this version; "
                "use compression=none"
            )

    @classmethod
    def _can(cls, key: str) -> str:
        """Return the values of a key that this version has, as words."""
        choices = getattr(cls.model_fields[key].annotation, "__args__", ())
        names = [name for name in choices if name not in NOT_YET[key]]
        return " or ".join(names) if names else f"another {key}"

    def _is_set(self, key: str) -> bool:
        """Whether a key has another value than its default."""
        field = key.replace("-", "_")
        return bool(getattr(self, field) != type(self).model_fields[field].default)

    def _without_effect(self) -> Iterable[str]:
        for key, other, needed in ACTS_WITH:
            value, having = (getattr(self, name.replace("-", "_")) for name in (key, other))
            if self._is_set(key) and having not in needed:
                default = type(self).model_fields[key.replace("-", "_")].default
                can = [name for name in needed if name not in NOT_YET.get(other, ())]
                yield (
                    f"{key}={value} has no effect with {other}={having}; leave it at {default}"
                    + (f" or use {other}={' or '.join(can)}" if can else "")
                )
        if self.local_steps > 0 and self._is_set("local-epochs"):
            yield (
                f"local-steps={self.local_steps} and local-epochs={self.local_epochs} are both "
                "set; set only one of them"
            )
        if self.value_l2 > 0 and not self.freezes:
            yield (
                f"value-l2={self.value_l2} acts after a freeze and this run has none; set a "
                "warm-up shorter than the run or value-l2=0"
            )
        if self.jobs > 1 and self.engine == "flwr":
            yield (
                f"jobs={self.jobs} is for engine=local; with engine=flwr the number of clients "
                "at once follows from threads, so set jobs=1"
            )

    def _freeze_problems(self) -> Iterable[str]:
        if self.warmup_rounds >= 0 and self.warmup_ratio >= 0:
            yield (
                f"warmup-rounds={self.warmup_rounds} and warmup-ratio={self.warmup_ratio} are "
                "both set; set only one of them"
            )
        if -1 < self.warmup_ratio < 0:
            yield (
                f"warmup-ratio must be in [0, 1] or -1 for not set, got {self.warmup_ratio}; "
                "give the warm-up as a share of rounds"
            )
        if self.warmup_rounds > self.rounds:
            yield (
                f"warmup-rounds must be <= rounds={self.rounds}, got {self.warmup_rounds}; "
                "shorten the warm-up or run more rounds"
            )
        if self.frozen == "all" and max(self.warmup_rounds, self.warmup_ratio) >= 0:
            yield (
                "frozen=all freezes nothing, so a warm-up has no effect; drop the warm-up key "
                "or name what to freeze, for example frozen=query-key"
            )
        if self.frozen == "all" and self.strategy == "fedfrozen":
            yield (
                "strategy=fedfrozen with frozen=all freezes nothing; use strategy=fedavg or "
                "frozen=query-key"
            )

    def _data_problems(self) -> Iterable[str]:
        if -1 < self.public_fraction < 0:
            yield (
                f"public-fraction must be in [0, 1) or -1 for auto, got {self.public_fraction}; "
                "use 0 to give all training data to the clients"
            )
        if self.resolved_weights == "base" and self.resolved_public_fraction == 0:
            yield (
                "weights=base is trained on the public data, but public-fraction=0; set "
                f"public-fraction={DEFAULT_PUBLIC_FRACTION} or weights=none"
            )
        if self.dataset == "digits" and (self.data_dir or self.image_column or self.label_column):
            yield (
                "dataset=digits is bundled, so data-dir, image-column and label-column have no "
                "effect; leave them empty or set dataset to a name for that data"
            )

    # --- what "auto" and -1 stand for ---------------------------------------------------
    @property
    def resolved_model(self) -> str:
        """Return the model name with ``auto`` replaced."""
        if self.model != "auto":
            return self.model
        return DEFAULT_MODELS.get(self.dataset, "vit-b-32")

    @property
    def resolved_weights(self) -> str:
        """Return ``pretrained``, ``base``, ``none`` or a file path."""
        if self.weights != "auto":
            return self.weights
        return "base" if self.resolved_model == DIGITS_MODEL else "pretrained"

    @property
    def resolved_public_fraction(self) -> float:
        """Return the share of training data that no client holds, in [0, 1)."""
        if self.public_fraction >= 0:
            return self.public_fraction
        return DEFAULT_PUBLIC_FRACTION if self.resolved_weights == "base" else 0.0

    @property
    def resolved_frozen(self) -> str:
        """Return the selection of the second phase; ``all`` where nothing is ever frozen."""
        if self.frozen != "auto":
            return self.frozen
        return "query-key" if self.strategy == "fedfrozen" else "all"

    @property
    def resolved_warmup_rounds(self) -> int:
        """Return T_warm in rounds (arXiv:2605.06446); ``rounds`` where nothing is frozen."""
        if self.resolved_frozen == "all":
            return self.rounds
        if self.warmup_rounds >= 0:
            return self.warmup_rounds
        ratio = self.warmup_ratio if self.warmup_ratio >= 0 else DEFAULT_WARMUP_RATIO
        return rounds_of_ratio(ratio, self.rounds)

    @property
    def freezes(self) -> bool:
        """Whether some round of this run trains with frozen entries."""
        return self.resolved_warmup_rounds < self.rounds

    @property
    def resolved_threads(self) -> int:
        """Return the torch threads of a process; vit-digits is too small to gain from more."""
        if self.threads:
            return self.threads
        if self.resolved_model == DIGITS_MODEL:
            return 1
        return max(1, available_cores() // self.jobs)

    @property
    def resolved_run_name(self) -> str:
        """Return the run folder's name."""
        if self.run_name != "auto":
            return self.run_name
        data = re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.dataset).strip("-.") or "data"
        return f"{data}-{self.strategy}-seed{self.seed}"

    def resolved(self) -> dict[str, ConfigValue]:
        """Return what ``auto`` and -1 stand for in this run, by key."""
        prefix = "resolved_"
        names = [name for name in dir(type(self)) if name.startswith(prefix)]
        return {_kebab(name.removeprefix(prefix)): getattr(self, name) for name in names}

    # --- in and out ---------------------------------------------------------------------
    @classmethod
    def keys(cls) -> list[str]:
        """Return every key, kebab-case, in the order of the documentation."""
        return [_kebab(name) for name in cls.model_fields]

    @classmethod
    def from_mapping(cls, *mappings: Mapping[str, Any]) -> Self:
        """Build a config from kebab-case mappings; later ones win.

        Raises
        ------
        ConfigError
            For an unknown key, a value out of range or a contradiction.
        """
        merged: dict[str, Any] = {}
        for mapping in mappings:
            merged.update(mapping)
        if unknown := [key for key in merged if key not in cls.keys()]:
            raise ConfigError(_unknown_key(unknown[0], cls.keys()))
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise ConfigError("\n".join(map(_explain, error.errors()))) from None

    def with_absolute_paths(self) -> Self:
        """Return the config with its paths resolved against the working directory."""
        fields = ["data_dir", "run_dir", "cache_dir"]
        if self.resolved_weights not in NAMED_WEIGHTS:
            fields.append("weights")
        paths = {
            field: str(Path(value).expanduser().absolute())
            for field in fields
            if (value := getattr(self, field))
        }
        return self.model_copy(update=paths)

    def to_mapping(self) -> dict[str, ConfigValue]:
        """Return every key with its value, kebab-case, ready for Flower's run config."""
        return self.model_dump(by_alias=True)


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown config key {key!r}; {hint}`fedfrozen config` lists all keys"


def _explain(error: Any) -> str:
    """Turn one pydantic error into field, rule, value and remedy."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    key = ".".join(str(part) for part in error["loc"][:1]).replace("_", "-")
    field = RunConfig.model_fields[key.replace("-", "_")]
    rule = error["msg"].removeprefix("Input ")
    return f"{key}: {rule}, got {error['input']!r}; default {field.default!r} ({field.description})"


def parse_overrides(texts: Iterable[str]) -> dict[str, ConfigValue]:
    """Parse ``key=value`` texts; one text may hold several, as ``"lr=0.1 rounds=3"``."""
    pairs = [pair for text in texts for pair in re.split(r"\s+(?=[A-Za-z][\w-]*=)", text.strip())]
    return dict(map(parse_override, pairs))


def parse_override(text: str) -> tuple[str, ConfigValue]:
    """Parse one ``key=value``; quotes around a value may be left out.

    A key that takes a string gets the text as it stands; any other value is read as TOML.
    """
    key, sign, raw = (part.strip() for part in text.partition("="))
    if not sign or not key:
        raise ConfigError(f"expected key=value, got {text!r}; for example lr=0.01")
    quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\""
    field = RunConfig.model_fields.get(key.replace("-", "_"))
    if field is not None and field.annotation is str:
        return key, raw[1:-1] if quoted else raw
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{key} takes a string, number or boolean, got {raw!r}")
    return key, value


def read_experiment(path: Path) -> dict[str, Any]:
    """Read the flat config keys of an experiment TOML.

    Raises
    ------
    ConfigError
        If the file is missing, no TOML, or a grid of runs.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"experiment file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment file {str(path)!r} is not valid TOML: {error}") from None
    if "sweep" in content:
        raise ConfigError(
            f"{str(path)!r} has a [sweep], which is a grid of runs, and this is one run; take it "
            "out and give single values"
        )
    return content
