"""Who takes part in a round: drawn by client, not by node, from (seed, server_round)."""

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from flwr.serverapp import Grid

from fedfrozen_app.seeds import numpy_generator


class Members(Protocol):
    """Says which node trains which client's partition."""

    def __call__(self, grid: Grid, at_least: int) -> Mapping[int, int]:
        """Return node id by client id; wait until there are ``at_least`` clients."""
        ...


def nodes_in_order(
    grid: Grid, at_least: int, *, timeout: float = 600.0, poll_seconds: float = 1.0
) -> Mapping[int, int]:
    """Take the connected nodes, sorted by id, as clients 0, 1, 2, ...

    Raises
    ------
    TimeoutError
        If fewer than ``at_least`` nodes are connected after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < at_least:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"{len(nodes)} of {at_least} required nodes are connected after {timeout:g} s; "
                "start more SuperNodes or lower min_available_nodes"
            )
        time.sleep(poll_seconds)
    return dict(enumerate(nodes))


def sample_cohort(
    clients: Iterable[int], fraction: float, minimum: int, *, seed: int, server_round: int
) -> list[int]:
    """Return the sorted client ids of a round, drawn without replacement.

    The cohort has ``max(floor(fraction * N), minimum)`` of the N clients, as in Flower's
    FedAvg, and at most N.
    """
    everyone = sorted(clients)
    # 0.29 * 100 is 28.999...: a fraction of whole clients must not lose one to rounding
    size = min(len(everyone), max(int(len(everyone) * fraction + 1e-9), minimum))
    generator = numpy_generator(seed, "cohort", server_round)
    return sorted(int(client) for client in generator.choice(everyone, size, replace=False))
