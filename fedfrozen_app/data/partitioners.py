"""Rules that divide labelled examples among clients, and class-wise subsets.

Each rule takes the labels (or writers) of the examples to divide and returns, for each
client, the sorted positions of its examples. Every example goes to exactly one client
(``natural`` leaves out the examples of writers that are not chosen). Draws depend only on
the seed.
"""

import bisect
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fedfrozen_app.config import ConfigError
from fedfrozen_app.seeds import numpy_generator

Indices = npt.NDArray[np.int64]

# Dirichlet draws before giving up; 10,000 clients and 100 classes take seconds for all.
MAX_DRAWS = 100


# --- subsets ----------------------------------------------------------------------------
def balanced_subset(labels: Indices, size: int, rng: np.random.Generator) -> Indices:
    """Return sorted positions of ``size`` examples, as equally many per class as there are.

    A class with too few gives all it has; the others share the rest.
    """
    counts = np.bincount(labels)
    # The highest level up to which every class can be filled; who gets one more is drawn.
    levels = range(counts.max() + 1)
    level = bisect.bisect_right(levels, size, key=lambda n: np.minimum(counts, n).sum()) - 1
    take = np.minimum(counts, level)
    larger = np.flatnonzero(counts > level)
    take[rng.permutation(larger)[: size - take.sum()]] += 1
    return _take_by_class(labels, take, rng)


def stratified_subset(labels: Indices, size: int, rng: np.random.Generator) -> Indices:
    """Return sorted positions of ``size`` examples, the same share of every class."""
    quotas = np.bincount(labels) * size / max(1, len(labels))
    take = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(take - quotas, kind="stable")  # largest remainder first
    take[by_remainder[: size - take.sum()]] += 1
    return _take_by_class(labels, take, rng)


def _take_by_class(labels: Indices, take: Indices, rng: np.random.Generator) -> Indices:
    chosen = [
        rng.permutation(positions)[:count]
        for positions, count in zip(_by_value(labels), take, strict=True)
    ]
    return _sorted(np.concatenate(chosen))


def _by_value(values: Indices, num_values: int = 0) -> list[Indices]:
    """Return the sorted positions of each value 0, 1, ..., at least ``num_values`` of them."""
    order = np.argsort(values, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(values, minlength=num_values))[:-1])


def _sorted(positions: Iterable[int]) -> Indices:
    # Sorted, so that a client's images are read from disk front to back.
    return np.sort(np.asarray(positions, dtype=np.int64))


# --- rules ------------------------------------------------------------------------------
def divide_iid(num_examples: int, num_clients: int, seed: int) -> list[Indices]:
    """Deal shuffled examples evenly: client sizes differ by at most one."""
    shuffled = numpy_generator(seed, "partition-iid").permutation(num_examples)
    return [_sorted(part) for part in np.array_split(shuffled, num_clients)]


def divide_dirichlet(
    labels: Indices, num_clients: int, alpha: float, min_size: int, seed: int
) -> list[Indices]:
    """Divide each class by proportions p_c ~ Dir(alpha, ..., alpha) over the clients.

    The class-wise draw of Yurochkin et al. (arXiv:1905.12022) and of Flower Datasets, with
    the cuts rounded to the nearest example. Rounding them down, as is common, hands the
    last client the remainder: one example of nearly every class, however small alpha is.
    A draw that leaves a client with fewer than ``min_size`` examples is repeated.

    Raises
    ------
    ConfigError
        When no draw gives every client ``min_size`` examples.
    """
    by_class = _by_value(labels)
    counts = np.array([len(positions) for positions in by_class])
    rng = numpy_generator(seed, "partition-dirichlet")
    fewest_short = num_clients
    for _ in range(MAX_DRAWS):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(counts))
        cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * counts[:, None]).astype(np.int64)
        held = np.diff(cuts, axis=1, prepend=0, append=counts[:, None])  # [class, client]
        short = int((held.sum(axis=0) < min_size).sum())
        if short == 0:
            return _deal_out(by_class, held, rng)
        fewest_short = min(fewest_short, short)
    raise ConfigError(
        f"{MAX_DRAWS} Dirichlet draws with alpha={alpha} of {len(labels)} examples all left at "
        f"least {fewest_short} of num-clients={num_clients} clients below min-partition-size="
        f"{min_size}; raise alpha, use fewer clients, or lower min-partition-size (0 allows "
        "clients without data)"
    )


def _deal_out(by_class: list[Indices], held: Indices, rng: np.random.Generator) -> list[Indices]:
    """Give each client ``held[class, client]`` random examples of each class."""
    owner = np.empty(held.sum(), dtype=np.int64)
    for positions, per_client in zip(by_class, held, strict=True):
        owner[rng.permutation(positions)] = np.repeat(np.arange(held.shape[1]), per_client)
    return _by_value(owner, held.shape[1])


