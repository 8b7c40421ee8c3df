"""The rule that CONTRIBUTING.md shows, built as it stands there."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import MetricRecord

from fedfrozen_app.strategies import FedAdam, FedFrozen, FreezeSchedule, ServerRule, Update
from tests.strategies.federation import HEAD, QKV, Federation, initial

CODE = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(), re.S
)[0]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    built = ModuleType("fedamsgrad")
    monkeypatch.setitem(sys.modules, "fedamsgrad", built)  # dataclasses look their module up
    exec(compile(CODE, "CONTRIBUTING.md", "exec"), built.__dict__)
    return built


def checked(tmp_path: Path, *words: str) -> None:
    (tmp_path / "fedamsgrad.py").write_text(CODE)
    done = subprocess.run(
        [sys.executable, "-m", *words, "pyproject.toml", str(tmp_path / "fedamsgrad.py")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_is_about_sixty_lines_of_the_house_style(tmp_path: Path) -> None:
    assert len(CODE.strip().splitlines()) <= 72
    assert ast.get_docstring(ast.parse(CODE)) is not None
    checked(tmp_path, "ruff", "check", "--config")
    checked(tmp_path, "ruff", "format", "--check", "--config")


@pytest.mark.slow
def test_the_example_is_typed(tmp_path: Path) -> None:
    checked(tmp_path, "mypy", "--config-file")


def test_the_example_does_what_its_equations_say(module: ModuleType) -> None:
    config = module.FedAMSGradConfig(server_lr=0.5, beta1=0.5, beta2=0.75, tau=0.25)
    x = {"w": torch.zeros(2, dtype=torch.float64)}

    def step(state: object, *values: tuple[float, list[float]]) -> object:
        updates = (
            Update(0, n, {"w": torch.tensor(y, dtype=torch.float64)}, MetricRecord())
            for n, y in values
        )
        return module.aggregate(state, updates, config)

    # Delta = (1*4 + 3*0)/4 = 1 and (1*-8 + 3*0)/4 = -2; m = .5, -1; v = h = .25, 1
    first = step(module.FedAMSGradState(x), (1, [4.0, -8.0]), (3, [0.0, 0.0]))
    expected = [0.5 * 0.5 / (0.5 + 0.25), -0.5 * 1 / (1 + 0.25)]
    assert first.x["w"].tolist() == pytest.approx(expected)  # type: ignore[attr-defined]
    # Delta = 0: m halves, v shrinks to three quarters, h stays
    second = step(first, (1, first.x["w"].tolist()))  # type: ignore[attr-defined]
    assert second.v["w"].tolist() == [0.1875, 0.75]  # type: ignore[attr-defined]
    assert second.h["w"].tolist() == [0.25, 1.0]  # type: ignore[attr-defined]
    moved = second.x["w"] - first.x["w"]  # type: ignore[attr-defined]
    assert moved.tolist() == pytest.approx([value / 2 for value in expected])


def test_the_example_freezes_thaws_and_is_saved_like_the_rules_of_the_package(
    module: ModuleType, tmp_path: Path
) -> None:
    schedule = FreezeSchedule(((1, "all"), (3, "query-key"), (5, "all")))
    rule: ServerRule = module.FedAMSGrad(server_lr=0.1)  # type: ignore[type-arg]
    strategy = FedFrozen(rule, schedule=schedule)
    federation = Federation(tmp_path)
    after, _ = federation.run(strategy, 4)
    assert torch.equal(after[QKV][:14], _kernel_after_warmup(module, tmp_path / "b"))
    assert rule.state.m[QKV].shape == (7, 7) and rule.state.m[HEAD].shape == (5, 7)
    restored = FedFrozen(module.FedAMSGrad(server_lr=0.1), schedule=schedule)
    restored.load_state_dict(strategy.state_dict())
    assert torch.equal(restored.strategy.state.h[QKV], rule.state.h[QKV])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="state of FedAMSGrad, not of FedAdam; restore it"):
        FedAdam().load_state_dict(rule.state_dict())


def _kernel_after_warmup(module: ModuleType, root: Path) -> torch.Tensor:
    after, _ = Federation(root).run(module.FedAMSGrad(server_lr=0.1), 2)
    assert not torch.equal(after[QKV][:14], initial()[QKV][:14])
    return after[QKV][:14]


def test_the_example_refuses_a_rate_of_zero(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="server_lr must be > 0, got 0"):
        module.FedAMSGrad(server_lr=0)
