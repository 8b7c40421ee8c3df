"""Image data sets as uint8 arrays on disk: decoded once, mapped by every later run.

``dataset`` is ``digits`` (bundled with scikit-learn), one of :data:`PRESETS`, the id of an
image data set on the Hugging Face hub (``owner/name``), or any name together with
``data-dir``, a local folder of ``train*.parquet`` and ``test*.parquet`` (or ``valid*``).

A hub data set is asked for once; afterwards the decoded copy serves without a network and
every process of a run sees the same images. Remove it from the cache folder to fetch a
newer revision.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data import columns as schema
from fedfrozen_app.data import sources
from fedfrozen_app.data.cache import cache_root, cached, content_key
from fedfrozen_app.data.decode import ImageCensus, write_images
from fedfrozen_app.data.images import ImageExamples, Preprocessor
from fedfrozen_app.data.sources import Columns, Table, Tables
from fedfrozen_app.data.text import TextDataset, load_text
from fedfrozen_app.disk import save_array
from fedfrozen_app.seeds import derive_seed, numpy_generator

if TYPE_CHECKING:
    from fedfrozen_app.models.registry import ModelSpec

logger = logging.getLogger(__name__)

# Part of every key: raise it when the same source would decode to other arrays.
DECODE_VERSION = 1
SPLIT_SEED = 0  # of splits that are made here; the same in every run
DIGITS_TEST_SIZE = 360
WRITER_TEST_FRACTION = 0.1
OTHER_AUGMENT = "crop"  # an unknown data set may be characters, which no flip fits


@dataclass(frozen=True)
class Preset:
    """Where a known data set lies on the hub, its columns and its default augmentation."""

    hub_id: str
    columns: Columns
    augment: str = "crop-flip"
    split_by_writer: bool = False  # what to do when there is no test split


PRESETS: Mapping[str, Preset] = {
    "cifar10": Preset("uoft-cs/cifar10", Columns("img", "label")),
    "cifar100": Preset("uoft-cs/cifar100", Columns("img", "fine_label")),
    "femnist": Preset(
        "flwrlabs/femnist", Columns("image", "character"), augment="crop", split_by_writer=True
    ),
    "tinyimagenet": Preset("zh-plus/tiny-imagenet", Columns("image", "label")),
    "fashion-mnist": Preset("zalando-datasets/fashion_mnist", Columns("image", "label")),
}


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """One split of a data set.

    ``images`` uint8 [N, H, W, C] with C = 1 or 3, mapped from disk; ``labels`` int64 [N];
    ``writers`` int64 [N] are indices into ``ImageDataset.writer_names``, None without them.
    """

    images: Tensor
    labels: Tensor
    writers: Tensor | None = None

    def __len__(self) -> int:
        """Return N."""
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A decoded data set; ``augment`` is resolved, ``key`` identifies the decoded content."""

    name: str
    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    augment: str
    key: str
    writer_names: tuple[str, ...] = ()
    has_test: bool = True  # if not, ``test`` shows the training examples

    @property
    def num_outputs(self) -> int:
        """Return how many classes a model tells apart."""
        return len(self.class_names)

    def examples(
        self, split: str, rows: npt.NDArray[np.int64], spec: "ModelSpec", device: torch.device
    ) -> ImageExamples:
        """Return some examples of ``train`` (augmented) or ``test``, ready for a model."""
        part = self.train if split == "train" else self.test
        augment = self.augment if split == "train" else "none"
        preprocessor = Preprocessor(
            spec.image_size, spec.mean, spec.std, spec.channels, augment, device
        )
        return ImageExamples(part.images, part.labels, torch.from_numpy(rows), preprocessor)


Dataset: TypeAlias = ImageDataset | TextDataset


def load_dataset(config: RunConfig) -> Dataset:
    """Return the run's data set, text for a language model and images for any other.

    It is decoded first where no run has done so before.

    Raises
    ------
    ConfigError
        When the data set is unknown or cannot be reached, files or columns are missing,
        there is no test split, or an image or label cannot be read.
    """
    if config.reads_text:
        return load_text(config)
    request, build = _plan(config)
    folder = cache_root(config) / "images" / content_key(version=DECODE_VERSION, **request)
    meta = cached(folder, build)
    preset = _preset(config.dataset)
    default = "none" if config.dataset == "digits" else OTHER_AUGMENT
    return ImageDataset(
        name=config.dataset,
        train=_map_split(folder, "train", meta),
        test=_map_split(folder, "test", meta),
        class_names=tuple(meta["class_names"]),
        augment=(preset.augment if preset else default)
        if config.augment == "auto"
        else config.augment,
        key=meta["key"],
        writer_names=tuple(meta["writer_names"]),
        has_test=meta.get("has_test", True),
    )


Build = Callable[[Path], Mapping[str, Any]]


