import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.config import ConfigError
from fedfrozen_app.data import partition as module
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import draw_partition, make_partition, partition_report
from tests.data.pictures import encode, random_pixels, write_table

ALL_RULES = ["iid", "dirichlet", "shard"]


def made(config):
    dataset = load_dataset(config)
    return make_partition(config, dataset), dataset


def digest(partition) -> str:
    rows = [*partition.clients, partition.public, partition.test]
    text = "|".join(",".join(map(str, part.tolist())) for part in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("partitioner", ALL_RULES)
def test_public_share_and_clients_cover_training_data_without_overlap(run_config, partitioner):
    partition, dataset = made(run_config(partitioner=partitioner, num_clients=7))
    assert len(partition.clients) == 7 and len(partition.public) == 216
    held = np.concatenate([*partition.clients, partition.public])
    assert sorted(held.tolist()) == list(range(1437))
    assert partition.test.tolist() == list(range(360))
    share = np.bincount(dataset.train.labels[partition.public])
    assert share.min() >= 20 and share.max() <= 22


def test_without_base_weights_there_is_no_public_share(run_config):
    partition, _ = made(run_config(weights="none"))
    assert len(partition.public) == 0 and sum(map(len, partition.clients)) == 1437


def test_the_validation_share_is_nobodys_and_leaves_the_other_shares_as_they_were(run_config):
    plain, _ = made(run_config(public_fraction=0.25))
    partition, dataset = made(run_config(public_fraction=0.25, validation_fraction=0.2))
    assert len(plain.validation) == 0 and len(plain.public) == 359
    assert partition.public.tolist() == plain.public.tolist()
    assert partition.test.tolist() == plain.test.tolist()
    assert len(partition.validation) == 216  # a fifth of 1,078
    rows = np.concatenate([*partition.clients, partition.public, partition.validation])
    assert sorted(rows.tolist()) == list(range(1437))
    held = np.bincount(dataset.train.labels[partition.validation])
    assert held.min() >= 20 and held.max() <= 23
    report = partition_report(partition, dataset)
    assert report["validation"] == partition.validation.tolist()
    assert report["settings"]["validation-fraction"] == 0.2
    with pytest.raises(ConfigError, match="validation-fraction=0.0001 of 1437 .* is 0; it must"):
        made(run_config(validation_fraction=0.0001, weights="none"))


def test_maxima_take_balanced_subsets_before_the_public_share(run_config):
    partition, dataset = made(
        run_config(max_train_examples=503, max_test_examples=97, public_fraction=0.25)
    )
    assert len(partition.public) == 126
    kept = np.concatenate([*partition.clients, partition.public])
    assert len(set(kept.tolist())) == len(kept) == 503
    assert set(np.bincount(dataset.train.labels[kept])) == {50, 51}
    assert set(np.bincount(dataset.test.labels[partition.test])) == {9, 10}
    public = np.bincount(dataset.train.labels[partition.public])
    assert public.min() >= 12 and public.max() <= 13


def test_partition_follows_the_seed_and_no_setting_of_training(run_config):
    a, _ = made(run_config(seed=3))
    b, _ = made(run_config(seed=3, lr=0.7, rounds=99))
    c, _ = made(run_config(seed=4))
    assert digest(a) == digest(b) != digest(c)


GOLDEN = {
    "iid": "c5e9f979266b1381",
    "dirichlet": "5f1d73330cc9d148",
    "shard": "d71a6c7bd0befd55",
}

ELSEWHERE = """
import json, sys
import numpy as np, torch
np.random.seed(7); torch.manual_seed(7)
from fedfrozen_app.config import RunConfig
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import make_partition
out = {}
for partitioner in json.loads(sys.argv[2]):
    config = RunConfig(cache_dir=sys.argv[1], partitioner=partitioner)
    p = make_partition(config, load_dataset(config))
    out[partitioner] = [x.tolist() for x in [*p.clients, p.public, p.test]]
print(json.dumps(out))
"""


@pytest.mark.parametrize("partitioner", ALL_RULES)
def test_seed_1_gives_the_recorded_partition(run_config, partitioner):
    assert digest(made(run_config(partitioner=partitioner))[0]) == GOLDEN[partitioner]


def test_another_process_with_other_threads_and_cache_finds_the_same(run_config, tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "other"), json.dumps(ALL_RULES)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    for partitioner, rows in json.loads(found.stdout).items():
        partition, _ = made(run_config(partitioner=partitioner))
        here = [*partition.clients, partition.public, partition.test]
        assert [part.tolist() for part in here] == rows


def test_partition_is_drawn_once_and_then_read(run_config, monkeypatch):
    first, _ = made(run_config())
    monkeypatch.delattr(module, "_draw")
    second, _ = made(run_config())
    assert digest(first) == digest(second) and first.settings == second.settings
    with pytest.raises(NameError):
        made(run_config(alpha=0.4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_clients": 1223}, "num-clients=1223.*at least 1223 examples.*have 1221"),
        ({"num_clients": 100, "min_partition_size": 13}, "at least 1300 examples.*lower min-par"),
        ({"num_clients": 1223, "min_partition_size": 0, "partitioner": "iid"}, "use fewer clients"),
        ({"num_clients": 100, "alpha": 0.01}, "raise alpha, use fewer clients"),
        ({"partitioner": "natural"}, "dataset=digits has no writer_id column"),
        ({"partitioner": "shard", "num_clients": 3}, "can hold only 6 of 10 classes"),
        (
            {"partitioner": "shard", "num_clients": 11, "min_partition_size": 109},
            "smallest client of partitioner=shard would hold 84 examples.*min-partition-size=109",
        ),
        ({"public_fraction": 0.0001}, r"public-fraction=0.0001 of 1437 training examples is 0"),
        ({"public_fraction": 0.9999}, r"is 1437; it must leave some on both sides"),
    ],
)
def test_what_cannot_be_divided_is_an_error_that_says_what_to_change(run_config, settings, message):
    with pytest.raises(ConfigError, match=message):
        made(run_config(**settings))


# --- writers ----------------------------------------------------------------------------
@pytest.fixture
def letters(tmp_path):
    """Five writers with 3, 5, 7, 11 and 13 examples."""
    writers = [f"w{n:02}" for n in (3, 5, 7, 11, 13) for _ in range(n)]
    image = encode(random_pixels(1, 5, 5))
    rows = {
        "image": [image] * len(writers),
        "character": [i % 3 for i in range(len(writers))],
        "writer_id": writers,
    }
    for split in ("train", "test"):
        write_table(tmp_path / "letters" / f"{split}.parquet", rows)
    return {
        "dataset": "femnist",
        "data_dir": str(tmp_path / "letters"),
        "partitioner": "natural",
        "weights": "none",
    }


def test_natural_clients_are_writers_and_num_clients_is_an_upper_bound(run_config, letters):
    partition, dataset = made(run_config(**letters, num_clients=10))
    assert [len(rows) for rows in partition.clients] == [3, 5, 7, 11, 13]
    report = partition_report(partition, dataset)
    assert report["writers"] == ["w03", "w05", "w07", "w11", "w13"]
    assert report["num_clients"] == 5
    some, _ = made(run_config(**letters, num_clients=2, min_partition_size=4))
    assert len(some.clients) == 2
    assert {len(rows) for rows in some.clients} < {5, 7, 11, 13}


# --- report and picture -----------------------------------------------------------------
def test_report_counts_what_the_rows_say_and_is_json(run_config):
    config = run_config(alpha=0.3, num_clients=7)
    partition, dataset = made(config)
    report = partition_report(partition, dataset)
    assert json.loads(json.dumps(report)) == report
    labels = dataset.train.labels.numpy()
    for rows, size, counts in zip(
        report["clients"], report["sizes"], report["class_counts"], strict=True
    ):
        assert len(rows) == size
        assert np.bincount(labels[rows], minlength=10).tolist() == counts
    assert np.bincount(labels[report["public"]]).tolist() == report["public_class_counts"]
    assert report["num_public_examples"] == 216 and report["num_client_examples"] == 1221
    assert report["num_test_examples"] == len(report["test"]) == 360
    assert report["settings"]["alpha"] == 0.3 and report["settings"]["seed"] == 1
    assert report["class_names"] == list("0123456789")
    assert "writers" not in report


def test_empty_clients_are_reported_as_empty(run_config):
    config = run_config(alpha=0.01, num_clients=101, min_partition_size=0)
    report = partition_report(*made(config))
    assert 0 in report["sizes"] and len(report["class_counts"]) == 101
    assert sum(report["sizes"]) == 1221


@pytest.mark.parametrize("num_clients", [10, 100])
def test_picture_is_wide_enough_for_its_clients(run_config, tmp_path, num_clients):
    report = partition_report(*made(run_config(num_clients=num_clients)))
    draw_partition(report, tmp_path / "new" / "partition.png")
    with Image.open(tmp_path / "new" / "partition.png") as picture:
        assert picture.format == "PNG"
        assert picture.width >= 15 * num_clients
        assert picture.height >= 600
        # More than axes on white: a map of many shades.
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 100


def test_heavy_libraries_are_not_imported_with_the_module():
    heavy = "datasets sklearn matplotlib flwr_datasets pyarrow pandas".split()
    code = (
        "import sys, fedfrozen_app.data.partition, fedfrozen_app.data.images;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"
