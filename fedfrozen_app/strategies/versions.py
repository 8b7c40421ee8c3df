"""Which version of what its clients keep counts for a server: :mod:`..transport.client_state`.

A state that a client computes counts once the server has used the reply it came with. Each
message numbers the version that the client makes now, and names the one that came with its
last reply that entered the model. So both sides agree when replies are lost or refused, and
when the server goes back to before a client's last reply, but no further. Each message also
names the selections that came into force since then: what froze leaves the state, and what
trains again starts at zero, on a client that was away as on the server.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from fedfrozen_app.transport.payload import ACCEPTED, PATH, RUN, VERSION, Instructions


class ClientVersions:
    """The versions of a run by client; ``run`` is the token that its clients keep them under."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(16)
        self._version = 0  # rounds that counted; Flower's number starts again with every start
        self._stages: list[str] = []  # the selections so far
        self._accepted: dict[int, tuple[int, int]] = {}  # client -> version, stage of its state

    def instructions(self, client: int) -> Instructions:
        """Return which version a client must go on from, and make now."""
        accepted, stage = self._accepted.get(client, (0, 0))
        return {
            RUN: self.run,
            VERSION: self._version + 1,
            ACCEPTED: accepted,
            PATH: self._stages[stage:],
        }

    def accept(self, clients: Iterable[int]) -> None:
        """Note that a round counts, and whose state of it does."""
        self._version += 1
        now = (self._version, len(self._stages))
        self._accepted.update(dict.fromkeys(clients, now))

    def select(self, spec: str) -> None:
        """Remember a new selection for clients that are away."""
        self._stages.append(spec)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart of the server."""
        return {
            "run": self.run,
            "version": self._version,
            "stages": list(self._stages),
            "clients": {client: list(pair) for client, pair in self._accepted.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state returned by :meth:`state_dict`."""
        self.run, self._version = state["run"], state["version"]
        self._stages = list(state["stages"])
        self._accepted = {int(c): (pair[0], pair[1]) for c, pair in state["clients"].items()}
