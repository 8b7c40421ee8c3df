"""Claims about nodes that hold their own examples and nobody else's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from sklearn.datasets import load_digits

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.training.worker import resident
from tests.data.pictures import encode, write_table
from tests.engine.test_resume import comparable, model_of

NAMES = list("0123456789")
SIZES = (31, 47)  # examples of the nodes: one has the digits 0 to 4, the other 5 to 9
KEYS: dict[str, Any] = {
    "dataset": "mine", "model": "vit-digits", "weights": "none", "num-clients": 2, "rounds": 2,
    "warmup-rounds": 1, "local-steps": 3, "batch-size": 8, "lr": 0.05, "threads": 1,
    "public-fraction": -1.0, "run-name": "run",
}  # fmt: skip


class OwnData(LocalGrid):
    """Nodes in this process, each with a folder of data and a cache of its own."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        super().__init__(CLIENT_APP, config.num_clients, config.to_mapping())
        self.root = root

    def _context(self, node_id: int) -> Context | None:
        context = super()._context(node_id)
        if context is not None:
            context.node_config["data-dir"] = str(self.root / f"node-{node_id - 1}")
            context.node_config["cache-dir"] = str(self.root / f"cache-{node_id - 1}")
        return context


def rows(of: np.ndarray, writer: str, names: list[str]) -> dict[str, list]:
    digits = load_digits()
    images = [encode(np.rint(digits.images[i] * (255 / 16)).astype(np.uint8)) for i in of]
    labels = [names.index(str(digits.target[i])) for i in of]
    return {"image": images, "label": labels, "writer_id": [writer] * len(labels)}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two nodes and a server, and one of all there is."""
    root, target = tmp_path_factory.mktemp("machines"), load_digits().target
    own = [np.flatnonzero(target < 5)[: SIZES[0]], np.flatnonzero(target >= 5)[: SIZES[1]]]
    parts = [rows(positions, f"writer {node}", NAMES) for node, positions in enumerate(own)]
    rest = np.setdiff1d(np.arange(len(target)), np.concatenate(own))
    for node, part in enumerate(parts):
        write_table(root / f"node-{node}" / "train.parquet", part, NAMES)
    together = {key: parts[0][key] + parts[1][key] for key in parts[0]}
    write_table(root / "all" / "train.parquet", together, NAMES)
    write_table(root / "server" / "train.parquet", rows(rest[:11], "nobody", NAMES), NAMES)
    for folder in ("all", "server"):
        write_table(root / folder / "test.parquet", rows(rest[11:90], "nobody", NAMES), NAMES)
    return root


def config_of(root: Path, machines: Path, folder: str, **keys: Any) -> RunConfig:
    where = {"data-dir": str(machines / folder), "cache-dir": str(root / "cache")}
    return RunConfig.from_mapping({**KEYS, **where, "run-dir": str(root / "runs"), **keys})


def run(config: RunConfig, grid: LocalGrid) -> RunFolder:
    resident.cache_clear()
    with grid:
        return run_federation(config, grid, lambda metrics: None)


def test_nodes_with_their_own_data_train_the_model_of_a_run_that_has_it_all(
    tmp_path: Path, machines: Path
) -> None:
    config = config_of(tmp_path / "own", machines, "server", partitioner="local")
    apart = run(config, OwnData(machines, config))
    config = config_of(tmp_path / "all", machines, "all", partitioner="natural")
    together = run(config, LocalGrid(CLIENT_APP, 2, config.to_mapping()))
    assert model_of(apart) == model_of(together)
    lines = comparable(apart)
    assert [line["num_examples"] for line in lines] == [0, sum(SIZES), sum(SIZES)]
    # in one process nobody has to be sent the frozen block again
    assert [{**line, "bytes_down": 0, "wire_bytes_down": 0} for line in lines] == [
        {**line, "bytes_down": 0, "wire_bytes_down": 0} for line in comparable(together)
    ]
    report = (apart.path / "partition.json").read_text()
    assert '"num_public_examples": 11' in report and "class_counts" not in report


def test_a_server_without_a_test_split_is_refused_and_a_node_is_not(
    tmp_path: Path, machines: Path
) -> None:
    config = config_of(tmp_path, machines, "node-0", partitioner="local")
    assert not load_dataset(config).has_test
    with pytest.raises(ConfigError, match="has no test split, and the server tests the model"):
        run(config, OwnData(machines, config))
    with pytest.raises(ConfigError, match="has no test split"):
        load_dataset(config_of(tmp_path, machines, "node-0", partitioner="iid"))


def test_classes_without_names_are_refused_for_they_would_differ(
    tmp_path: Path, machines: Path
) -> None:
    part = rows(np.arange(20), "somebody", NAMES)
    write_table(tmp_path / "plain" / "train.parquet", part)
    config = config_of(tmp_path, tmp_path, "plain", partitioner="local")
    with pytest.raises(ConfigError, match="must number their classes alike, and column 'label'"):
        load_dataset(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dataset": "digits", "data-dir": ""},
            "partitioner=local is for nodes with images of their own",
        ),
        ({"model": "tinygpt"}, "partitioner=local is for nodes with images of their own"),
        ({"public-fraction": 0.2}, "public-fraction=0.2 has no effect with partitioner=local"),
    ],
)
def test_what_cannot_go_with_local_data_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_mapping({"dataset": "mine", "data-dir": "x", "partitioner": "local", **keys})
