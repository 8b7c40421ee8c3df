"""How the runs of a report were made, as whoever repeats or reviews them needs it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedfrozen_app.config import RunConfig
from fedfrozen_app.report.settings import Setting
from fedfrozen_app.runs.provenance import NOT_OF_THE_RESULT, config_hash, without_folders
from fedfrozen_app.runs.sweep_progress import clock

NOT_RECORDED = "not recorded"  # of runs that are older than what is asked for
HIDDEN = (*NOT_OF_THE_RESULT, "seed", "engine")


def provenance(settings: Sequence[Setting]) -> str:
    """Return a Markdown list: hardware, dates, software, revision, config hash, command, keys.

    What runs do not agree in is given in full, one value after the other. The keys are those that
    all runs have in common and that are not at their defaults.
    """
    runs = [run for setting in settings for run in setting.runs]
    told = [run.config() for run in runs]
    configs = [each["config"] for each in told]
    seconds = sum(result.seconds for setting in settings for result in setting.results)
    facts = {
        "runs": f"{len(runs)}, {clock(seconds)} of rounds in all",
        "machine": _each(map(_machine, told)),
        "date": _dates([each.get("started") for each in told]),
        "software": _each(map(_software, told)),
        "revision": _each(_short(each.get("git_revision")) for each in told),
        "config hash": f"`{config_hash(configs)}`",
        "command": _each(f"`{each.get('command') or NOT_RECORDED}`" for each in told),
        "in common": f"`{' '.join(common_keys(configs)) or 'the defaults'}`",
    }
    return "".join(f"- {name}: {text}\n" for name, text in facts.items())


def common_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return ``key=value`` of what all configs share and what is not a default."""
    defaults = RunConfig().to_mapping()
    found = []
    for key, value in configs[0].items():
        if key in HIDDEN or value == defaults.get(key):
            continue
        if all(config.get(key) == value for config in configs):
            found.append(f"{key}={without_folders({key: value})[key]}")
    return found


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _machine(told: Mapping[str, Any]) -> str:
    machine = told.get("machine", {})
    if "processor" not in machine:
        return NOT_RECORDED
    gpus = ", ".join(machine.get("gpus", [])) or "no GPU"
    return f"{machine['cores']} cores, {machine['processor']}, {gpus}"


def _software(told: Mapping[str, Any]) -> str:
    known = told.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in known.items()) or NOT_RECORDED


def _short(revision: str | None) -> str:
    """Return the first digits of a revision, and whether the checkout was changed."""
    digits, _, changed = (revision or NOT_RECORDED).partition("+")
    return digits[:12] + (" and changes" if changed else "")


def _dates(started: Sequence[str | None]) -> str:
    """Return the days on which the first and the last run began."""
    days = sorted({each[: len("2026-01-31")] for each in started if each})
    return NOT_RECORDED if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