def divide_by_class(
    labels: Indices, num_clients: int, classes_per_client: int, seed: int
) -> list[Indices]:
    """Give each client shards of exactly ``classes_per_client`` classes.

    The label-sorted shards of McMahan et al. (arXiv:1602.05629, section 3), cut at class
    borders so that a shard never holds two classes: every class is cut into about equal
    shards, large classes into more of them, and no client gets two shards of one class.

    Raises
    ------
    ConfigError
        When the classes cannot be cut so.
    """
    by_class = [positions for positions in _by_value(labels) if len(positions)]
    sizes = np.array([len(positions) for positions in by_class])
    rng = numpy_generator(seed, "partition-shard")
    shards = _shards_per_class(sizes, num_clients, classes_per_client)
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for positions, holders in zip(
        by_class, _deal(shards, num_clients, classes_per_client, rng), strict=True
    ):
        pieces = np.array_split(rng.permutation(positions), len(holders))
        for client, piece in zip(rng.permutation(holders), pieces, strict=True):
            parts[client].append(piece)
    return [_sorted(np.concatenate(pieces)) for pieces in parts]


def _shards_per_class(sizes: Indices, num_clients: int, classes_per_client: int) -> Indices:
    """Return into how many shards each class is cut, keeping the shards as large as can be."""
    total, num_classes = num_clients * classes_per_client, len(sizes)
    if classes_per_client > num_classes:
        raise ConfigError(
            f"classes-per-client must be <= {num_classes}, the number of classes, "
            f"got {classes_per_client}; lower it"
        )
    if total < num_classes:
        raise ConfigError(
            f"num-clients={num_clients} with classes-per-client={classes_per_client} can hold "
            f"only {total} of {num_classes} classes; raise one of them"
        )
    most = np.minimum(sizes, num_clients)
    if total > most.sum():
        raise ConfigError(
            f"num-clients={num_clients} with classes-per-client={classes_per_client} needs "
            f"{total} shards, but the classes can be cut into {most.sum()} at most; lower one "
            "of them or use more training examples"
        )
    shards = np.ones(num_classes, dtype=np.int64)
    for _ in range(total - num_classes):
        # The class whose next cut leaves the largest shards (D'Hondt's rule).
        shards[np.argmax(np.where(shards < most, sizes / (shards + 1), 0))] += 1
    return shards


def _deal(
    shards: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[list[int]]:
    """Return each class's clients: all different, and each client in ``classes_per_client``.

    Taking the classes with the most shards left, ties at random, never runs out.
    """
    left = shards.copy()
    holders: list[list[int]] = [[] for _ in shards]
    for client in range(num_clients):
        ranked = np.lexsort((rng.random(len(left)), -left))
        for chosen in ranked[:classes_per_client]:
            holders[chosen].append(client)
            left[chosen] -= 1
    return holders


def divide_articles(articles: Indices, num_clients: int, min_size: int, seed: int) -> list[Indices]:
    """Deal out whole articles; ``num_clients`` is an upper bound.

    ``articles`` is the article of each block. In random order each goes to the client with the
    fewest blocks so far, so that all are used and clients hold about equally many blocks. With
    as many clients as articles each client has one. Clients with fewer blocks than ``min_size``
    are an error.

    Raises
    ------
    ConfigError
        When there is one article only, or a client would hold too few blocks.
    """
    by_article = [positions for positions in _by_value(articles) if len(positions)]
    if len(by_article) < 2:
        raise ConfigError(
            "partitioner=natural divides text by its articles and found no headings "
            "(' = Title = ' between blank lines); use partitioner=iid"
        )
    parts: list[list[Indices]] = [[] for _ in range(min(num_clients, len(by_article)))]
    held = np.zeros(len(parts), dtype=np.int64)
    for article in numpy_generator(seed, "partition-articles").permutation(len(by_article)):
        client = int(held.argmin())
        parts[client].append(by_article[article])
        held[client] += len(by_article[article])
    if held.min() < min_size:
        raise ConfigError(
            f"the smallest client of partitioner=natural would hold {held.min()} blocks, below "
            f"min-partition-size={min_size}; use fewer clients or lower min-partition-size"
        )
    return [_sorted(np.concatenate(pieces)) for pieces in parts]


def divide_natural(writers: Indices, num_clients: int, min_size: int, seed: int) -> list[Indices]:
    """Give each client one writer; ``num_clients`` is an upper bound.

    With more writers than clients a seeded choice is taken and the other writers' examples
    are left out: a client stays one person. Grouping would use them, but mix hands and so
    take away what makes this partition natural. Writers with fewer than ``min_size``
    examples (and at least one) are never chosen. Clients are in the writers' order.

    Raises
    ------
    ConfigError
        When no writer has enough examples.
    """
    floor = max(1, min_size)
    enough = [positions for positions in _by_value(writers) if len(positions) >= floor]
    if not enough:
        raise ConfigError(
            f"no writer has min-partition-size={min_size} training examples (the most is "
            f"{np.bincount(writers).max()}); lower min-partition-size"
        )
    rng = numpy_generator(seed, "partition-natural")
    return [enough[i] for i in _sorted(rng.permutation(len(enough))[:num_clients])]
