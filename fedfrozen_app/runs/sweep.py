"""A grid of runs: flat config keys and a ``[sweep]`` table of lists, whose product is the grid.

A list of values under a config key sweeps that key. A list of inline tables under any other
label sets several keys at once; an optional ``name`` in each is what it is called::

    [sweep]
    method = [{name = "flite", strategy = "latent"}, {name = "fedavg", strategy = "fedavg"}]
    alpha = [0.1, 0.5]
    seed = [1, 2, 3]

A cell of the grid is one run. It is known by its resolved config, not by its name, so that a
run counts as done wherever in the sweep's folder it lies.
"""

import difflib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig
from fedfrozen_app.config_input import read_toml
from fedfrozen_app.runs.finished import finished_runs, identity
from fedfrozen_app.runs.store import RunFolder, atomic_path

OWN_KEYS = ("run-name", "run-dir")  # the sweep's to choose
LABELS_FILE = "labels.json"  # in a sweep's folder: the labels of each run by its name
LONGEST_NAME = 200  # bytes; file systems take 255, and an ending is added


@dataclass(frozen=True)
class Option:
    """One value of an axis: what it is called, and the config keys that it sets."""

    text: str
    keys: Mapping[str, ConfigValue]


@dataclass(frozen=True)
class Axis:
    """One line of ``[sweep]``; ``is_key`` where its label is the config key that it sweeps."""

    label: str
    options: tuple[Option, ...]
    is_key: bool

    def name(self, option: Option) -> str:
        """Return an option's part of a run name."""
        return safe_name(f"{self.label}={option.text}" if self.is_key else option.text)


@dataclass(frozen=True)
class Cell:
    """One run of the grid; ``labels`` are the texts of its options by axis, in file order."""

    name: str
    labels: Mapping[str, str]
    config: RunConfig


@dataclass(frozen=True)
class Sweep:
    """A grid of validated runs that go to ``out/<name of the cell>``."""

    path: Path
    out: Path
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]

    def finished(self) -> dict[str, RunFolder]:
        """Return the folders in ``out`` of the cells that are done, by the cell's name."""
        found = finished_runs(self.out)
        keys = {cell.name: identity(cell.config) for cell in self.cells}
        return {name: found[key] for name, key in keys.items() if key in found}

    def write_labels(self) -> None:
        """Write the labels of all runs of the folder, those of earlier sweeps included."""
        path = self.out / LABELS_FILE
        known = json.loads(path.read_text()) if path.exists() else {}
        folders = self.finished()  # some may lie under another name
        for cell in self.cells:
            name = folders[cell.name].path.name if cell.name in folders else cell.name
            known[name] = dict(cell.labels)
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(known, indent=1) + "\n")


def read_sweep(
    path: Path,
    overrides: Mapping[str, ConfigValue] | None = None,
    *,
    only: Mapping[str, Sequence[str]] | None = None,
    out: Path | None = None,
) -> Sweep:
    """Read an experiment file with a ``[sweep]`` and validate every run of it.

    Parameters
    ----------
    path : Path
        The file.
    overrides : Mapping, optional
        Config keys for all runs, in place of the file's.
    only : Mapping, optional
        By label, the options that are kept.
    out : Path, optional
        Where the run folders go; ``runs/<file stem>`` otherwise.

    Raises
    ------
    ConfigError
        For whatever is wrong with the file, the overrides or a cell; all bad cells are named.
    """
    content = read_toml(path)
    if "sweep" not in content:
        raise ConfigError(f"{str(path)!r} has no [sweep]; `fedfrozen run` runs it")
    table = content.pop("sweep")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"sweep of {str(path)!r} must be a table of lists, got {table!r}")
    axes = [read_axis(label, values) for label, values in table.items()]
    check_keys(content, axes, overrides or {})
    axes = narrow(axes, only or {})
    out = (out or Path("runs") / path.stem).expanduser().absolute()
    return Sweep(path, out, tuple(axes), make_cells(axes, {**content, **(overrides or {})}, out))


# --- axes -----------------------------------------------------------------------------
def read_axis(label: str, values: Any) -> Axis:
    """Return the axis of a line of ``[sweep]``; raise ConfigError where it is none."""
    if not isinstance(values, list) or not values:
        raise ConfigError(f"sweep.{label} must be a list of one or more values, got {values!r}")
    is_key = label in RunConfig.keys()
    if all(isinstance(value, dict) for value in values):
        if is_key:
            raise ConfigError(
                f"sweep.{label} holds tables and {label!r} is a config key; give them another label"
            )
        options = tuple(read_group(label, value) for value in values)
    else:
        check_key(label)
        for value in values:
            check_value(f"sweep.{label}", value)
        options = tuple(Option(text_of(value), {label: value}) for value in values)
    axis = Axis(label, options, is_key)
    names = Counter(axis.name(option).casefold() for option in options)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"two values of sweep.{label} are called {twice[0]!r}; each must have its own name"
        )
    return axis


def read_group(label: str, table: Mapping[str, Any]) -> Option:
    """Return the option of an inline table."""
    keys = {key: value for key, value in table.items() if key != "name"}
    for key, value in table.items():
        check_value(f"sweep.{label}.{key}", value)
    for key in keys:
        check_key(key)
    text = text_of(table.get("name", "-".join(map(text_of, keys.values()))))
    if not keys or not safe_name(text):
        raise ConfigError(
            f"sweep.{label} has {dict(table)!r}, which needs a config key and a name with a "
            "letter or digit"
        )
    return Option(text, keys)


