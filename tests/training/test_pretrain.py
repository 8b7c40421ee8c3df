"""Claims about base weights trained on the public share, on the bundled digits."""

import dataclasses
import os

import pytest
import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.images import ImageExamples, Preprocessor
from fedfrozen_app.data.partition import make_partition
from fedfrozen_app.models.registry import VIT_DIGITS, create_model, model_spec
from fedfrozen_app.models.weights import load_weights
from fedfrozen_app.training import pretrain
from fedfrozen_app.training.local import evaluate
from fedfrozen_app.training.pretrain import RECIPE, base_weights


@pytest.fixture(autouse=True)
def one_cpu_thread(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch):
    """One pass in the place of the recipe's twenty."""
    monkeypatch.setattr(pretrain, "RECIPE", dataclasses.replace(RECIPE, epochs=1))


def setting(cache, **keys):
    config = RunConfig.from_mapping({"cache-dir": str(cache), "device": "cpu", **keys})
    dataset = load_dataset(config)
    return config, dataset, make_partition(config, dataset)


def read(path):
    return safetensors.torch.load_file(path)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_the_base_classifies_three_of_four_digits_from_216_public_examples(tmp_path):
    config, dataset, partition = setting(tmp_path)
    assert len(partition.public) == 216
    path = base_weights(config, dataset, partition)
    model, spec = create_model(config, 10), model_spec(config)
    preprocessor = Preprocessor(8, spec.mean, spec.std, 3, "none", "cpu")
    split, rows = dataset.test, torch.from_numpy(partition.test)
    test = ImageExamples(split.images, split.labels, rows, preprocessor)
    before = evaluate(model, test, batch_size=360)[1]
    load_weights(model, str(path), config)
    assert before < 0.25
    assert evaluate(model, test, batch_size=360)[1] > 0.75
    VisionTransformer(**VIT_DIGITS, num_classes=10).load_state_dict(read(path), strict=True)


def test_the_base_is_trained_once_and_lies_in_the_cache(tmp_path, quick, monkeypatch):
    arguments = setting(tmp_path)
    path = base_weights(*arguments)
    content = path.read_bytes()
    monkeypatch.setattr(pretrain, "train", None)  # a second training would fail
    assert base_weights(*arguments) == path
    assert path.read_bytes() == content
    assert path.parent.parent == tmp_path / "base"


def test_the_base_is_bit_identical_wherever_it_is_trained(tmp_path, quick):
    torch.manual_seed(1)
    first = read(base_weights(*setting(tmp_path / "a")))
    torch.manual_seed(2)
    assert same(read(base_weights(*setting(tmp_path / "b"))), first)
    assert not same(read(base_weights(*setting(tmp_path / "b", seed=2))), first)


def test_only_public_examples_are_seen_with_the_runs_augmentation(tmp_path, quick, monkeypatch):
    config, dataset, partition = setting(tmp_path, augment="crop", seed=3)
    seen = []

    def spy(model, examples, settings, **where):
        seen.extend([examples, settings, where])
        return train(model, examples, settings, **where)

    train = pretrain.train
    monkeypatch.setattr(pretrain, "train", spy)
    base_weights(config, dataset, partition)
    examples, settings, where = seen
    everything = torch.arange(len(examples))
    x, y = examples.batch(everything, None)
    rows = torch.from_numpy(partition.public)
    spec = model_spec(config)
    preprocessor = Preprocessor(8, spec.mean, spec.std, 3, "none", "cpu")
    assert torch.equal(y, dataset.train.labels[rows])
    assert torch.equal(x, preprocessor(dataset.train.images[rows]))
    moved, _ = examples.batch(everything, torch.Generator().manual_seed(1))
    assert not torch.equal(moved, x)
    held = {int(row) for rows in partition.clients for row in rows}
    assert held.isdisjoint(rows.tolist())
    assert (settings.optimizer, settings.lr, settings.batch_size) == ("adamw", 1e-3, 32)
    assert where == {"seed": 3, "server_round": 0, "partition_id": -1}


def test_a_damaged_file_is_trained_again(tmp_path, quick, caplog):
    arguments = setting(tmp_path)
    path = base_weights(*arguments)
    content = path.read_bytes()
    with path.open("r+b") as file:  # far from both ends: no header, no tail
        file.seek(len(content) // 2, os.SEEK_SET)
        file.write(bytes([content[len(content) // 2] ^ 1]))
    assert base_weights(*arguments).read_bytes() == content
    assert "are damaged; training them again" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"public-fraction": 0.2},
        {"image-size": 16},
        {"augment": "crop"},
        {"model": "test_vit", "weights": "base"},
        {"max-train-examples": 700},
    ],
    ids=str,
)
def test_what_the_base_depends_on_gives_it_another_key(tmp_path, change):
    cpu = torch.device("cpu")
    one, other = (pretrain._key(*setting(tmp_path, **keys), cpu) for keys in ({}, change))
    assert one != other


def test_the_key_names_the_seed_and_the_data(tmp_path):
    config, dataset, partition = setting(tmp_path)
    cpu = torch.device("cpu")
    keys = {
        pretrain._key(config, dataset, partition, cpu),
        pretrain._key(setting(tmp_path, seed=2)[0], dataset, partition, cpu),
        pretrain._key(config, dataclasses.replace(dataset, key="other"), partition, cpu),
    }
    assert len(keys) == 3


def test_the_federation_does_not_change_the_base(tmp_path):
    cpu = torch.device("cpu")
    change = {"alpha": 5.0, "num-clients": 7, "strategy": "fedavg", "lr": 0.1, "rounds": 3}
    one, other = (pretrain._key(*setting(tmp_path, **keys), cpu) for keys in ({}, change))
    assert one == other


def test_the_key_names_the_threads_and_the_device_whose_sums_round_alike(tmp_path):
    arguments = setting(tmp_path)
    one = pretrain._key(*arguments, torch.device("cpu"))
    assert one != pretrain._key(*arguments, torch.device("cuda", 0))
    torch.set_num_threads(2)
    assert one != pretrain._key(*arguments, torch.device("cpu"))


def test_without_public_data_there_is_no_base(tmp_path):
    arguments = setting(tmp_path, weights="none")
    with pytest.raises(ConfigError, match=r"public-fraction \(now 0\.0\) or use weights=none"):
        base_weights(*arguments)
