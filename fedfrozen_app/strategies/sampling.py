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


class NodesAsTheyCome:
    """Number the connected nodes 0, 1, 2, ... as they are first seen, by id where together.

    A node keeps its number when others leave or join, so that what a rule knows of a client
    stays with it.

    Parameters
    ----------
    timeout, poll_seconds : float
        How long to wait for nodes, and how often to look.
    """

    def __init__(self, *, timeout: float = 600.0, poll_seconds: float = 1.0) -> None:
        self.timeout, self.poll_seconds = timeout, poll_seconds
        self._numbers: dict[int, int] = {}

    def __call__(self, grid: Grid, at_least: int) -> Mapping[int, int]:
        """Return node id by client id.

        Raises
        ------
        TimeoutError
            If fewer than ``at_least`` nodes are connected after ``timeout`` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while len(nodes := sorted(grid.get_node_ids())) < at_least:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{len(nodes)} of {at_least} required nodes are connected after "
                    f"{self.timeout:g} s; start more SuperNodes or lower min_available_nodes"
                )
            time.sleep(self.poll_seconds)
        for node in nodes:
            self._numbers.setdefault(node, len(self._numbers))
        return {self._numbers[node]: node for node in nodes}


def cohort_size(clients: int, fraction: float, minimum: int) -> int:
    """Return max(floor(fraction * N), minimum) of N clients, at most N, as Flower's FedAvg does."""
    # 0.29 * 100 is 28.999...: a fraction of whole clients must not lose one to rounding
    return min(clients, max(int(clients * fraction + 1e-9), minimum))


def sample_cohort(
    clients: Iterable[int],
    fraction: float,
    minimum: int,
    *,
    seed: int,
    server_round: int,
    attempt: int = 0,
) -> list[int]:
    """Return the sorted client ids of a round, drawn without replacement.

    The cohort has :func:`cohort_size` clients. A further ``attempt`` at a round draws afresh.
    """
    everyone = sorted(clients)
    size = cohort_size(len(everyone), fraction, minimum)
    retried = (attempt,) if attempt else ()
    generator = numpy_generator(seed, "cohort", server_round, *retried)
    return sorted(int(client) for client in generator.choice(everyone, size, replace=False))