def check_key(key: str) -> None:
    """Raise ConfigError for what is no config key, or not for a sweep to give."""
    if key not in RunConfig.keys():
        RunConfig.from_mapping({key: ""})  # says which key is nearest
    if key in OWN_KEYS:
        raise ConfigError(f"{key} is chosen by the sweep, run by run; use --out for the folder")


def check_value(where: str, value: Any) -> None:
    """Raise ConfigError for what no config key can hold."""
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{where} takes strings, numbers or booleans, got {value!r}")


def check_keys(
    content: Mapping[str, Any], axes: Iterable[Axis], overrides: Mapping[str, ConfigValue]
) -> None:
    """Raise ConfigError where a key is given twice, or swept and given."""
    for key in [*content, *overrides]:
        check_key(key)
    owner: dict[str, str] = {}
    for axis in axes:
        sets = [set(option.keys) for option in axis.options]
        for key in dict.fromkeys(key for option in axis.options for key in option.keys):
            if key in owner:
                raise ConfigError(f"sweep.{owner[key]} and sweep.{axis.label} both set {key}")
            owner[key] = axis.label
            if key in overrides:
                raise ConfigError(
                    f"{key} is swept by sweep.{axis.label} and cannot be overridden; take some of "
                    f"its values with --only {axis.label}=VALUE[,VALUE]"
                )
            if key in content and all(key in keys for keys in sets):
                raise ConfigError(
                    f"{key}={content[key]!r} has no effect, as sweep.{axis.label} always sets it; "
                    "take one of them out"
                )


def parse_only(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parse ``label=value[,value]`` texts; a label may come more than once."""
    only: dict[str, list[str]] = {}
    for text in texts:
        label, sign, values = text.partition("=")
        if not sign or not values.strip():
            raise ConfigError(f"--only takes label=value[,value], got {text!r}")
        only.setdefault(label.strip(), []).append(values.strip())
    return only


def narrow(axes: Sequence[Axis], only: Mapping[str, Sequence[str]]) -> list[Axis]:
    """Return the axes with the options named in ``only``, in the order of the file."""
    labels = [axis.label for axis in axes]
    if unknown := [label for label in only if label not in labels]:
        raise ConfigError(_no_such("label", unknown[0], labels))
    return [_narrowed(axis, only[axis.label]) if axis.label in only else axis for axis in axes]


def _narrowed(axis: Axis, wanted: Sequence[str]) -> Axis:
    texts = [option.text for option in axis.options]
    # a value may have a comma in it: what is there as a whole is not taken apart
    parts = [part for text in wanted for part in ([text] if text in texts else text.split(","))]
    names = {_number(part.strip()): part.strip() for part in parts}
    if unknown := [part for name, part in names.items() if name not in map(_number, texts)]:
        raise ConfigError(_no_such(f"value of sweep.{axis.label}", unknown[0], texts))
    kept = tuple(option for option in axis.options if _number(option.text) in names)
    return Axis(axis.label, kept, axis.is_key)


def _number(text: str) -> str:
    """Return a number in one way of writing it, so that 1e-1 finds 0.1."""
    try:
        return repr(float(text))
    except ValueError:
        return text


def _no_such(kind: str, given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"--only names {given!r}, which is no {kind}; {hint}there are {', '.join(known)}"


def text_of(value: ConfigValue) -> str:
    """Return a value as a table or a name shows it."""
    return value if isinstance(value, str) else json.dumps(value)


def safe_name(text: str) -> str:
    """Return a text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text).strip("-._=+")


# --- cells ----------------------------------------------------------------------------
def make_cells(axes: Sequence[Axis], base: Mapping[str, Any], out: Path) -> tuple[Cell, ...]:
    """Return the product of the axes, the last one changing fastest, each a valid run."""
    cells, problems = [], []
    for options in itertools.product(*(axis.options for axis in axes)):
        pairs = list(zip(axes, options, strict=True))
        name = "-".join(axis.name(option) for axis, option in pairs)
        keys = {key: value for option in options for key, value in option.keys.items()}
        own = {"run-dir": str(out), "run-name": name}
        try:
            config = RunConfig.from_mapping(base, keys, own).with_absolute_paths()
        except ConfigError as error:
            problems.append(f"{name}: {error}")
            continue
        cells.append(Cell(name, {axis.label: option.text for axis, option in pairs}, config))
    if problems:
        count = len(cells) + len(problems)
        raise ConfigError("\n  ".join([f"{len(problems)} of {count} runs cannot be:", *problems]))
    _check_names(cells)
    _check_different(cells)
    return tuple(cells)


def _check_names(cells: Sequence[Cell]) -> None:
    names = Counter(cell.name.casefold() for cell in cells)  # macOS does not tell a from A
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"two runs are called {twice[0]!r}; give the options other names")
    if long := [cell.name for cell in cells if len(cell.name) > LONGEST_NAME]:
        raise ConfigError(
            f"the run name {long[0]!r} is too long; sweep tables with a short name in each"
        )


def _check_different(cells: Sequence[Cell]) -> None:
    seen: dict[str, str] = {}
    for cell in cells:
        other = seen.setdefault(identity(cell.config), cell.name)
        if other != cell.name:
            raise ConfigError(
                f"{other} and {cell.name} are the same run; what tells them apart changes nothing "
                "about the result"
            )
