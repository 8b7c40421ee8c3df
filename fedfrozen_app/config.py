"""Every run-config key in one place: type, default, range and meaning.

The same kebab-case keys are used by ``[tool.flwr.app.config]``, an experiment TOML,
``-c key=value`` and ``flwr run --run-config``. Nothing else in the package parses
configuration. Flower's run config holds only str, int, float and bool, so "not set"
is written as ``"auto"`` for names and ``-1`` for numbers.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedfrozen_app.config_rules import (
    ADAPTIVE,
    LANGUAGE_MODELS,
    TEXT_DATASETS,
    contradictions,
)
from fedfrozen_app.norm_limit import read_limit
from fedfrozen_app.transport.codec_name import read_codec_name

ConfigValue = str | int | float | bool

DEFAULT_WARMUP_RATIO = 0.4
DEFAULT_PUBLIC_FRACTION = 0.15
DEFAULT_PROXIMAL_MU = 0.01
DEFAULT_ADAPTIVE_LR = 0.01
DIGITS_MODEL = "vit-digits"

NAMED_WEIGHTS = ("auto", "pretrained", "base", "none")  # any other value is a file

# The models of the FedFrozen paper's experiments (arXiv:2605.06446) by data set.
DEFAULT_MODELS = {"digits": DIGITS_MODEL, "fashion-mnist": DIGITS_MODEL, "femnist": "vit-s-16"} | (
    dict.fromkeys(TEXT_DATASETS, LANGUAGE_MODELS[0])
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
        "wikitext2, or the Hugging Face hub id of an image data set (of text: for a language "
        "model)",
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
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training examples that no client holds, on which settings are "
        "compared; tested as often as the test set",
    )
    augment: Literal["auto", "none", "crop", "crop-flip"] = Field(
        "auto", description="training augmentation; auto = what fits the data set"
    )
    # --- partitions -------------------------------------------------------------------
    partitioner: Literal["iid", "dirichlet", "shard", "natural", "local"] = Field(
        "dirichlet",
        description="how the training data is divided among the clients; natural = a client is a "
        "writer (femnist), or holds whole articles (text); local = all training data of its node, "
        "which no other machine sees (deployments)",
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
        description="vit-digits, vit-b-32, vit-s-16, the name of any timm Vision Transformer, "
        "resnet18-gn, resnet34-gn, resnet20-gn, tinygpt or tinygpt-mini (text); auto = the "
        "paper's model for the data set",
    )
    weights: str = Field(
        "auto",
        min_length=1,
        description="pretrained (hub), base (short central training on the public fraction), "
        "none, or a safetensors file; auto = base for vit-digits, else pretrained",
    )
    image_size: int = Field(
        0,
        ge=0,
        description="image side in pixels fed to the model; 0 = the model's own (ResNets: 32, or "
        "64 with tinyimagenet)",
    )
    context_length: int = Field(
        128, ge=2, le=4096, description="tokens that a language model reads at once"
    )
    head: Literal["trainable", "frozen-kaiming", "frozen-orthogonal"] = Field(
        "trainable",
        description="classification head; the frozen ones are drawn from the seed (or taken from "
        "a weights file that was trained with the same kind) and never train",
    )
    # --- federation -------------------------------------------------------------------
    strategy: Literal[
        "fedavg",
        "fedfrozen",
        "fedprox",
        "scaffold",
        "fednova",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "latent",
    ] = Field("fedfrozen", description="federated rule; fedfrozen = fedavg + the default freeze")
    rounds: int = Field(12, ge=1, description="communication rounds")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of clients sampled a round")
    fraction_evaluate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of clients that test the model on held-out examples of their own "
        "whenever it is tested, at the end after a round of local training, too; 0 = none",
    )
    client_test_fraction: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of a client's examples that it tests on and does not train on, with "
        "fraction-evaluate",
    )
    min_replies: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the cohort that must reply usably for a round to count",
    )
    round_retries: int = Field(
        2,
        ge=0,
        description="how often a round with fewer replies is tried again, with a fresh cohort, "
        "before the run stops",
    )
    max_update_norm: str = Field(
        "none",
        description="bound on the norm of a client's update: a number such as 5.0, or 10x for ten "
        "times the median of the round before; none = no bound",
    )
    oversized_updates: Literal["refuse", "clip"] = Field(
        "refuse", description="what happens to an update beyond max-update-norm"
    )
    round_timeout: float = Field(
        3600.0, gt=0, description="seconds to wait for a round's replies (Flower runtime)"
    )
    checkpoint_every: int = Field(
        1, ge=0, description="rounds between checkpoints in the run folder; 0 = none"
    )
    resume: bool = Field(
        False, description="go on with the run of this name after its last checkpoint"
    )
    byte_budget: int = Field(
        0,
        ge=0,
        description="payload bytes, both directions together, that a client may spend; the run "
        "ends before a round that would take one beyond; 0 = no limit",
    )
    eval_every: int = Field(1, ge=0, description="central test every N rounds; 0 = only at the end")
    weighting: Literal["auto", "examples", "uniform"] = Field(
        "auto",
        description="the clients' weights in fedavg's mean: their examples, or the same for all; "
        "auto = uniform with strategy=latent, else examples",
    )
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
    local_steps: int | str = Field(
        0,
        description="optimiser steps instead of epochs; 0 = epochs; a range such as 2-9 with "
        "work=random",
    )
    work: Literal["fixed", "random"] = Field(
        "fixed",
        description="random = the steps (or epochs) of a client and round are drawn uniformly "
        "from 1 to local-steps (or local-epochs), or from the range local-steps gives",
    )
    batch_size: int = Field(32, ge=1, le=2**31 - 1, description="examples per optimiser step")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.01, gt=0, description="local learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum, zero at each round's start")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the local optimiser")
    clip_norm: float = Field(0.0, ge=0, description="gradient norm bound; 0 = no clipping")
    proximal_mu: float = Field(
        -1.0,
        ge=-1,
        description="mu of FedProx, also within FedNova; -1 = "
        f"{DEFAULT_PROXIMAL_MU} with strategy=fedprox, else 0",
    )
    # --- server optimisers ------------------------------------------------------------
    server_lr: float = Field(
        -1.0,
        ge=-1,
        description="server learning rate; -1 = "
        f"{DEFAULT_ADAPTIVE_LR} for the adaptive optimisers, else 1",
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="FedAvgM momentum")
    nesterov: bool = Field(False, description="FedAvgM with Nesterov momentum")
    beta1: float = Field(
        0.9, ge=0, lt=1, description="first-moment decay of FedAdam, FedYogi, FedAdagrad"
    )
    beta2: float = Field(0.99, ge=0, lt=1, description="second-moment decay of FedAdam and FedYogi")
    tau: float = Field(1e-3, gt=0, description="adaptivity of FedAdam, FedYogi, FedAdagrad")
    bias_correction: Literal["none", "adam"] = Field(
        "none", description="FedAdam's bias correction; none = the paper"
    )
    # --- latents and compression ------------------------------------------------------
    latent_dim: int = Field(64, ge=1, description="latent entries per mapped tensor")
    latent_rank: int = Field(32, ge=1, description="rank of the frozen factors")
    generator: Literal["gaussian-qr", "sketch"] = Field(
        "gaussian-qr", description="how the frozen factors are drawn"
    )
    generator_memory: Literal["stored", "regenerated"] = Field(
        "stored",
        description="gaussian-qr factors: kept by each client, or made again in every pass",
    )
    latent_lr: float = Field(0.01, gt=0, description="Adam's learning rate for the latent")
    latent_weight_decay: float = Field(1e-4, ge=0, description="weight decay of the latent")
    latent_clip_norm: float = Field(
        1.0, ge=0, description="gradient norm bound of the latent; 0 = no clipping"
    )
    latent_bits: Literal[32, 8, 4] = Field(32, description="bits per latent entry on the wire")
    compression: str = Field(
        "none",
        description="codec of uploads: none, int8, int4, topk:F (the share F of the update's "
        "values) or powersgd:R (updates of rank R); what the last two leave out is sent later",
    )
    broadcast: Literal["none", "int8", "int4"] = Field(
        "none", description="codec of the models that the server sends out"
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
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = Field(
        "none", description="where every round's numbers are shown live, beside the run folder"
    )
    run_name: str = Field(
        "auto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$",
        description="folder of the run inside run-dir; auto = from data set, strategy and seed",
    )
    run_dir: str = Field("runs", min_length=1, description="folder that holds run folders")
    cache_dir: str = Field(
        "",
        description="decoded data, base weights, frozen blocks and, during a run, what "
        "clients keep; empty = ~/.cache/fedfrozen",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false, which Python would take for the numbers 1 and 0."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and wanted is not bool:
            raise PydanticCustomError("boolean", "should not be true or false")
        return value

    @field_validator("local_steps", mode="before")
    @classmethod
    def _steps_or_range(cls, value: Any) -> Any:
        """Take a whole number, or a range as text."""
        if isinstance(value, int) and value >= 0:
            return value
        text = str(value).strip()
        if re.fullmatch(r"\d+", text):
            return int(text)
        if pair := re.fullmatch(r"(\d+)\s*-\s*(\d+)", text):
            low, high = int(pair[1]), int(pair[2])
            if 1 <= low <= high:
                return f"{low}-{high}"
        raise PydanticCustomError("steps", "should be an integer >= 0 or a range such as 2-9")

    @field_validator("compression")
    @classmethod
    def _codec_name(cls, value: str) -> str:
        """Refuse what names no codec."""
        read_codec_name(value)
        return value

    @field_validator("max_update_norm", mode="before")
    @classmethod
    def _norm_limit(cls, value: Any) -> str:
        """Take a number as well as its text."""
        read_limit(str(value))
        return str(value)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse keys that contradict each other or that would silently do nothing."""
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    # --- what "auto" and -1 stand for ---------------------------------------------------
    @property
    def resolved_model(self) -> str:
        """Return the model name with ``auto`` replaced."""
        if self.model != "auto":
            return self.model
        return DEFAULT_MODELS.get(self.dataset, "vit-b-32")

    @property
    def reads_text(self) -> bool:
        """Whether the run's model is a language model."""
        return self.resolved_model in LANGUAGE_MODELS

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
        """Return T_warm in rounds (arXiv:2605.06446); ``rounds`` where nothing is frozen.

        With latents it is 0 unless a warm-up is set: FLITE on the pretrained base.
        """
        latent = self.strategy == "latent"
        if self.resolved_frozen == "all" and not latent:
            return self.rounds
        if self.warmup_rounds >= 0:
            return self.warmup_rounds
        if latent and self.warmup_ratio < 0:
            return 0
        ratio = self.warmup_ratio if self.warmup_ratio >= 0 else DEFAULT_WARMUP_RATIO
        return rounds_of_ratio(ratio, self.rounds)

    @property
    def freezes(self) -> bool:
        """Whether some round of this run trains with more frozen than a frozen head."""
        return self.resolved_warmup_rounds < self.rounds

    @property
    def resolved_local_steps(self) -> int:
        """Return the most optimiser steps of a client and round; 0 = ``local-epochs`` counts."""
        return int(str(self.local_steps).rpartition("-")[2])

    @property
    def work_range(self) -> list[int]:
        """Return the fewest and most steps (or epochs, without ``local-steps``) of a client."""
        most = self.resolved_local_steps or self.local_epochs
        if self.work == "fixed":
            return [most, most]
        is_range = isinstance(self.local_steps, str)
        return [int(str(self.local_steps).partition("-")[0]) if is_range else 1, most]

    @property
    def resolved_weighting(self) -> str:
        """Return how clients weigh in FedAvg's mean."""
        if self.weighting != "auto":
            return self.weighting
        return "uniform" if self.strategy == "latent" else "examples"

    @property
    def resolved_proximal_mu(self) -> float:
        """Return mu of the proximal term, 0 where there is none."""
        if self.proximal_mu >= 0:
            return self.proximal_mu
        return DEFAULT_PROXIMAL_MU if self.strategy == "fedprox" else 0.0

    @property
    def resolved_server_lr(self) -> float:
        """Return eta of the server's step."""
        if self.server_lr > 0:
            return self.server_lr
        return DEFAULT_ADAPTIVE_LR if self.strategy in ADAPTIVE else 1.0

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

    def resolved(self) -> dict[str, Any]:
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
