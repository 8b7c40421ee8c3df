"""Which examples each client, the public share and the test hold.

In this order: a class-balanced subset (``max-train-examples``), the public share and the
validation share that no client holds (``public-fraction``, ``validation-fraction``), then the
clients. The result depends only on labels,
config and seed, and is kept on disk, because every Flower process needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data import partitioners
from fedfrozen_app.data.cache import cache_root, cached, content_key
from fedfrozen_app.data.datasets import Dataset, ImageDataset
from fedfrozen_app.data.partitioners import Indices
from fedfrozen_app.data.text import TextDataset, article_titles
from fedfrozen_app.seeds import numpy_generator

# Part of every key: raise it when the same settings would give another partition.
PARTITION_VERSION = 2
TITLE_SETTINGS = ("partitioner", "alpha", "classes-per-client", "seed")


@dataclass(frozen=True, eq=False)
class Partition:
    """Sorted rows (int64) of the training split by who holds them, and of the test split.

    With ``partitioner=natural`` there may be fewer clients than ``num-clients``, and rows
    that nobody holds. ``settings`` are the config values that made the partition.
    ``client_tests`` are rows of the training split, too, by the client that tests on them; none
    without ``fraction-evaluate``.
    """

    clients: tuple[Indices, ...]
    public: Indices
    validation: Indices
    test: Indices
    settings: Mapping[str, Any] = field(default_factory=dict)
    client_tests: tuple[Indices, ...] = ()


def make_partition(config: RunConfig, dataset: Dataset) -> Partition:
    """Return the run's partition, the same in every process.

    Raises
    ------
    ConfigError
        When the data cannot be divided as asked; the message names what to change.
    """
    return _with_client_tests(config, _whole_clients(config, dataset))


def _with_client_tests(config: RunConfig, partition: Partition) -> Partition:
    """Take from every client the examples that it tests on; from one of few examples none."""
    if config.fraction_evaluate == 0:
        return partition
    fraction, kept, tests = config.client_test_fraction, [], []
    for client, rows in enumerate(partition.clients):
        generator = numpy_generator(config.seed, "client-test", client)
        size = min(round(fraction * len(rows)), len(rows) - 1)  # one is left to train on
        held_out = generator.permutation(len(rows)) < size
        tests.append(rows[held_out])
        kept.append(rows[~held_out])
    if config.partitioner != "local" and not any(map(len, tests)):
        most = max(map(len, partition.clients), default=0)
        raise ConfigError(
            f"client-test-fraction={fraction} leaves no client an example to test on, as none has "
            f"more than {most}; raise it, give clients more, or take fraction-evaluate=0"
        )
    settings = {**partition.settings, "client-test-fraction": fraction}
    return replace(partition, clients=tuple(kept), client_tests=tuple(tests), settings=settings)


def _whole_clients(config: RunConfig, dataset: Dataset) -> Partition:
    settings = _settings(config)
    if config.partitioner == "local":
        return _own(config, dataset, settings)
    key = content_key(version=PARTITION_VERSION, dataset=dataset.key, **settings)
    folder = cache_root(config) / "partitions" / key

    def build(out: Path) -> dict[str, Any]:
        partition = _draw(config, dataset)
        ends = np.cumsum([len(rows) for rows in partition.clients])
        np.savez(
            out / "rows.npz",
            clients=np.concatenate(partition.clients),
            ends=ends,
            public=partition.public,
            validation=partition.validation,
            test=partition.test,
        )
        return {}

    cached(folder, build)
    with np.load(folder / "rows.npz") as rows:
        clients = np.split(rows["clients"], rows["ends"][:-1])
        public, validation, test = (rows[name] for name in ("public", "validation", "test"))
        return Partition(tuple(clients), public, validation, test, settings)


def _own(config: RunConfig, dataset: Dataset, settings: Mapping[str, Any]) -> Partition:
    """Return all training rows of this machine, for whichever client it is.

    The server is none, so its training rows are the public ones.
    """
    sizes = {"train": config.max_train_examples, "test": config.max_test_examples}
    rows = {
        split: _subset(part.labels.numpy(), sizes[split], config.seed, f"max-{split}-examples")
        for split, part in (("train", dataset.train), ("test", dataset.test))
    }
    nobody = np.empty(0, dtype=np.int64)
    clients = (rows["train"],) * config.num_clients
    return Partition(clients, rows["train"], nobody, rows["test"], settings)


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the config values that the partition depends on."""
    settings: dict[str, Any] = {
        "partitioner": config.partitioner,
        "num-clients": config.num_clients,
        "min-partition-size": config.min_partition_size,
        "max-train-examples": config.max_train_examples,
        "max-test-examples": config.max_test_examples,
        "public-fraction": config.resolved_public_fraction,
        "seed": config.seed,
    }
    if config.validation_fraction > 0:
        settings["validation-fraction"] = config.validation_fraction
    if config.partitioner == "dirichlet":
        settings["alpha"] = config.alpha
    if config.partitioner == "shard":
        settings["classes-per-client"] = config.classes_per_client
    return settings


