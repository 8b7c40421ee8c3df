"""Where results come from: config, versions, revision, machine, date and command of a run."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.config import RunConfig

REVISION_VARIABLE, COMMAND_VARIABLE = "FEDFROZEN_REVISION", "FEDFROZEN_COMMAND"
PACKAGES = ("fedfrozen", "flwr", "torch", "torchvision", "timm", "numpy")
# keys that say how and where a run is made, not what comes out
NOT_OF_THE_RESULT = (
    "run-name", "run-dir", "cache-dir", "threads", "jobs", "checkpoint-every", "resume",
    "tracker",
)  # fmt: skip
CHANGED = "+changed"  # ends the revision of a package with changes that are not committed
# keys that may hold a path, whose last part says what it is on every machine
PLACES = ("data-dir", "weights", "run-dir", "cache-dir")


def describe_run(config: RunConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "config": config.to_mapping(),
        "resolved": config.resolved(),
        "seed": config.seed,
        "versions": versions,
        "git_revision": git_revision(),
        "machine": describe_machine(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get(COMMAND_VARIABLE),
    }


def describe_machine() -> dict[str, Any]:
    """Return the hardware as reports name it."""
    import torch  # the command line needs this module, and its help no torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "gpus": gpus,
        "system": platform.platform(),
    }


def _processor() -> str:
    """Return the processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def remember_command(words: Sequence[str]) -> None:
    """Keep a command line for the run folders that it makes, in child processes too."""
    os.environ.setdefault(COMMAND_VARIABLE, shlex.join(["fedfrozen", *words]))


def git_revision() -> str | None:
    """Return the revision of the checkout this package runs from, None outside one.

    It ends in ``+changed`` where the package has changes that are not committed.
    In Flower's runtime a copy of the package runs, so whoever copied it says where from.
    """
    if REVISION_VARIABLE in os.environ:
        return os.environ[REVISION_VARIABLE] or None
    folder = Path(__file__).resolve().parents[2]
    try:
        revision, top = _git(folder, "rev-parse", "HEAD", "--show-toplevel").splitlines()[:2]
        # an installed package inside somebody else's checkout is not of that revision
        if folder != Path(top).resolve():
            return None
        changed = _git(folder, "status", "--porcelain", "--", "fedfrozen_app")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return f"{revision}{CHANGED}" if changed else revision


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout


def config_hash(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return twelve hex digits that change when any key of any config does, in any order.

    Keys that do not bear on a result are left out, and of paths only the last part is in, so that
    the same runs on another machine have the same hash.
    """
    lines = []
    for config in map(without_folders, configs):
        kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RESULT}
        lines.append(json.dumps(kept, sort_keys=True))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config keys and values with only the last part of every path."""
    return {
        key: Path(value).name if key in PLACES and value else value for key, value in config.items()
    }
