from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from fedfrozen_app.config import RunConfig
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.latent import LatentConfig
from fedfrozen_app.training.worker import Worker, client_config, resident
from fedfrozen_app.transport.payload import LATENT, LATENT_MAPPING, Payload

QKV = "blocks.2.attn.qkv.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return RunConfig.from_mapping(
        {
            "weights": "none",
            "public-fraction": 0.0,
            "max-train-examples": 101,
            "max-test-examples": 53,
            "num-clients": 3,
            "local-epochs": 1,
            "cache-dir": str(tmp_path_factory.mktemp("cache")),
        }
    )


@pytest.fixture(scope="module")
def worker(config: RunConfig) -> Worker:
    return Worker(config)


@pytest.fixture(scope="module")
def start(worker: Worker) -> dict[str, torch.Tensor]:
    return worker.initial_weights()


def payload(
    arrays: dict[str, torch.Tensor], frozen: str = "all", *, with_block: bool = True, key: str = "k"
) -> Payload:
    if frozen == "all":
        return Payload(arrays, None, "all", "", ConfigRecord())
    active, block = Selection.build(frozen, arrays).split(arrays)
    return Payload(active, block if with_block else None, frozen, key, ConfigRecord())


def state(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_initial_weights_are_those_of_the_seed_however_much_was_trained(
    worker: Worker, start: dict[str, torch.Tensor]
) -> None:
    worker.load(payload(start))
    worker.train(0, 1)
    assert not equal(state(worker), start)
    assert equal(worker.initial_weights(), start)


@pytest.mark.parametrize("frozen", ["query-key", "value-head", "head", "*.qkv.*[key]", "fc_norm.*"])
def test_a_loaded_block_stays_while_active_entries_follow(
    worker: Worker, start: dict[str, torch.Tensor], frozen: str
) -> None:
    selection = Selection.build(frozen, start)
    worker.load(payload(start, frozen))
    assert equal(state(worker), start)
    later = {name: tensor + 1 for name, tensor in start.items()}
    worker.load(payload(later, frozen, with_block=False))
    expected = selection.merge(selection.split(later)[0], selection.split(start)[1])
    assert equal(state(worker), expected)
    assert equal(worker.active(), selection.split(later)[0])
    worker.load(payload(start))
    assert equal(state(worker), start) and worker.digest == ""


def test_what_a_client_sends_is_a_copy(worker: Worker, start: dict[str, torch.Tensor]) -> None:
    worker.load(payload(start))
    sent = worker.active()
    worker.train(1, 1)
    assert equal(sent, start)


@pytest.mark.parametrize("frozen", ["all", "query-key"])
def test_entries_of_another_model_are_refused_and_change_nothing(
    worker: Worker, start: dict[str, torch.Tensor], frozen: str
) -> None:
    worker.load(payload(start, frozen))
    good = payload({name: tensor + 1 for name, tensor in start.items()}, frozen, with_block=False)
    wrong: dict[str, Any] = {
        "lacks": {k: v for k, v in good.active.items() if k != "head.bias"},
        "other shape": {**good.active, "head.bias": torch.zeros(11)},
        "unknown": {**good.active, "extra": torch.zeros(1)},
    }
    for arrays in wrong.values():
        bad = Payload(arrays, None, good.selection, good.digest, good.config)
        with pytest.raises(ValueError, match="head.bias|extra"):
            worker.load(bad)
        assert equal(state(worker), start)


def test_testing_the_whole_model_forgets_a_block_it_overwrites(
    worker: Worker, start: dict[str, torch.Tensor]
) -> None:
    worker.load(payload(start, "query-key", key="one"))
    worker.load_whole(start, digest="one")
    assert worker.digest == "one"
    worker.load_whole({name: tensor + 1 for name, tensor in start.items()}, digest="other")
    assert worker.digest == ""


def test_features_of_one_frozen_block_are_not_used_for_another(
    config: RunConfig, worker: Worker, start: dict[str, torch.Tensor]
) -> None:
    later = {name: tensor + 0.01 for name, tensor in start.items()}
    for arrays, key in ((start, "one"), (later, "two")):
        worker.load(payload(arrays, "head", key=key))
        worker.train(0, 1)
        tested = worker.test()
    fresh = Worker(config)
    fresh.load(payload(later, "head", key="two"))
    fresh.train(0, 1)
    assert equal(worker.active(), fresh.active())
    assert tested == fresh.test()


def test_a_client_whose_features_are_known_is_not_read_again(
    worker: Worker, start: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    examples = Worker._examples
    monkeypatch.setattr(
        Worker, "_examples", lambda self, *what: read.append(what[0]) or examples(self, *what)
    )
    for server_round in (1, 2, 3):
        worker.load(payload(start, "head", key="three"))
        worker.train(0, server_round)
    assert read == ["train"]
    for server_round in (4, 5):
        worker.load(payload(start, "query-key", key="four"))
        worker.train(0, server_round)
    assert read == ["train"] * 3


def test_a_partition_that_does_not_exist_is_named(worker: Worker) -> None:
    with pytest.raises(ValueError, match="partition-id 3 is not one of the 3 partitions"):
        worker.train(3, 1)


def test_a_node_may_say_where_its_data_and_device_are(config: RunConfig, tmp_path: Path) -> None:
    node = {"partition-id": 2, "num-partitions": 3, "cache-dir": str(tmp_path), "threads": 1}
    own = client_config(config.to_mapping(), node)
    assert (own.cache_dir, own.threads) == (str(tmp_path), 1)
    assert client_config(config.to_mapping(), {"partition-id": 2}) == config


def test_a_nodes_folder_of_data_is_not_for_bundled_data(config: RunConfig) -> None:
    node = {"data-dir": "/data/node-1", "threads": 1}
    assert client_config(config.to_mapping(), node).data_dir == ""
    other = {**config.to_mapping(), "dataset": "cifar10", "data-dir": "/data", "weights": "none"}
    assert client_config(other, node).data_dir == "/data/node-1"


def test_a_process_keeps_one_worker(config: RunConfig) -> None:
    one = resident(config)
    assert resident(RunConfig.from_mapping(config.to_mapping())) is one
    other = resident(config.model_copy(update={"seed": 7}))
    assert other is not one and resident(config) is not one


# --- latents ----------------------------------------------------------------------------
SMALL = LatentConfig(dim=5, rank=3, generator="sketch", seed=7)


def latent_payload(
    z: torch.Tensor,
    base: dict[str, torch.Tensor] | None,
    latent: LatentConfig = SMALL,
    spec: str = "all",
) -> Payload:
    config = ConfigRecord({LATENT_MAPPING: latent.to_text()})
    return Payload({LATENT: z}, base, spec, "b", config)


def theta(
    z: torch.Tensor,
    base: dict[str, torch.Tensor],
    latent: LatentConfig = SMALL,
    spec: str = "all",
) -> dict[str, torch.Tensor]:
    """The model of a latent as the server makes it."""
    whole = {name: tensor.clone() for name, tensor in base.items()}
    latent.mapping(Selection.build(spec, base)).apply_(whole, base, z)
    return whole


def latents_of(base: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    size = SMALL.mapping(Selection.build("all", base)).size
    return torch.randn(count, size, generator=torch.Generator().manual_seed(5))


def test_a_latent_stands_for_the_same_weights_as_on_the_server(
    config: RunConfig, start: dict[str, torch.Tensor]
) -> None:
    worker = Worker(config)
    first, second = latents_of(start, 2)
    worker.load(latent_payload(first, start))
    assert equal(state(worker), theta(first, start)) and not equal(state(worker), start)
    assert worker.digest == "b" and equal(worker.active(), {LATENT: first})
    worker.load(latent_payload(second, None))  # the base is there and has not moved
    assert equal(state(worker), theta(second, start))


@pytest.mark.parametrize(
    ("latent", "spec"),
    [
        (LatentConfig(dim=5, rank=3, generator="sketch", seed=8), "all"),
        (LatentConfig(dim=5, rank=3, generator="gaussian-qr", seed=7), "all"),
        (SMALL, "query-key"),  # maps fewer rows: the others are the base's again
    ],
)
def test_each_message_says_which_map_its_latent_is_of(
    config: RunConfig, start: dict[str, torch.Tensor], latent: LatentConfig, spec: str
) -> None:
    worker = Worker(config)
    first, second = latents_of(start, 2)
    worker.load(latent_payload(first, start))
    worker.load(latent_payload(second, None, latent, spec))
    expected = theta(second, start, latent, spec)
    assert equal(state(worker), expected) and not equal(expected, theta(second, start))


def test_a_client_trains_and_sends_the_latent_and_nothing_else(
    config: RunConfig, start: dict[str, torch.Tensor]
) -> None:
    worker = Worker(config)
    # a head of zeros lets no gradient through
    base = {**start, "head.weight": torch.linspace(-1, 1, 640).reshape(10, 64)}
    (z,) = latents_of(base, 1)
    worker.load(latent_payload(z, base))
    assert worker.train(0, 1).steps > 0
    sent = worker.active()
    assert sent.keys() == {LATENT} and float((sent[LATENT] - z).abs().min()) > 0
    assert equal(state(worker), theta(sent[LATENT], base))


def test_weights_train_again_after_a_latent(
    config: RunConfig, start: dict[str, torch.Tensor]
) -> None:
    worker, untouched = Worker(config), Worker(config)
    (z,) = latents_of(start, 1)
    worker.load(latent_payload(z, start))
    for one in (worker, untouched):
        one.load(payload(start))
        one.train(0, 1)
    assert worker.active().keys() == start.keys()
    assert equal(state(worker), state(untouched)) and not equal(state(worker), start)