def _draw(config: RunConfig, dataset: Dataset) -> Partition:
    kept, public, test = _shared_rows(config, dataset)
    pool = np.setdiff1d(kept, public, assume_unique=True)
    labels = dataset.train.labels.numpy()
    key, fraction = "validation-fraction", config.validation_fraction
    validation = pool[_share(labels[pool], key, fraction, config.seed)]
    pool = np.setdiff1d(pool, validation, assume_unique=True)
    clients = _divide(config, dataset, pool)
    return Partition(tuple(pool[positions] for positions in clients), public, validation, test)


def _shared_rows(config: RunConfig, dataset: Dataset) -> tuple[Indices, Indices, Indices]:
    """Return the training rows in use, the public ones among them, and the test rows."""
    train_labels, test_labels = dataset.train.labels.numpy(), dataset.test.labels.numpy()
    kept = _subset(train_labels, config.max_train_examples, config.seed, "max-train-examples")
    test = _subset(test_labels, config.max_test_examples, config.seed, "max-test-examples")
    fraction = config.resolved_public_fraction
    public = kept[_share(train_labels[kept], "public-fraction", fraction, config.seed)]
    return kept, public, test


def central_rows(config: RunConfig, dataset: Dataset) -> tuple[Indices, Indices]:
    """Return the rows of central training (the public share, or all without one) and of the test.

    Raises
    ------
    ConfigError
        When the public share cannot be as large as asked.
    """
    kept, public, test = _shared_rows(config, dataset)
    return (public if len(public) else kept), test


def _subset(labels: Indices, size: int, seed: int, key: str) -> Indices:
    if size == 0 or size >= len(labels):
        return np.arange(len(labels), dtype=np.int64)
    return partitioners.balanced_subset(labels, size, numpy_generator(seed, key))


def _share(labels: Indices, key: str, fraction: float, seed: int) -> Indices:
    """Return the positions of a share of examples: the same share of every class.

    Equal numbers instead would take rare classes away from the clients altogether.
    """
    size = round(fraction * len(labels))
    if fraction > 0 and not 0 < size < len(labels):
        raise ConfigError(
            f"{key}={fraction} of {len(labels)} training examples is {size}; it must "
            "leave some on both sides, so change it or use more training examples"
        )
    return partitioners.stratified_subset(labels, size, numpy_generator(seed, key))


def _divide(config: RunConfig, dataset: Dataset, pool: Indices) -> list[Indices]:
    """Return positions in ``pool`` by client."""
    labels = dataset.train.labels.numpy()[pool]
    count, floor, seed = config.num_clients, config.min_partition_size, config.seed
    if isinstance(dataset, TextDataset) and config.partitioner == "natural":
        articles = dataset.train.articles.numpy()[pool]
        return partitioners.divide_articles(articles, count, floor, seed)
    if isinstance(dataset, ImageDataset) and config.partitioner == "natural":
        if dataset.train.writers is None:
            raise ConfigError(
                f"partitioner=natural needs to know who wrote each example, and "
                f"dataset={dataset.name} has no writer_id column; use dataset=femnist or "
                "partitioner=dirichlet"
            )
        writers = dataset.train.writers.numpy()[pool]
        return partitioners.divide_natural(writers, count, floor, seed)
    # only Dirichlet draws can leave a client without data
    least = floor if config.partitioner == "dirichlet" else max(1, floor)
    if count * least > len(pool):
        raise ConfigError(
            f"num-clients={count} with at least {least} examples each needs at least "
            f"{count * least} examples, but the clients have {len(pool)} to share; "
            "use fewer clients, lower min-partition-size, or more training examples"
        )
    if config.partitioner == "iid":
        return partitioners.divide_iid(len(pool), count, seed)
    if config.partitioner == "dirichlet":
        return partitioners.divide_dirichlet(labels, count, config.alpha, floor, seed)
    clients = partitioners.divide_by_class(labels, count, config.classes_per_client, seed)
    if (smallest := min(map(len, clients))) < floor:
        raise ConfigError(
            f"the smallest client of partitioner=shard would hold {smallest} examples, below "
            f"min-partition-size={floor}; use fewer clients or lower min-partition-size"
        )
    return clients


