"""The README's own-project example, run as it stands there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.freeze import trainable_parameters
from fedfrozen_app.strategies import (
    FedAdam,
    FedAvgM,
    FedFrozen,
    FedNova,
    FedProx,
    Scaffold,
    ServerRule,
)
from fedfrozen_app.transport.ledger import LedgerGrid

README = Path(__file__).parents[1] / "README.md"
SERVER, CLIENT, RULES_CLIENT = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
KERNEL = "encoder.layers.0.self_attn.in_proj_weight"


class Classifier(nn.Module):
    """A user's own Transformer over 11 tokens of width 8."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.encoder(tokens).mean(dim=1)))
        return out


def train_as_before(model: nn.Module, context: Context) -> tuple[int, float]:
    """A user's training: plain SGD with momentum and decay over all parameters."""
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model.train()
    for _ in range(3):
        tokens = torch.randn(7, 11, 8, generator=generator)
        labels = torch.randint(0, 3, (7,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained.append(sum(p.numel() for p in trainable_parameters(model).values()))
    return 21, float(loss.detach())


trained: list[int] = []


def test_the_examples_of_the_readme_freeze_a_users_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.manual_seed(1)
    start = Classifier()
    client: dict[str, Any] = {"make_model": Classifier, "train_as_before": train_as_before}
    exec(CLIENT, client)
    grid = LedgerGrid(LocalGrid(client["app"], 3))
    server: dict[str, Any] = {"grid": grid, "arrays": ArrayRecord(start.state_dict())}
    trained.clear()
    exec(SERVER, server)

    result, strategy = server["result"], server["strategy"]
    assert strategy.report.dropped == 0
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    # 2 layers of 8 wide: 2 * 8 * 8 weights and 2 * 8 biases of query and key each
    whole = sum(p.numel() for p in start.parameters())
    assert trained == [whole] * 6 + [whole - 2 * (2 * 64 + 2 * 8)] * 9

    state = {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}
    plain = Classifier()
    plain.load_state_dict(state, strict=True)
    block = strategy.state.block
    assert torch.equal(plain.state_dict()[KERNEL][:16], block.tensors[KERNEL])
    assert not torch.equal(block.tensors[KERNEL], start.state_dict()[KERNEL][:16])
    # 15 uploads: 6 whole, 9 without the kernel; counters are 8 bytes
    size = 4 * (sum(t.numel() for t in start.state_dict().values()) - 1) + 8
    assert grid.take().bytes_up == 15 * size - 9 * 4 * 2 * (2 * 64 + 2 * 8)


def my_batches(context: Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A user's data: the tokens of a client have a mean of their own."""
    partition = int(context.node_config["partition-id"])
    generator = torch.Generator().manual_seed(partition)
    return [
        (
            torch.randn(7, 11, 8, generator=generator) + partition,
            torch.randint(0, 3, (7,), generator=generator),
        )
        for _ in range(2 + partition)
    ]


def nova(**options: Any) -> FedNova:
    """FedNova as the README's text builds it."""
    (arguments,) = re.findall(r"`FedNova\((.*?)\)`", README.read_text())
    return FedNova(**eval(f"dict({arguments})"), **options)


@pytest.mark.parametrize("rule", [Scaffold, FedProx, nova, FedAvgM, FedAdam])
def test_the_rules_example_of_the_readme_runs_every_rule(
    rule: Callable[..., ServerRule[Any, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "lr=0.05, momentum=0.9" in RULES_CLIENT
    assert vars(nova().config) == {"momentum": 0.9, "proximal_mu": 0.0, "lr": 0.05}
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.manual_seed(1)
    start = Classifier()
    client: dict[str, Any] = {"make_model": Classifier, "my_batches": my_batches, "torch": torch}
    exec(CLIENT.split("@app.train()")[0], client)  # its imports, app and cache
    exec(RULES_CLIENT, client)
    grid = LedgerGrid(LocalGrid(client["app"], 3))
    strategy = FedFrozen(strategy=rule(fraction_evaluate=0.0), warmup_rounds=2)
    result = strategy.start(grid, ArrayRecord(start.state_dict()), num_rounds=4)
    assert strategy.report.dropped == 0
    plain = Classifier()
    plain.load_state_dict(result.arrays.to_torch_state_dict(), strict=True)
    assert torch.equal(plain.state_dict()[KERNEL][:16], strategy.state.block.tensors[KERNEL])  # type: ignore[union-attr]
    if isinstance(strategy.strategy, Scaffold):
        control = strategy.strategy.state.c
        assert control[KERNEL].shape == (8, 8)
        assert "norm.running_mean" not in control
        assert all(float(c.abs().sum()) > 0 for name, c in control.items())


def test_a_second_start_with_the_same_scaffold_goes_on_from_its_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    client: dict[str, Any] = {"make_model": Classifier, "my_batches": my_batches, "torch": torch}
    exec(CLIENT.split("@app.train()")[0], client)
    exec(RULES_CLIENT, client)
    torch.manual_seed(1)
    start = ArrayRecord(Classifier().state_dict())

    def run(*rounds: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)  # the user's model has dropout
        grid, strategy, arrays = LocalGrid(client["app"], 3), Scaffold(fraction_evaluate=0.0), start
        for number in rounds:  # Flower counts the rounds of every start from 1
            arrays = strategy.start(grid, arrays, num_rounds=number).arrays
            assert strategy.report.dropped == 0
        return dict(arrays.to_torch_state_dict())

    whole, parts = run(5), run(2, 3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
