"""Config keys from text: an experiment file, and ``key=value`` on a command line."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig


def parse_overrides(texts: Iterable[str]) -> dict[str, ConfigValue]:
    """Parse ``key=value`` texts; one text may hold several, as ``"lr=0.1 rounds=3"``."""
    pairs = [pair for text in texts for pair in re.split(r"\s+(?=[A-Za-z][\w-]*=)", text.strip())]
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


def read_experiment(path: Path) -> dict[str, Any]:
    """Read the flat config keys of an experiment TOML.

    Raises
    ------
    ConfigError
        If the file is missing, no TOML, or a grid of runs.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"experiment file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment file {str(path)!r} is not valid TOML: {error}") from None
    if "sweep" in content:
        raise ConfigError(
            f"{str(path)!r} has a [sweep], which is a grid of runs, and this is one run; take it "
            "out and give single values"
        )
    return content
