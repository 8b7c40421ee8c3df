"""What keys of a run config cannot go together, or would change nothing about the result."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfrozen_app.config import RunConfig

ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")  # server optimisers with a second moment
LANGUAGE_MODELS = ("tinygpt", "tinygpt-mini")
TEXT_DATASETS = ("wikitext2", "Salesforce/wikitext")
# (key, other key, values of the other with which the key acts): elsewhere it would do nothing
ACTS_WITH = (
    ("proximal-mu", "strategy", ("fedprox", "fednova")),
    ("server-lr", "strategy", ("scaffold", "fedavgm", *ADAPTIVE)),
    ("server-momentum", "strategy", ("fedavgm",)),
    ("nesterov", "strategy", ("fedavgm",)),
    ("beta1", "strategy", ADAPTIVE),
    ("beta2", "strategy", ("fedadam", "fedyogi")),
    ("tau", "strategy", ADAPTIVE),
    ("bias-correction", "strategy", ("fedadam",)),
    ("latent-dim", "strategy", ("latent",)),
    ("latent-rank", "strategy", ("latent",)),
    ("latent-bits", "strategy", ("latent",)),
    ("generator", "strategy", ("latent",)),
    ("generator-memory", "strategy", ("latent",)),
    ("generator-memory", "generator", ("gaussian-qr",)),
    ("latent-lr", "strategy", ("latent",)),
    ("latent-weight-decay", "strategy", ("latent",)),
    ("latent-clip-norm", "strategy", ("latent",)),
    ("weighting", "strategy", ("fedavg", "fedfrozen", "latent")),
    ("alpha", "partitioner", ("dirichlet",)),
    ("classes-per-client", "partitioner", ("shard",)),
    ("momentum", "optimizer", ("sgd",)),
)


def contradictions(config: "RunConfig") -> Iterable[str]:
    """Yield what is wrong with a config whose values are each in range, remedy included."""
    yield from _without_effect(config)
    yield from _rule_problems(config)
    yield from _freeze_problems(config)
    yield from _data_problems(config)
    yield from _local_problems(config)
    yield from _text_problems(config)
    yield from _client_test_problems(config)


def _client_test_problems(config: "RunConfig") -> Iterable[str]:
    if config.fraction_evaluate == 0 and _is_set(config, "client-test-fraction"):
        yield (
            f"client-test-fraction={config.client_test_fraction} has no effect with "
            "fraction-evaluate=0; leave it at 0.2 or set fraction-evaluate"
        )
    if config.fraction_evaluate > 0 and config.byte_budget > 0:
        yield (
            f"fraction-evaluate={config.fraction_evaluate} sends models that "
            f"byte-budget={config.byte_budget} does not foresee; set one of them to 0"
        )


def _is_set(config: "RunConfig", key: str) -> bool:
    """Whether a key has another value than its default."""
    field = key.replace("-", "_")
    return bool(getattr(config, field) != type(config).model_fields[field].default)


def _without_effect(config: "RunConfig") -> Iterable[str]:
    for key, other, needed in ACTS_WITH:
        value, having = (getattr(config, name.replace("-", "_")) for name in (key, other))
        if _is_set(config, key) and having not in needed:
            default = type(config).model_fields[key.replace("-", "_")].default
            yield (
                f"{key}={value} has no effect with {other}={having}; leave it at {default} or use "
                f"{other}={' or '.join(needed)}"
            )
    if config.resolved_local_steps > 0 and _is_set(config, "local-epochs"):
        yield (
            f"local-steps={config.local_steps} and local-epochs={config.local_epochs} are both "
            "set; set only one of them"
        )
    if config.value_l2 > 0 and not config.freezes:
        yield (
            f"value-l2={config.value_l2} acts after a freeze and this run has none; set a "
            "warm-up shorter than the run or value-l2=0"
        )
    if config.byte_budget > 0 and config.eval_every != 1:
        yield (
            f"eval-every={config.eval_every} would leave the last round that byte-budget="
            f"{config.byte_budget} pays for untested; set eval-every=1"
        )
    keeps = config.strategy == "scaffold" or config.compression.startswith(("topk", "powersgd"))
    if config.resume and config.engine == "flwr" and keeps:
        yield (
            "resume=true cannot go on here: with engine=flwr what clients keep "
            f"(strategy={config.strategy}, compression={config.compression}) ends with Flower's "
            "run; use engine=local"
        )
    if config.jobs > 1 and config.engine == "flwr":
        yield (
            f"jobs={config.jobs} is for engine=local; with engine=flwr the number of clients "
            "at once follows from threads, so set jobs=1"
        )


def _rule_problems(config: "RunConfig") -> Iterable[str]:
    for key in ("compression", "broadcast"):
        if config.strategy == "latent" and _is_set(config, key):
            yield (
                f"{key}={getattr(config, key)} is for weights and with strategy=latent a latent "
                f"travels; leave {key} at none and use latent-bits"
            )
    if config.strategy == "latent" and config.value_l2 > 0:
        yield (
            f"value-l2={config.value_l2} acts on weights and with strategy=latent a latent trains; "
            "set value-l2=0 (latent-weight-decay acts on the latent)"
        )
    if config.strategy == "latent" and config.latent_rank > config.latent_dim:
        yield (
            f"latent-rank must be <= latent-dim={config.latent_dim}, got {config.latent_rank}; "
            "lower the rank or raise the dimension"
        )
    if config.oversized_updates != "refuse" and config.max_update_norm == "none":
        yield (
            f"oversized-updates={config.oversized_updates} has no effect with "
            "max-update-norm=none; set max-update-norm, for example to 10x"
        )
    if -1 < config.proximal_mu < 0:
        yield (
            f"proximal-mu must be >= 0 or -1 for auto, got {config.proximal_mu}; use 0 for FedAvg"
        )
    if -1 < config.server_lr <= 0:
        yield (
            f"server-lr must be > 0 or -1 for auto, got {config.server_lr}; a rate of 0 would "
            "never move the model"
        )
    if config.optimizer != "sgd" and config.strategy in ("scaffold", "fednova"):
        yield (
            f"strategy={config.strategy} counts the clients' gradient steps, so it needs "
            f"optimizer=sgd, got optimizer={config.optimizer}; set optimizer=sgd and a lr for it"
        )
    if config.work == "fixed" and isinstance(config.local_steps, str):
        yield (
            f"local-steps={config.local_steps} is a range and work=fixed takes one number; set "
            "work=random or a single local-steps"
        )
    if config.work == "random" and config.work_range[0] == config.work_range[1]:
        yield (
            f"work=random has nothing to draw from {config.work_range[0]} to "
            f"{config.work_range[1]}; raise local-steps or local-epochs, or set work=fixed"
        )


def _freeze_problems(config: "RunConfig") -> Iterable[str]:
    if config.warmup_rounds >= 0 and config.warmup_ratio >= 0:
        yield (
            f"warmup-rounds={config.warmup_rounds} and warmup-ratio={config.warmup_ratio} are "
            "both set; set only one of them"
        )
    if -1 < config.warmup_ratio < 0:
        yield (
            f"warmup-ratio must be in [0, 1] or -1 for not set, got {config.warmup_ratio}; "
            "give the warm-up as a share of rounds"
        )
    if config.warmup_rounds > config.rounds:
        yield (
            f"warmup-rounds must be <= rounds={config.rounds}, got {config.warmup_rounds}; "
            "shorten the warm-up or run more rounds"
        )
    if config.frozen == "head" and config.head != "trainable":
        yield (
            f"frozen=head trains only the head and head={config.head} never trains it, so nothing "
            "would train; set head=trainable or freeze something else"
        )
    warmup_set = max(config.warmup_rounds, config.warmup_ratio) >= 0
    if config.frozen == "all" and warmup_set and config.strategy != "latent":
        yield (
            "frozen=all freezes nothing, so a warm-up has no effect; drop the warm-up key "
            "or name what to freeze, for example frozen=query-key"
        )
    if config.frozen == "all" and config.strategy == "fedfrozen":
        yield (
            "strategy=fedfrozen with frozen=all freezes nothing; use strategy=fedavg or "
            "frozen=query-key"
        )


def _data_problems(config: "RunConfig") -> Iterable[str]:
    if -1 < config.public_fraction < 0:
        yield (
            f"public-fraction must be in [0, 1) or -1 for auto, got {config.public_fraction}; "
            "use 0 to give all training data to the clients"
        )
    if config.resolved_weights == "base" and config.resolved_public_fraction == 0:
        yield (
            "weights=base is trained on the public data, but public-fraction=0; set "
            "public-fraction=0.15 or weights=none"
        )
    if config.dataset == "digits" and (
        config.data_dir or config.image_column or config.label_column
    ):
        yield (
            "dataset=digits is bundled, so data-dir, image-column and label-column have no "
            "effect; leave them empty or set dataset to a name for that data"
        )


def _local_problems(config: "RunConfig") -> Iterable[str]:
    """Yield what cannot be where each node has data of its own, which nobody else sees."""
    if config.partitioner != "local":
        return
    if config.dataset == "digits" or config.reads_text:
        yield (
            f"partitioner=local is for nodes with images of their own, got dataset="
            f"{config.dataset} and model={config.resolved_model}; use iid, dirichlet or shard, or "
            "give the data a name and every node a data-dir"
        )
    for key in ("public-fraction", "validation-fraction", "min-partition-size"):
        if _is_set(config, key):
            yield (
                f"{key}={getattr(config, key.replace('-', '_'))} has no effect with "
                "partitioner=local: all training examples of a node are its client's, all those of "
                "the server public; leave it out"
            )


def _text_problems(config: "RunConfig") -> Iterable[str]:
    model = config.resolved_model
    if not config.reads_text:
        if config.dataset in TEXT_DATASETS:
            yield (
                f"dataset={config.dataset} is text and model={model} reads images; use "
                f"model={' or '.join(LANGUAGE_MODELS)}"
            )
        if _is_set(config, "context-length"):
            yield (
                f"context-length={config.context_length} has no effect with model={model}, which "
                f"reads images; leave it at 128 or use model={' or '.join(LANGUAGE_MODELS)}"
            )
        return
    if config.dataset == "digits":
        yield f"model={model} reads text and dataset=digits holds images; use dataset=wikitext2"
    if config.partitioner in ("dirichlet", "shard"):
        yield (
            f"partitioner={config.partitioner} divides classes and text has none; use "
            "partitioner=iid, or natural (whole articles)"
        )
    for key in ("image-size", "image-column", "label-column", "augment"):
        value = getattr(config, key.replace("-", "_"))
        if _is_set(config, key) and value != "none":
            yield f"{key}={value} is for images and model={model} reads text; leave it out"
