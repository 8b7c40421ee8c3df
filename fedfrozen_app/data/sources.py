"""Where encoded images, labels and text come from: a local parquet folder or the hub.

Both give :class:`Table` objects, one for each split, over the Hugging Face image schema:
a column of ``struct{bytes, path}`` (or plain bytes) and a column of labels.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfrozen_app.config import ConfigError

ROWS_PER_BATCH = 1024
# A local data set up to this size is known by the digest of its bytes; a larger one, where
# that would take seconds at every start, by size, time and the parquet footers.
DIGESTED_BYTES = 64 * 1024**2
TEST_SPLITS = ("test", "valid", "validation", "val")  # in order of preference
DEFAULT_WRITER_COLUMN = "writer_id"

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read; empty = find it by its type."""

    image: str = ""
    label: str = ""
    writer: str = DEFAULT_WRITER_COLUMN


@dataclass(frozen=True)
class Table:
    """One split of a data set, read in batches.

    ``read(columns)`` yields Arrow batches; ``features`` are the ``datasets`` features by
    column; ``rows`` (sorted) restricts the table to some of its rows.
    """

    split: str
    origin: str
    features: Mapping[str, Any]
    read: Callable[[list[str]], Iterator[Any]]
    rows: Rows | None = None

    def select(self, split: str, rows: Rows) -> "Table":
        """Return the table restricted to sorted rows, under another split's name."""
        return replace(self, split=split, rows=rows)

    def values(self, column: str) -> list[Any]:
        """Return a whole column as Python values."""
        batches = self.read([column])
        values = [v for batch in batches for v in batch.column(column).to_pylist()]
        return values if self.rows is None else [values[row] for row in self.rows]

    def encoded_images(self, column: str) -> Iterator[list[bytes]]:
        """Yield batches of encoded images.

        Raises
        ------
        ConfigError
            For a row without an image.
        """
        start = 0
        for batch in self.read([column]):
            end = start + batch.num_rows
            cells = batch.column(column)
            if self.rows is not None:
                first, last = np.searchsorted(self.rows, [start, end])
                cells = cells.take((self.rows[first:last] - start).tolist())
            yield [self._bytes(cell, column) for cell in cells.to_pylist()]
            start = end

    def _bytes(self, cell: Any, column: str) -> bytes:
        data = cell
        if isinstance(cell, dict):
            data = cell.get("bytes")
            if data is None and cell.get("path"):
                data = self._read(Path(cell["path"]))
        if not isinstance(data, bytes):
            raise ConfigError(
                f"{self.origin}: column {column!r} of the {self.split} split has a row without "
                "an image; drop such rows or name another column with image-column"
            )
        return data

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.origin}: the {self.split} split names the image {str(path)!r}, which "
                f"cannot be read ({error.strerror}); put it there or write the bytes into the "
                "parquet files"
            ) from None


@dataclass(frozen=True)
class Tables:
    """The splits of a data set; ``fingerprint`` changes when the content does."""

    train: Table
    test: Table | None
    fingerprint: str


# --- a local folder -----------------------------------------------------------------------
def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Return the parquet files of the training and test split of a local folder.

    They lie in the folder itself or, as in a downloaded hub repository, in one subfolder.

    Raises
    ------
    ConfigError
        When the folder does not exist or has no ``train*.parquet``.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"data-dir {str(folder)!r} is not a folder; give the folder that holds "
            "train*.parquet and test*.parquet"
        )
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    places = [place for place in places if any(place.glob("train*.parquet"))]
    if not places:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise ConfigError(
            f"data-dir {str(folder)!r} has no train*.parquet (found {found}); "
            "put train*.parquet and test*.parquet there or leave data-dir empty for the hub"
        )
    if len(places) > 1 and places[0] != folder:
        names = ", ".join(place.name for place in places)
        raise ConfigError(
            f"data-dir {str(folder)!r} has several subfolders with train*.parquet ({names}); "
            "set data-dir to one of them"
        )
    by_split = [sorted(places[0].glob(f"{split}*.parquet")) for split in TEST_SPLITS]
    test = next(filter(None, by_split), [])
    return {"train": sorted(places[0].glob("train*.parquet")), "test": test}


