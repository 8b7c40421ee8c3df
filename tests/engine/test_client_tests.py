"""Clients test on examples of their own, which they do not train on, and change nothing by it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import make_partition
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.training.worker import resident
from tests.engine.run import Run, equal


def test_held_out_examples_are_a_clients_own_and_leave_the_others_as_they_were(
    tmp_path: Path, cache: str
) -> None:
    run = Run(tmp_path, cache, rounds=1, fraction_evaluate=1.0, client_test_fraction=0.25)
    worker = resident(run.config)
    partition = worker.partition
    whole = make_partition(run.config.model_copy(update={"fraction_evaluate": 0.0}), worker.dataset)
    assert whole.client_tests == ()
    for before, rows, tests in zip(
        whole.clients, partition.clients, partition.client_tests, strict=True
    ):
        assert len(tests) == round(0.25 * len(before)) > 0
        assert np.array_equal(np.sort(np.concatenate([rows, tests])), before)
    assert run.metrics[1].num_examples == sum(map(len, partition.clients))


def test_every_client_keeps_an_example_to_train_on_and_somebody_must_test(cache: str) -> None:
    keys = {
        "partitioner": "iid", "num-clients": 5, "public-fraction": 0.5, "max-train-examples": 20,
        "fraction-evaluate": 1.0, "client-test-fraction": 0.9, "cache-dir": cache,
    }  # fmt: skip
    config = RunConfig.from_mapping(keys)
    partition = make_partition(config, load_dataset(config))
    assert [len(rows) for rows in (*partition.clients, *partition.client_tests)] == [1] * 10
    nobody = RunConfig.from_mapping({**keys, "num-clients": 10})
    with pytest.raises(ConfigError, match=r"client-test-fraction=0.9 leaves no client .* than 1;"):
        make_partition(nobody, load_dataset(nobody))


def test_each_clients_result_is_that_of_the_rounds_model_on_its_examples(
    tmp_path: Path, cache: str
) -> None:
    run = Run(tmp_path, cache, fraction_evaluate=1.0, eval_every=2)
    tests = run.folder.client_tests()
    assert [(test["round"], test["client"]) for test in tests] == [
        (at, client) for at in (2, 3) for client in (0, 1, 2)
    ]
    worker = resident(run.config)
    worker.load_whole(run.model)
    for test in tests[3:]:
        rows = torch.from_numpy(worker.partition.client_tests[int(test["client"])])
        x, y = worker._examples("train", rows.numpy()).batch(torch.arange(len(rows)), None)
        with torch.no_grad():
            logits = worker.model.eval()(x)
        assert test["num_examples"] == len(rows)
        assert test["accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
        loss = torch.nn.functional.cross_entropy(logits, y)
        assert test["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert test["loss_after"] != test["loss"]
    assert all("loss_after" not in test for test in tests[:3])


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fedfrozen", "warmup_rounds": 1},
        pytest.param(
            {"strategy": "scaffold", "frozen": "query-key", "warmup_rounds": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"strategy": "latent", "warmup_rounds": 1, "generator": "sketch"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda keys: keys["strategy"],
)
def test_tests_change_neither_the_model_nor_what_a_round_costs(
    tmp_path: Path, cache: str, keys: dict[str, str | int]
) -> None:
    often = Run(tmp_path, cache, run_name="often", fraction_evaluate=1.0, **keys)
    once = Run(tmp_path, cache, run_name="once", fraction_evaluate=1.0, eval_every=0, **keys)
    assert equal(often.model, once.model)
    for one, other in zip(often.metrics, once.metrics, strict=True):
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert (one.wire_bytes_up, one.wire_bytes_down) == (
            other.wire_bytes_up, other.wire_bytes_down)  # fmt: skip
    assert [line.bytes_evaluate > 0 for line in often.metrics] == [False, True, True, True]
    assert [line.bytes_evaluate > 0 for line in once.metrics] == [False, False, False, True]
    assert often.folder.client_tests()[-3:] == once.folder.client_tests()
    # a frozen block that clients have does not travel again
    whole = 3 * 4 * sum(tensor.numel() for tensor in often.model.values())
    assert often.metrics[1].bytes_evaluate == whole
    assert often.metrics[3].bytes_evaluate < whole


@pytest.mark.slow
def test_a_share_of_the_clients_tests_and_two_processes_say_the_same(
    tmp_path: Path, cache: str
) -> None:
    keys = {"rounds": 1, "fraction_evaluate": 0.67, "num_clients": 3}
    one = Run(tmp_path, cache, run_name="one", **keys)
    two = Run(tmp_path, cache, run_name="two", jobs=2, **keys)
    assert len(one.folder.client_tests()) == 2
    assert one.folder.client_tests() == two.folder.client_tests()


def test_going_back_takes_back_later_tests(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"run-dir": str(tmp_path), "run-name": "a"})
    folder = RunFolder.create(config)
    for server_round in (1, 2):
        folder.append_clients(server_round, [{"client": 0, "num_examples": 2, "accuracy": 0.5}])
    folder.go_back_to(1)
    assert [test["round"] for test in folder.client_tests()] == [1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"client-test-fraction": 0.5}, "client-test-fraction=0.5 has no effect"),
        ({"fraction-evaluate": 0.5, "byte-budget": 9}, "byte-budget=9 does not foresee"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_mapping(keys)