def _plan(config: RunConfig) -> tuple[dict[str, Any], Build]:
    """Return what identifies the data set before it is opened, and how to decode it."""
    if config.dataset == "digits":
        return {"digits": DIGITS_TEST_SIZE}, _build_digits
    preset = _preset(config.dataset)
    known = preset.columns if preset else Columns()
    wanted = Columns(config.image_column or known.image, config.label_column or known.label)
    # Only where sizes may differ does the decoded size follow the model's.
    image_size = 0 if preset else config.image_size
    split_by_writer = preset is not None and preset.split_by_writer
    request = {
        "columns": [wanted.image, wanted.label, wanted.writer],
        "image_size": image_size,
        "split_by_writer": split_by_writer,
    }
    if config.partitioner == "local":
        request["local"] = True
    if config.data_dir:
        files = sources.parquet_files(Path(config.data_dir).expanduser())
        request["files"] = sources.digest_files(files)

        def open_tables() -> Tables:
            return sources.open_folder(files, fingerprint="")
    else:
        hub_id = _hub_id(config.dataset)
        request["hub"] = hub_id

        def open_tables() -> Tables:
            return sources.open_hub(hub_id)

    def build(folder: Path) -> dict[str, Any]:
        import pyarrow  # slow, and not needed where the data is decoded already

        logger.info("decoding %s once into %s", config.dataset, folder.parent.parent)
        tables = open_tables()
        has_test = tables.test is not None or split_by_writer
        if config.partitioner == "local":
            schema.check_named_classes(tables.train, wanted)
            if not has_test:  # as of a node, which never tests
                tables = replace(tables, test=replace(tables.train, split="test"))
        splits = _splits(tables, split_by_writer)
        meta = {**_build_tables(folder, splits, wanted, image_size), "has_test": has_test}
        pyarrow.default_memory_pool().release_unused()  # of reading, as much as it read at once
        key = content_key(version=DECODE_VERSION, source=tables.fingerprint, **request)
        return {"key": key, **meta}

    return request, build


def _preset(name: str) -> Preset | None:
    by_hub_id = {preset.hub_id: preset for preset in PRESETS.values()}
    return PRESETS.get(name) or by_hub_id.get(name)


def _hub_id(name: str) -> str:
    if preset := _preset(name):
        return preset.hub_id
    if "/" in name:
        return name
    known = ["digits", *PRESETS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"unknown data set {name!r}; {hint}known are {', '.join(known)}; any other needs its "
        "hub id (owner/name) or data-dir"
    )


# --- building ---------------------------------------------------------------------------
def _splits(tables: Tables, split_by_writer: bool) -> dict[str, Table]:
    """Return the training and the test table, made from the one split where that is known."""
    if tables.test is not None:
        return {"train": tables.train, "test": tables.test}
    writer = sources.DEFAULT_WRITER_COLUMN
    if not split_by_writer or writer not in tables.train.features:
        raise ConfigError(
            f"{tables.train.origin} has no test split; add test*.parquet (or valid*.parquet) to "
            "a local folder and set data-dir to it"
        )
    writers, _ = schema.read_writers({"train": tables.train}, writer)
    train, test = _split_within_writers(writers["train"])
    return {
        "train": tables.train.select("train", train),
        "test": tables.train.select("test", test),
    }


def _split_within_writers(
    writers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hold out a tenth of each writer's examples; return sorted training and test rows."""
    rng = numpy_generator(SPLIT_SEED, "writer-test-split")
    held_out = np.zeros(len(writers), dtype=bool)
    for rows in np.split(np.argsort(writers, kind="stable"), np.cumsum(np.bincount(writers))[:-1]):
        held_out[rng.permutation(rows)[: round(WRITER_TEST_FRACTION * len(rows))]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _build_tables(
    folder: Path, splits: dict[str, Table], wanted: Columns, image_size: int
) -> dict[str, Any]:
    """Decode the splits into ``folder`` and return their class and writer names."""
    columns = schema.resolve_columns(splits["train"], wanted)
    schema.check_same_columns(splits["test"], columns)
    labels, class_names = schema.read_labels(splits, columns.label)
    writers, writer_names = (
        schema.read_writers(splits, columns.writer) if columns.writer else ({}, [])
    )
    census = ImageCensus()
    for split, table in splits.items():
        census.add(table.encoded_images(columns.image), split)
    form = census.common_form(image_size)
    for split, table in splits.items():
        images = table.encoded_images(columns.image)
        write_images(folder / f"{split}_images.npy", images, len(labels[split]), form, split)
        save_array(folder / f"{split}_labels.npy", labels[split])
        if split in writers:
            save_array(folder / f"{split}_writers.npy", writers[split])
    return {"class_names": class_names, "writer_names": writer_names}


def _build_digits(folder: Path) -> dict[str, Any]:
    """Write scikit-learn's 8x8 digits, scaled from 0..16 to 0..255, in a fixed split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = digits.target.astype(np.int64)
    parts = train_test_split(
        np.arange(len(labels)),
        test_size=DIGITS_TEST_SIZE,
        stratify=labels,
        random_state=derive_seed(SPLIT_SEED, "digits-test-split") % 2**32,
    )
    for split, rows in zip(("train", "test"), map(np.sort, parts), strict=True):
        save_array(folder / f"{split}_images.npy", images[rows])
        save_array(folder / f"{split}_labels.npy", labels[rows])
    key = content_key(version=DECODE_VERSION, digits=DIGITS_TEST_SIZE)
    return {"key": key, "class_names": list("0123456789"), "writer_names": []}


# --- reading ----------------------------------------------------------------------------
def _map_split(folder: Path, split: str, meta: Mapping[str, Any]) -> ImageSplit:
    # Copy-on-write: the file is opened read-only, and unlike with a read-only map torch
    # does not warn that somebody could write.
    images = np.load(folder / f"{split}_images.npy", mmap_mode="c")
    labels = np.load(folder / f"{split}_labels.npy")
    writers = None
    if meta["writer_names"]:
        writers = torch.from_numpy(np.load(folder / f"{split}_writers.npy"))
    return ImageSplit(torch.from_numpy(images), torch.from_numpy(labels), writers)
