import os
import shutil
from collections import Counter
from pathlib import Path

import datasets as hf
import numpy as np
import pytest
import torch

from fedfrozen_app.config import ConfigError
from fedfrozen_app.data import sources
from fedfrozen_app.data.datasets import PRESETS, load_dataset
from tests.data.pictures import encode, random_pixels, write_table

PIXELS = random_pixels(1, 13, 5, 7, 3)
IMAGES = [encode(image) for image in PIXELS]
NAMES = ["owl", "emu", "kiwi"]
BIRDS = [NAMES[i % 3] for i in range(13)]


@pytest.fixture
def birds(tmp_path):
    """A folder of 11 training and 2 test images with string labels."""
    folder = tmp_path / "birds"
    write_table(folder / "train.parquet", {"image": IMAGES[:11], "label": BIRDS[:11]})
    write_table(folder / "test.parquet", {"image": IMAGES[11:], "label": BIRDS[11:]})
    return folder


# --- digits -----------------------------------------------------------------------------
def test_digits_are_scikit_learns_in_a_stratified_split(run_config):
    from sklearn.datasets import load_digits

    data = load_dataset(run_config())
    assert data.train.images.shape == (1437, 8, 8, 1)
    assert data.test.images.shape == (360, 8, 8, 1)
    assert data.train.images.dtype == torch.uint8 and data.train.labels.dtype == torch.int64
    assert data.class_names == tuple("0123456789") and data.augment == "none"
    digits = load_digits()
    for split, share in ((data.train, 0.8), (data.test, 0.2)):
        expected = np.bincount(digits.target) * share
        assert np.abs(np.bincount(split.labels) - expected).max() < 1

    def fingerprints(images, labels):
        return Counter((image.tobytes(), int(y)) for image, y in zip(images, labels, strict=True))

    whole = fingerprints(np.rint(digits.images * 255 / 16).astype(np.uint8), digits.target)
    parts = fingerprints(data.train.images.numpy(), data.train.labels)
    parts += fingerprints(data.test.images.numpy(), data.test.labels)
    assert parts == whole


def test_digits_split_does_not_follow_the_seed(run_config, tmp_path):
    first = load_dataset(run_config(seed=1))
    shutil.rmtree(tmp_path / "cache")
    second = load_dataset(run_config(seed=2))
    assert first.key == second.key
    assert torch.equal(first.train.images, second.train.images)


# --- a local folder ---------------------------------------------------------------------
def test_folder_gives_its_pixels_and_sorted_string_classes(run_config, birds):
    data = load_dataset(run_config(dataset="birds", data_dir=str(birds)))
    assert data.name == "birds" and data.augment == "crop"
    assert np.array_equal(data.train.images, PIXELS[:11])
    assert np.array_equal(data.test.images, PIXELS[11:])
    assert data.class_names == ("emu", "kiwi", "owl")
    assert [data.class_names[y] for y in data.train.labels] == BIRDS[:11]
    assert [data.class_names[y] for y in data.test.labels] == BIRDS[11:]
    assert data.train.writers is None


def test_integer_labels_are_renumbered_and_class_labels_are_kept(run_config, tmp_path):
    labels = [9, 2, 5, 2]
    for split in ("train", "test"):
        write_table(tmp_path / f"{split}.parquet", {"image": IMAGES[:4], "label": labels})
    data = load_dataset(run_config(dataset="x", data_dir=str(tmp_path)))
    assert data.class_names == ("2", "5", "9") and data.train.labels.tolist() == [2, 0, 1, 0]
    for split in ("train", "test"):
        rows = {"image": IMAGES[:4], "label": [2, 0, 0, 2]}
        write_table(tmp_path / f"{split}.parquet", rows, class_names=NAMES)
    data = load_dataset(run_config(dataset="x", data_dir=str(tmp_path)))
    assert data.class_names == tuple(NAMES) and data.train.labels.tolist() == [2, 0, 0, 2]


def test_mixed_colour_and_unlike_sizes_become_one_rgb_square(run_config, tmp_path):
    shapes = [(17, 29), (23, 19, 3), (31, 17), (19, 23, 3)]
    images = [encode(random_pixels(i, *shape)) for i, shape in enumerate(shapes)]
    for split in ("train", "test"):
        write_table(tmp_path / f"{split}.parquet", {"image": images, "label": [0, 1, 0, 1]})
    settings = {"dataset": "x", "data_dir": str(tmp_path)}
    data = load_dataset(run_config(**settings))
    assert data.train.images.shape == (4, 18, 18, 3)  # the median of 17, 19, 17, 19
    grey = data.train.images[0]
    assert torch.equal(grey[..., 0], grey[..., 2])
    small = load_dataset(run_config(**settings, image_size=13))
    assert small.train.images.shape == (4, 13, 13, 3) and small.key != data.key


