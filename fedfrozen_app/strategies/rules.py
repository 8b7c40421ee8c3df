"""The rules a run config can name. A new one is a file of its own and a line here."""

from dataclasses import fields
from typing import Any

from fedfrozen_app.config import RunConfig
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.strategies.fedadagrad import FedAdagrad
from fedfrozen_app.strategies.fedadam import FedAdam
from fedfrozen_app.strategies.fedavg import FedAvg
from fedfrozen_app.strategies.fedavgm import FedAvgM
from fedfrozen_app.strategies.fednova import FedNova
from fedfrozen_app.strategies.fedprox import FedProx
from fedfrozen_app.strategies.fedyogi import FedYogi
from fedfrozen_app.strategies.scaffold import Scaffold

RULES: dict[str, type[ServerRule[Any, Any]]] = {
    "fedavg": FedAvg,
    "fedfrozen": FedAvg,  # the freeze is the wrapper's
    "latent": FedAvg,  # and so are latents
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
}


def build_rule(config: RunConfig, *, num_clients: int, **options: Any) -> ServerRule[Any, Any]:
    """Return the config's rule.

    A field of the rule's config dataclass takes the run-config key of its name, or what
    ``auto`` and -1 stand for there.

    Parameters
    ----------
    config : RunConfig
        The run.
    num_clients : int
        N, the clients that hold data.
    **options : Any
        Further arguments of the rule.
    """
    rule = RULES[config.strategy]
    for field in fields(rule.config_type):
        key = field.name
        options[key] = getattr(config, f"resolved_{key}", getattr(config, key))
    if "num_clients" in options:
        options["num_clients"] = num_clients
    return rule(**options)