def digest_files(files: Mapping[str, Sequence[Path]]) -> dict[str, list[str]]:
    """Return what identifies the content of the files of each split."""
    total = sum(path.stat().st_size for paths in files.values() for path in paths)
    digest = _content_digest if total <= DIGESTED_BYTES else _footer_digest
    return {split: [digest(path) for path in paths] for split, paths in files.items()}


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _footer_digest(path: Path) -> str:
    """Digest size, time and the parquet footer: schema, row groups, statistics."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size}:{stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        file.seek(max(0, stat.st_size - 8))  # footer length (4 bytes), then the magic number
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, stat.st_size - 8 - length))
        digest.update(file.read())
    return digest.hexdigest()


def open_folder(files: Mapping[str, Sequence[Path]], fingerprint: str) -> Tables:
    """Return the tables of local parquet files."""
    train = _parquet_table("train", files["train"])
    test = _parquet_table("test", files["test"]) if files["test"] else None
    return Tables(train, test, fingerprint)


def _parquet_table(split: str, paths: Sequence[Path]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        schemas = [pq.read_schema(path) for path in paths]
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"a {split} file in {str(paths[0].parent)!r} is not a readable parquet file: {error}; "
            "copy or download it again"
        ) from error

    for path, schema in zip(paths, schemas, strict=True):
        if schema.names != schemas[0].names:
            raise ConfigError(
                f"{str(path)!r} has the columns {', '.join(schema.names)}, but "
                f"{paths[0].name} has {', '.join(schemas[0].names)}; write all {split} files "
                "with the same columns"
            )

    def read(columns: list[str]) -> Iterator[Any]:
        for path in paths:
            try:
                yield from pq.ParquetFile(path).iter_batches(ROWS_PER_BATCH, columns=columns)
            except (pa.ArrowException, OSError) as error:
                raise ConfigError(
                    f"{str(path)!r} is damaged: {error}; copy or download it again"
                ) from error

    return Table(split, str(paths[0].parent), Features.from_arrow_schema(schemas[0]), read)


# --- the Hugging Face hub -----------------------------------------------------------------
def open_hub(hub_id: str, configuration: str = "") -> Tables:
    """Return the tables of a hub data set, downloading it where it is not on disk yet.

    ``configuration`` is for a data set with several of them; empty = the only one.

    Raises
    ------
    ConfigError
        When it cannot be had: offline, no such id, several configurations.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(hub_id, *filter(None, [configuration]))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data set {hub_id!r} could not be loaded from the Hugging Face hub: {error}; check "
            "the id and the connection, or set data-dir to a local folder that holds its "
            "parquet files (train*.parquet and test*.parquet)"
        ) from error
    if "train" not in loaded:
        raise ConfigError(
            f"data set {hub_id!r} has no train split, only {', '.join(loaded)}; "
            "choose a data set with one"
        )
    train = loaded["train"]
    others = [loaded[split] for split in TEST_SPLITS if split in loaded]
    test = others[0] if others else None
    # The library's own fingerprints: they follow the revision that was downloaded.
    fingerprint = ":".join(part._fingerprint for part in (train, test) if part is not None)
    return Tables(
        _hub_table("train", hub_id, train),
        None if test is None else _hub_table("test", hub_id, test),
        fingerprint,
    )


def _hub_table(split: str, hub_id: str, dataset: Any) -> Table:
    def read(columns: list[str]) -> Iterator[Any]:
        arrow = dataset.select_columns(columns).with_format("arrow")
        yield from arrow.iter(ROWS_PER_BATCH)

    return Table(split, hub_id, dataset.features, read)