def test_shards_subfolder_and_validation_split_are_found(run_config, tmp_path):
    for i, part in enumerate((slice(0, 5), slice(5, 11))):
        rows = {"image": IMAGES[part], "label": BIRDS[part]}
        write_table(tmp_path / "data" / f"train-0000{i}-of-00002.parquet", rows)
    write_table(
        tmp_path / "data" / "validation-0.parquet", {"image": IMAGES[11:], "label": BIRDS[11:]}
    )
    data = load_dataset(run_config(dataset="birds", data_dir=str(tmp_path)))
    assert np.array_equal(data.train.images, PIXELS[:11])
    assert np.array_equal(data.test.images, PIXELS[11:])


def test_plain_parquet_without_hub_metadata_works(run_config, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split in ("train", "test"):
        table = pa.table({"jpg": IMAGES[:3], "kind": BIRDS[:3]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    data = load_dataset(run_config(dataset="birds", data_dir=str(tmp_path)))
    assert np.array_equal(data.train.images, PIXELS[:3])
    assert data.class_names == ("emu", "kiwi", "owl")


def test_columns_can_be_named_and_are_listed_when_they_cannot_be_told(run_config, tmp_path):
    rows = {"image": IMAGES[:4], "mask": IMAGES[4:8], "kind": BIRDS[:4], "size": [1, 1, 2, 2]}
    for split in ("train", "test"):
        write_table(tmp_path / f"{split}.parquet", rows)
    settings = {"dataset": "x", "data_dir": str(tmp_path)}
    listed = "image, mask, kind, size"
    with pytest.raises(ConfigError, match=f"several.*image, mask.*set image-column.*{listed}"):
        load_dataset(run_config(**settings))
    with pytest.raises(ConfigError, match=f"several.*kind, size.*set label-column.*{listed}"):
        load_dataset(run_config(**settings, image_column="mask"))
    with pytest.raises(ConfigError, match=f"no column 'kin'; set label-column.*{listed}"):
        load_dataset(run_config(**settings, image_column="mask", label_column="kin"))
    data = load_dataset(run_config(**settings, image_column="mask", label_column="size"))
    assert np.array_equal(data.train.images, PIXELS[4:8]) and data.class_names == ("1", "2")


def test_missing_folder_files_and_test_split_are_named(run_config, birds, tmp_path):
    with pytest.raises(ConfigError, match="nowhere' is not a folder"):
        load_dataset(run_config(dataset="birds", data_dir=str(tmp_path / "nowhere")))
    (birds / "test.parquet").rename(birds / "extra.parquet")
    with pytest.raises(ConfigError, match="has no test split; add test"):
        load_dataset(run_config(dataset="birds", data_dir=str(birds)))
    (birds / "train.parquet").unlink()
    with pytest.raises(ConfigError, match=r"no train\*.parquet \(found extra.parquet\)"):
        load_dataset(run_config(dataset="birds", data_dir=str(birds)))
    for part in ("a", "b"):
        write_table(birds / part / "train.parquet", {"image": IMAGES[:1], "label": ["owl"]})
    with pytest.raises(ConfigError, match=r"several subfolders.*\(a, b\)"):
        load_dataset(run_config(dataset="birds", data_dir=str(birds)))


def test_labels_and_images_that_cannot_be_used_are_refused(run_config, tmp_path):
    settings = {"dataset": "x", "data_dir": str(tmp_path)}
    train = {"image": IMAGES[:3], "label": [0, 1, 2]}
    write_table(tmp_path / "train.parquet", train, class_names=NAMES)
    write_table(
        tmp_path / "test.parquet", {"image": IMAGES[:2], "label": [0, -1]}, class_names=NAMES
    )
    with pytest.raises(ConfigError, match=r"test split must be in \[0, 3\), found -1 to 0"):
        load_dataset(run_config(**settings))
    write_table(tmp_path / "test.parquet", train, class_names=NAMES[::-1])
    with pytest.raises(ConfigError, match="other class names"):
        load_dataset(run_config(**settings))
    write_table(tmp_path / "test.parquet", {"image": IMAGES[:2], "kind": [0, 1]})
    with pytest.raises(ConfigError, match="test split has no column 'label'"):
        load_dataset(run_config(**settings))
    write_table(tmp_path / "test.parquet", {**train, "image": [*IMAGES[:2], None]}, NAMES)
    with pytest.raises(ConfigError, match="'image' of the test split has a row without an image"):
        load_dataset(run_config(**settings))
    write_table(tmp_path / "train.parquet", {"image": IMAGES[:3], "label": ["owl", None, "emu"]})
    with pytest.raises(ConfigError, match="found NoneType, str"):
        load_dataset(run_config(**settings))
    (tmp_path / "train.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        load_dataset(run_config(**settings))


# --- the cache --------------------------------------------------------------------------
def test_images_are_decoded_once_and_mapped_from_disk(run_config, birds, monkeypatch):
    config = run_config(dataset="birds", data_dir=str(birds))
    first = load_dataset(config)
    monkeypatch.delattr(sources, "open_folder")  # opening the tables again would fail
    second = load_dataset(config)
    assert second.key == first.key
    assert torch.equal(first.train.images, second.train.images)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines()]
    (mapped,) = {line.split()[1] for line in maps if line.endswith("train_images.npy")}
    assert mapped == "rw-p"  # private: pages are read from the file, never written to it
    second.train.images[0] = 0  # a write stays in this process
    assert np.array_equal(load_dataset(config).train.images, PIXELS[:11])


@pytest.mark.parametrize("limit", [sources.DIGESTED_BYTES, 0])
def test_key_follows_the_content_of_the_files(run_config, birds, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(sources, "DIGESTED_BYTES", limit)
    key = load_dataset(run_config(dataset="birds", data_dir=str(birds))).key
    shutil.copytree(birds, tmp_path / "copy")  # keeps the files' times
    assert load_dataset(run_config(dataset="b", data_dir=str(tmp_path / "copy"))).key == key
    write_table(birds / "train.parquet", {"image": IMAGES[:11], "label": BIRDS[1:12]})
    data = load_dataset(run_config(dataset="birds", data_dir=str(birds)))
    assert data.key != key and data.class_names[data.train.labels[0]] == BIRDS[1]


def test_large_files_of_equal_size_and_time_differ_by_their_footers(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(sources, "DIGESTED_BYTES", 0)
    keys = []
    for name in ("owl", "own", "owl"):
        pq.write_table(pa.table({"kind": [name] * 5}), tmp_path / "train.parquet")
        os.utime(tmp_path / "train.parquet", (1, 1))
        size = (tmp_path / "train.parquet").stat().st_size
        keys.append((size, sources.digest_files({"train": [tmp_path / "train.parquet"]})["train"]))
    assert keys[0] == keys[2] and keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]


def test_truncated_cache_is_decoded_again(run_config, birds, tmp_path):
    config = run_config(dataset="birds", data_dir=str(birds))
    load_dataset(config)
    (array,) = (tmp_path / "cache").rglob("train_images.npy")
    array.write_bytes(array.read_bytes()[:-50])
    assert np.array_equal(load_dataset(config).train.images, PIXELS[:11])


def test_augmentation_fits_the_data_set_unless_it_is_set(run_config, birds):
    assert PRESETS["femnist"].augment == "crop"  # a mirrored letter is another letter
    assert {PRESETS[n].augment for n in PRESETS if n != "femnist"} == {"crop-flip"}
    folder = {"dataset": "birds", "data_dir": str(birds)}
    assert load_dataset(run_config(**folder)).augment == "crop"
    assert load_dataset(run_config(**folder, augment="none")).augment == "none"
    assert load_dataset(run_config(augment="crop")).augment == "crop"


# --- writers ----------------------------------------------------------------------------
def test_single_split_of_femnist_holds_out_a_tenth_of_each_writer(run_config, tmp_path):
    writers = ["f1_07"] * 23 + ["f0_11"] * 41 + ["f2_03"] * 4
    pixels = random_pixels(2, len(writers), 5, 5)
    order = np.random.default_rng(3).permutation(len(writers))
    rows = {
        "image": [encode(pixels[i]) for i in order],
        "character": [int(i) for i in order],  # tells the examples apart
        "writer_id": [writers[i] for i in order],
    }
    write_table(tmp_path / "train-00000-of-00001.parquet", rows)
    data = load_dataset(run_config(dataset="femnist", data_dir=str(tmp_path)))
    assert data.writer_names == ("f0_11", "f1_07", "f2_03")
    assert np.bincount(data.test.writers).tolist() == [4, 2]  # rounded tenths of 41, 23 and 4
    assert np.bincount(data.train.writers).tolist() == [37, 21, 4]
    seen = torch.cat([data.train.labels, data.test.labels]).tolist()
    assert sorted(seen) == list(range(len(writers)))
    for split in (data.train, data.test):
        for image, label, writer in zip(split.images, split.labels, split.writers, strict=True):
            assert np.array_equal(image[..., 0], pixels[label])
            assert data.writer_names[writer] == writers[label]


# --- the hub ----------------------------------------------------------------------------
class FakeHub:
    """Stands for ``datasets.load_dataset``: splits by hub id, and who asked."""

    def __init__(self, monkeypatch):
        self.content, self.asked = {}, []
        monkeypatch.setattr(hf, "load_dataset", self.load)

    def load(self, hub_id):
        self.asked.append(hub_id)
        if hub_id not in self.content:
            raise ConnectionError(f"Couldn't reach {hub_id!r} on the Hub")
        return hf.DatasetDict(self.content[hub_id])


def split_of(part, label="label"):
    images = [{"bytes": image, "path": None} for image in IMAGES[part]]
    features = hf.Features({"img": hf.Image(), label: hf.ClassLabel(names=NAMES)})
    labels = [NAMES.index(name) for name in BIRDS[part]]
    return hf.Dataset.from_dict({"img": images, label: labels}, features=features)


def test_hub_data_set_is_asked_for_once_and_then_needs_no_network(run_config, monkeypatch):
    hub = FakeHub(monkeypatch)
    hub.content["uoft-cs/cifar100"] = {
        "train": split_of(slice(0, 11), "fine_label"),
        "test": split_of(slice(11, 13), "fine_label"),
    }
    data = load_dataset(run_config(dataset="cifar100"))
    assert hub.asked == ["uoft-cs/cifar100"]
    assert np.array_equal(data.train.images, PIXELS[:11]) and data.class_names == tuple(NAMES)
    hub.content.clear()
    again = load_dataset(run_config(dataset="uoft-cs/cifar100"))
    assert hub.asked == ["uoft-cs/cifar100"] and again.key == data.key


def test_another_revision_on_the_hub_gets_another_key(run_config, monkeypatch, tmp_path):
    hub = FakeHub(monkeypatch)
    hub.content["a/b"] = {"train": split_of(slice(0, 5)), "valid": split_of(slice(5, 7))}
    key = load_dataset(run_config(dataset="a/b")).key
    hub.content["a/b"] = {"train": split_of(slice(0, 6)), "valid": split_of(slice(5, 7))}
    assert load_dataset(run_config(dataset="a/b")).key == key
    shutil.rmtree(tmp_path / "cache")
    assert load_dataset(run_config(dataset="a/b")).key != key


def test_unreachable_hub_names_the_id_and_the_local_way(run_config, monkeypatch):
    FakeHub(monkeypatch)
    with pytest.raises(ConfigError, match="'uoft-cs/cifar10' could not be.*set data-dir to a lo"):
        load_dataset(run_config(dataset="cifar10"))


def test_hub_data_set_without_train_or_test_split_is_refused(run_config, monkeypatch):
    hub = FakeHub(monkeypatch)
    hub.content["a/b"] = {"train": split_of(slice(0, 5))}
    with pytest.raises(ConfigError, match="a/b has no test split"):
        load_dataset(run_config(dataset="a/b"))
    hub.content["a/b"] = {"everything": split_of(slice(0, 5))}
    with pytest.raises(ConfigError, match="no train split, only everything"):
        load_dataset(run_config(dataset="a/b"))


def test_unknown_name_is_refused_with_the_closest_one(run_config, monkeypatch):
    hub = FakeHub(monkeypatch)
    with pytest.raises(ConfigError, match="'cifr10'; did you mean 'cifar10'.*owner/name"):
        load_dataset(run_config(dataset="cifr10"))
    assert hub.asked == []


# --- real files -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "some_class"),
    [
        ("cifar10", (32, 32, 3), 10, "airplane"),
        ("cifar100", (32, 32, 3), 100, "aquarium_fish"),
        ("femnist", (28, 28, 1), 62, "A"),
        ("tinyimagenet", (64, 64, 3), 200, "n01443537"),
    ],
)
def test_real_files_decode_under_their_presets(
    run_config, shared, tmp_path, name, shape, num_classes, some_class
):
    import pyarrow.parquet as pq

    for path in (shared / "data" / name).glob("*.parquet"):
        rows = next(pq.ParquetFile(path).iter_batches(1009))
        with pq.ParquetWriter(tmp_path / path.name, rows.schema) as writer:
            writer.write_batch(rows)
    data = load_dataset(run_config(dataset=name, data_dir=str(tmp_path)))
    assert data.train.images.shape == (1009, *shape) and data.test.images.shape[1:] == shape
    assert len(data.class_names) == num_classes and some_class in data.class_names
    assert (data.train.writers is not None) == (name == "femnist")
    # Natural images and white paper are neither black nor noise.
    assert 80 < data.train.images.float().mean() < 250