# --- report and picture -----------------------------------------------------------------
def partition_report(partition: Partition, dataset: Dataset) -> dict[str, Any]:
    """Return what ``partition.json`` holds: settings, sizes, counts and all rows.

    ``class_counts`` is [client][class]; ``clients``, ``public``, ``validation`` and ``test`` are
    rows of the training (or test) split; with ``partitioner=natural``, ``writers`` names each
    client's writer, or ``articles`` its articles. The rows of text are blocks, all of one class.
    With ``partitioner=local`` what the clients hold is theirs to know, and not there.
    """
    if partition.settings.get("partitioner") == "local":
        return {
            "dataset": dataset.name,
            "dataset_key": dataset.key,
            "settings": dict(partition.settings),
            "num_clients": len(partition.clients),
            "num_public_examples": len(partition.public),
            "num_test_examples": len(partition.test),
            "class_names": list(dataset.class_names),
        }
    labels = dataset.train.labels.numpy()
    sizes = [len(rows) for rows in partition.clients]
    num_classes = len(dataset.class_names)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    cell = owner * num_classes + labels[np.concatenate(partition.clients)]
    counts = np.bincount(cell, minlength=len(sizes) * num_classes).reshape(-1, num_classes)
    report = {
        "dataset": dataset.name,
        "dataset_key": dataset.key,
        "settings": dict(partition.settings),
        "num_clients": len(sizes),
        "sizes": sizes,
        "num_client_examples": sum(sizes),
        "num_public_examples": len(partition.public),
        "num_test_examples": len(partition.test),
        "class_names": list(dataset.class_names),
        "class_counts": counts.tolist(),
        "public_class_counts": np.bincount(
            labels[partition.public], minlength=num_classes
        ).tolist(),
        "clients": [rows.tolist() for rows in partition.clients],
        "public": partition.public.tolist(),
        "validation": partition.validation.tolist(),
        "test": partition.test.tolist(),
    }
    if partition.client_tests:
        report["client_tests"] = [rows.tolist() for rows in partition.client_tests]
    if partition.settings.get("partitioner") != "natural":
        return report
    if isinstance(dataset, TextDataset):
        report["articles"] = article_titles(dataset, partition.clients)
    elif dataset.train.writers is not None:
        writers = dataset.train.writers.numpy()
        report["writers"] = [dataset.writer_names[writers[rows[0]]] for rows in partition.clients]
    return report


def draw_partition(report: Mapping[str, Any], path: Path) -> None:
    """Draw the class-by-client counts of a report as a PNG, client sizes above them."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = np.array(report["class_counts"]).T  # [class, client]
    num_classes, num_clients = counts.shape
    figure = Figure(
        figsize=(4.0 + min(10.0, 0.3 * num_clients), 2.8 + min(7.0, 0.25 * num_classes)),
        layout="constrained",
    )
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    top.bar(np.arange(num_clients), report["sizes"], width=0.8, color="0.35")
    top.set_ylabel("examples")
    shown = (key for key in TITLE_SETTINGS if key in report["settings"])
    settings = ", ".join(f"{key}={report['settings'][key]}" for key in shown)
    top.set_title(f"{report['dataset']}: {settings}", fontsize="medium")
    # The square root keeps small counts visible beside clients that hold a whole class.
    image = main.imshow(
        np.ma.masked_equal(counts, 0), aspect="auto", cmap="viridis_r", norm=PowerNorm(0.5, vmin=0)
    )
    main.set_xlabel("client")
    main.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    if num_classes <= 30:
        main.set_yticks(np.arange(num_classes), report["class_names"])
    else:
        main.set_ylabel("class")
    figure.colorbar(image, ax=main, label="examples (blank = none)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
