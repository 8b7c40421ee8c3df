"""Config keys from text: an experiment file, and ``key=value`` on a command line."""

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig

# one key=value of several: a quoted value to its closing quote, any other up to the next key=
PAIR = re.compile(
    r"""\s*([A-Za-z][\w-]*\s*=\s*(?:"[^"]*"|'[^']*')|.+?)(?=\s+[A-Za-z][\w-]*=|\s*$)""", re.S
)


def parse_overrides(texts: Iterable[str]) -> dict[str, ConfigValue]:
    """Parse ``key=value`` texts; one text may hold several, as ``"lr=0.1 rounds=3"``."""
    pairs = [pair for text in texts for pair in PAIR.findall(text.strip()) or [text]]
    return dict(map(parse_override, pairs))


def parse_override(text: str) -> tuple[str, ConfigValue]:
    """Parse one ``key=value``; quotes around a value may be left out.

    A key that takes a string gets the text as it stands; any other value is read as TOML.
    """
    key, sign, raw = (part.strip() for part in text.partition("="))
    if not sign or not key:
        raise ConfigError(f"expected key=value, got {text!r}; for example lr=0.01")
    quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "'\""
    field = RunConfig.model_fields.get(key.replace("-", "_"))
    if field is not None and field.annotation is str:
        return key, raw[1:-1] if quoted else raw
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{key} takes a string, number or boolean, got {raw!r}")
    return key, value


def format_override(key: str, value: ConfigValue) -> str:
    """Return the ``key=value`` that :func:`parse_overrides` reads as this very value.

    Raises
    ------
    ConfigError
        For a text that none is read as: it holds both kinds of quotes, and ``name=`` in it.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    for quote in ("", '"', "'"):
        pair = f"{key}={quote}{text}{quote}"
        if parse_overrides([pair]) == {key: value}:
            return pair
    raise ConfigError(f"{key}={value!r} cannot be written on a command line; rename it")


def read_toml(path: Path) -> dict[str, Any]:
    """Read an experiment TOML.

    Raises
    ------
    ConfigError
        If the file is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"experiment file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment file {str(path)!r} is not valid TOML: {error}") from None


def read_experiment(path: Path) -> dict[str, Any]:
    """Read the flat config keys of an experiment TOML.

    Raises
    ------
    ConfigError
        If the file is missing, no TOML, or a grid of runs.
    """
    content = read_toml(path)
    if "sweep" in content:
        raise ConfigError(
            f"{str(path)!r} has a [sweep], which is a grid of runs, and this is one run; run them "
            "all with `fedfrozen sweep`, or take it out and give single values"
        )
    return content
