"""Find the image, label and writer columns of a table and turn labels into class numbers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfrozen_app.config import ConfigError
from fedfrozen_app.data.sources import Columns, Table

Labels = npt.NDArray[np.int64]


def resolve_columns(table: Table, wanted: Columns) -> Columns:
    """Return the columns to read; ``writer`` is empty where the table has none.

    Raises
    ------
    ConfigError
        For a column that does not exist, or one that has to be found by its type where
        none or several fit; the message lists the columns.
    """
    features = table.features
    for key, name in (("image-column", wanted.image), ("label-column", wanted.label)):
        if name and name not in features:
            raise ConfigError(f"{table.origin} has no column {name!r}; {_set(key, features)}")
    image = wanted.image or _only(
        table, "image-column", [n for n, feature in features.items() if _is_image(feature)]
    )
    label = wanted.label
    if not label:
        names = [n for n, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        others = [n for n in features if n not in (image, wanted.writer)]
        names = names or [n for n in others if _is_plain_label(features[n])]
        label = _only(table, "label-column", names)
    return Columns(image, label, wanted.writer if wanted.writer in features else "")


def check_same_columns(table: Table, columns: Columns) -> None:
    """Raise ``ConfigError`` where a further split lacks a column that the first one has."""
    for name in filter(None, (columns.image, columns.label, columns.writer)):
        if name not in table.features:
            raise ConfigError(
                f"{table.origin}: the {table.split} split has no column {name!r}, only "
                f"{', '.join(table.features)}; write both splits with the same columns"
            )


def check_named_classes(table: Table, wanted: Columns) -> None:
    """Raise ``ConfigError`` where labels would be numbered by what a machine happens to hold."""
    label = resolve_columns(table, wanted).label
    if type(table.features[label]).__name__ != "ClassLabel":
        raise ConfigError(
            f"{table.origin}: with partitioner=local all machines must number their classes alike, "
            f"and column {label!r} does not say how; write it as datasets.ClassLabel with the same "
            "names everywhere"
        )


def _is_image(feature: Any) -> bool:
    if type(feature).__name__ == "Image":
        return True
    # Parquet written without the Hugging Face metadata.
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    return is_struct or getattr(feature, "dtype", "") in ("binary", "large_binary")


def _is_plain_label(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return dtype.startswith(("int", "uint")) or dtype in ("string", "large_string", "bool")


def _only(table: Table, key: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    found = f"several could be ({', '.join(names)})" if names else "none could be"
    kind = key.removesuffix("-column")
    raise ConfigError(f"{table.origin}: {found} the {kind} column; {_set(key, table.features)}")


def _set(key: str, features: Iterable[str]) -> str:
    return f"set {key} to one of its columns: {', '.join(features)}"


def read_labels(tables: Mapping[str, Table], column: str) -> tuple[dict[str, Labels], list[str]]:
    """Return the class numbers (int64 [N]) of each split and the names of the classes.

    A ``ClassLabel`` column keeps its numbers and names; other integers and strings are
    numbered in sorted order over all splits.

    Raises
    ------
    ConfigError
        For a missing label, or a type that is no class.
    """
    values = {split: _present(table, column) for split, table in tables.items()}
    feature = next(iter(tables.values())).features[column]
    if type(feature).__name__ == "ClassLabel":
        names = list(feature.names)
        for split, table in tables.items():
            _check_class_numbers(table, column, values[split], names)
        return {split: np.asarray(v, dtype=np.int64) for split, v in values.items()}, names
    classes = sorted(set().union(*values.values()))
    number = {value: i for i, value in enumerate(classes)}
    labels = {
        split: np.fromiter((number[value] for value in v), np.int64, len(v))
        for split, v in values.items()
    }
    return labels, [str(value) for value in classes]


def _present(table: Table, column: str) -> list[Any]:
    values = table.values(column)
    kinds = {type(value) for value in values}
    if not values:
        raise ConfigError(f"{table.origin}: the {table.split} split has no rows; give it some")
    if len(kinds) > 1 or not kinds <= {int, str, bool}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(
            f"{table.origin}: label column {column!r} of the {table.split} split must hold only "
            f"integers or only strings, found {names}; {_set('label-column', table.features)}"
        )
    return values


def _check_class_numbers(table: Table, column: str, values: list[Any], names: list[str]) -> None:
    feature = table.features.get(column)
    if getattr(feature, "names", None) != names:
        raise ConfigError(
            f"{table.origin}: label column {column!r} of the {table.split} split has other class "
            "names than the training split; write both splits with the same classes"
        )
    if not 0 <= min(values) <= max(values) < len(names):
        raise ConfigError(
            f"{table.origin}: label column {column!r} of the {table.split} split must be in "
            f"[0, {len(names)}), found {min(values)} to {max(values)} (-1 marks hidden labels); "
            "give a split with labels"
        )


def read_writers(tables: Mapping[str, Table], column: str) -> tuple[dict[str, Labels], list[str]]:
    """Return each example's writer number (int64 [N]) by split and the writers, sorted."""
    values = {split: [str(v) for v in table.values(column)] for split, table in tables.items()}
    names = sorted(set().union(*values.values()))
    number = {name: i for i, name in enumerate(names)}
    return {
        split: np.fromiter((number[value] for value in v), np.int64, len(v))
        for split, v in values.items()
    }, names
