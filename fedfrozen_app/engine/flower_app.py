"""What Flower's runtime is given for one run: resources, app folder, environment."""

import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
import torch

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig, available_cores
from fedfrozen_app.runs.provenance import REVISION_VARIABLE, git_revision

PROGRAMS = ("flwr", "flower-superlink", "flower-superexec", "flwr-simulation")
# Asking every node one question took 0.3 s for 100 nodes, 5 s for 1000 and 32 s for 4000.
MAX_NODES = 1000


def resolved_config(config: RunConfig) -> RunConfig:
    """Return the config as the apps need it: absolute paths, the engine, a visible device.

    The runtime's processes work in a folder of their own, so that a relative path would
    mean another file there.
    """
    changes: dict[str, ConfigValue] = {"engine": "flwr"}
    if config.device.startswith("cuda:"):
        changes["device"] = "cuda"  # the runtime is shown this one GPU, as its number 0
    return RunConfig.from_mapping(config.with_absolute_paths().to_mapping(), changes)


@dataclass(frozen=True)
class Resources:
    """What Ray gives the clients.

    Attributes
    ----------
    nodes
        Simulated SuperNodes.
    cpus
        CPU cores per client.
    gpus
        GPUs per client; a fraction when clients share one.
    total_cpus
        Cores Ray may use in all: it starts ``total_cpus // cpus`` client processes.
    environment
        Variables for the runtime's processes.
    """

    nodes: int
    cpus: int = 1
    gpus: float = 0.0
    total_cpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def federation_config(self) -> str:
        """Return the value of ``flwr run --federation-config``."""
        return (
            f"num-supernodes={self.nodes} client-resources-num-cpus={self.cpus} "
            f"client-resources-num-gpus={self.gpus} init-args-num-cpus={self.total_cpus}"
        )


def simulation_resources(config: RunConfig) -> Resources:
    """Divide this machine among the clients of a run.

    A client process gets as many cores as it has torch threads, and there are never more
    processes than a round has clients, as each costs seconds and memory. There is one node
    per client up to ``MAX_NODES``: a node's state is then its client's. Where clients share
    a node, their messages may run at once in two processes, and of what both leave in the
    node's state only one survives.

    Raises
    ------
    ConfigError
        If ``device`` asks for a GPU that is not there.
    """
    cores = available_cores()
    cpus = min(config.resolved_threads, cores)
    cohort = math.ceil(config.fraction_train * config.num_clients)
    processes = min(cores // cpus, cohort)
    gpus, environment = _visible_gpus(config.device)
    # Ray counts in steps of 1e-4; rounded down so that all the shares fit on the GPU.
    share = math.floor(1e4 / math.ceil(processes / gpus)) / 1e4 if gpus else 0.0
    nodes = min(config.num_clients, MAX_NODES)
    return Resources(nodes, cpus, share, processes * cpus, environment)


def _visible_gpus(device: str) -> tuple[int, dict[str, str]]:
    """Return how many GPUs the clients may use, and the variable that says which."""
    name, _, number = device.partition(":")
    if name == "cpu":
        return 0, {}
    count = torch.cuda.device_count()
    if name == "cuda" and int(number or 0) >= count:
        raise ConfigError(
            f"device={device} needs a CUDA GPU of that number and this machine shows {count}; "
            "use device=auto or device=cpu"
        )
    if not number:
        return count, {}
    shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return 1, {"CUDA_VISIBLE_DEVICES": shown[int(number)] if shown != [""] else number}


def write_app(folder: Path, package: Path, run_config: Mapping[str, ConfigValue]) -> None:
    """Write a Flower app folder around a package.

    Parameters
    ----------
    folder
        Folder to create.
    package
        Package folder with ``server_app.py`` and ``client_app.py``. Only its ``.py`` files
        are taken: data and weights do not belong into a Flower app bundle.
    run_config
        The complete run config. It stands in the app itself, as TOML: every value arrives
        with its exact type and no command line has to quote it.
    """
    for source in package.rglob("*.py"):
        target = folder / package.name / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    app = {
        "publisher": "fedfrozen",
        "components": {
            "serverapp": f"{package.name}.server_app:app",
            "clientapp": f"{package.name}.client_app:app",
        },
        "config": dict(run_config),
    }
    project = {
        "name": "fedfrozen",
        "version": "0.0.0",
        "description": "One run of fedfrozen.",
        "license": "Apache-2.0",
    }
    content = {"project": project, "tool": {"flwr": {"app": app}}}
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")


def runtime_environment(scratch: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the runtime's processes: offline, apart, ours to find.

    Raises
    ------
    ConfigError
        If one of Flower's programs is not installed.
    """
    # The user's own Flower settings (a database, an event log) and Ray cluster stay out.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FLWR_") and name != "FORCE_COLOR"
    }
    no_proxy = ",".join(
        filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"])
    )
    return {
        **kept,
        **extra,
        "PATH": _search_path(),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "TMPDIR": str(scratch),
        "PYTHONIOENCODING": "utf-8",
        "PYTHONUNBUFFERED": "1",
        REVISION_VARIABLE: git_revision() or "",
        "FLWR_HOME": str(scratch / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(scratch),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns about its own default
    }


def _search_path() -> str:
    """Return PATH with this Python's programs first: a SuperLink starts others by name."""
    folders = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    for program in PROGRAMS:
        if shutil.which(program, path=path) is None:
            raise ConfigError(
                f"engine=flwr needs the program {program!r}, which is not installed; "
                "install flwr[simulation] into this Python, or use engine=local"
            )
    return path
