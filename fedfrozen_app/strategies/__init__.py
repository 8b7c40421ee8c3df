"""Federated rules that speak Flower's message API."""

from fedfrozen_app.strategies.base import ServerRule, State, Update
from fedfrozen_app.strategies.fedadagrad import FedAdagrad
from fedfrozen_app.strategies.fedadam import FedAdam
from fedfrozen_app.strategies.fedavg import FedAvg
from fedfrozen_app.strategies.fedavgm import FedAvgM
from fedfrozen_app.strategies.fedfrozen import FedFrozen
from fedfrozen_app.strategies.fednova import FedNova
from fedfrozen_app.strategies.fedprox import FedProx
from fedfrozen_app.strategies.fedyogi import FedYogi
from fedfrozen_app.strategies.latent import FedFrozenLatent, LatentConfig
from fedfrozen_app.strategies.replies import QuorumError, RoundReport, UnfitClientsError
from fedfrozen_app.strategies.scaffold import Scaffold
from fedfrozen_app.strategies.schedule import FreezeSchedule

__all__ = [
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedFrozen",
    "FedFrozenLatent",
    "FedNova",
    "FedProx",
    "FedYogi",
    "FreezeSchedule",
    "LatentConfig",
    "QuorumError",
    "RoundReport",
    "Scaffold",
    "ServerRule",
    "State",
    "UnfitClientsError",
    "Update",
]
