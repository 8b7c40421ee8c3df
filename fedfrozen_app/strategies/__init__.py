"""Federated rules that speak Flower's message API."""

from fedfrozen_app.strategies.base import ServerRule, Update
from fedfrozen_app.strategies.fedavg import FedAvg
from fedfrozen_app.strategies.fedfrozen import FedFrozen
from fedfrozen_app.strategies.replies import QuorumError, RoundReport
from fedfrozen_app.strategies.schedule import FreezeSchedule

__all__ = [
    "FedAvg",
    "FedFrozen",
    "FreezeSchedule",
    "QuorumError",
    "RoundReport",
    "ServerRule",
    "Update",
]
