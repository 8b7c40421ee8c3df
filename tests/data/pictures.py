"""Images and parquet files that the tests of data make for themselves."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def random_pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_table(path: Path, rows: dict[str, list], class_names: list[str] | None = None) -> None:
    """Write rows in the hub's schema; ``image`` holds encoded bytes."""
    import datasets

    features = {
        name: datasets.Value("int64" if isinstance(values[0], int) else "string")
        for name, values in rows.items()
    }
    for name in {"image", "mask"} & set(rows):
        features[name] = datasets.Image()
        rows = {**rows, name: [cell and {"bytes": cell, "path": None} for cell in rows[name]]}
    if class_names is not None:
        features["label"] = datasets.ClassLabel(names=class_names)
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
