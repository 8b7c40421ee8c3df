"""What the figures and the map write, on a federation that takes a second."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.theory import figures
from fedfrozen_app.theory.algorithms import Federation, freeze_losses, simulate
from fedfrozen_app.theory.claims import OTHERS, judge, rises, table
from fedfrozen_app.theory.command import FIGURES, run_theory
from fedfrozen_app.theory.map import explore, make_map
from fedfrozen_app.theory.methods import Outcome, outcomes, with_steps
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.settings import BASE, MAP, SHARES

TINY = Setting(
    teacher="tanh", dim=3, key_dim=2, tokens=3, examples=3, clients=3, rounds=10, local_steps=5,
    lr=0.02,
)  # fmt: skip
SEEDS = (0, 1, 2)


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_figure_is_a_picture_and_numbers_in_the_agreed_form(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    run_theory(name, tmp_path / "out", seeds=2, say=said.append, base=TINY)
    assert said == [f"{tmp_path}/out/{name}.png, {tmp_path}/out/{name}.json"]
    picture = (tmp_path / "out" / f"{name}.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 10_000
    numbers = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    keys = {"x", "x_label", "y_label", "series", "settings"}
    assert set(numbers) == (keys | {"lower"} if name == "profile" else keys)
    assert numbers["settings"]["seeds"] == [0, 1] and numbers["settings"]["dim"] == 3
    assert len(numbers["series"]) >= 3
    for series in numbers["series"].values():
        assert set(series) == {"mean", "std"}
        assert len(series["mean"]) == len(series["std"]) == len(numbers["x"])
        assert all(value >= 0 for value in series["std"] if value is not None)


def test_mean_and_spread_are_over_seeds_and_null_where_a_seed_diverged() -> None:
    values = torch.tensor([[1.0, 3.0], [2.0, math.inf], [5.0, math.nan]])
    figure = figures.Figure("f", "t", [0, 1, 2], "x", "y", {"s": values})
    series = figure.to_json()["series"]["s"]
    assert series == {"mean": [2.0, None, None], "std": [pytest.approx(math.sqrt(2)), None, None]}


def test_the_profile_figure_is_h_along_fedavg_and_one_process_or_two_give_the_same() -> None:
    one = figures.profile(TINY, SEEDS, (0.0, 2.0))
    run = simulate(Federation.build([replace(TINY, rho=2.0)], SEEDS))
    torch.testing.assert_close(one.series["rho=2"].double(), run.profile, rtol=1e-4, atol=0)
    two = figures.profile(TINY, SEEDS, (0.0, 2.0), jobs=2)
    assert all(torch.equal(one.series[name], two.series[name]) for name in ("rho=0", "rho=2"))


def test_a_seed_counts_as_rising_half_a_percent_above_its_least() -> None:
    assert rises(torch.tensor([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [1.004, 1.006, 0.9]])) == 1
    figure = figures.profile(TINY, SEEDS, (0.0, 2.0))
    counted = {name: rises(h) for name, h in figure.series.items()}
    assert figure.settings["seeds_where_h_rises_again"] == counted


def test_the_lower_panel_of_the_profile_is_how_far_h_is_above_its_least_so_far() -> None:
    h = torch.tensor([[2.0, 1.0], [1.0, 1.5], [1.1, 0.9]])
    expected = torch.tensor([[0.0, 0.0], [0.0, 50.0], [10.0, 0.0]])
    torch.testing.assert_close(figures.above_least(h), expected, rtol=0, atol=1e-4)


def test_the_warmup_figure_ends_at_fedavg_and_names_the_best_share() -> None:
    figure = figures.warmup(TINY, SEEDS, (2.0,), SHARES, jobs=1)
    fed = Federation.build([replace(TINY, rho=2.0)], SEEDS)
    run = simulate(fed)
    losses = freeze_losses(fed, run)
    torch.testing.assert_close(figure.series["rho=2"].double(), losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[-1], run.loss[-1])
    best = figure.settings["best_ratio_of_the_mean"]["rho=2"]
    assert best == losses.mean(1).argmin().item() / 10


def test_the_local_steps_figure_is_the_ratio_at_the_warmup_with_least_held_out_loss() -> None:
    figure = figures.local_steps(TINY, SEEDS, (1.0, 2.0), (1, 5), jobs=1)
    cells = [replace(TINY, rho=2.0, local_steps=1)]
    found = outcomes("FedAvg", cells, SEEDS)
    pick = found["FedFrozen"].held_out.argmin(0)[0]
    losses = freeze_losses(fed := Federation.build(cells, SEEDS), simulate(fed))
    expected = [losses[[2, 4, 6, 8][i], s] / losses[-1, s] for s, i in enumerate(pick.tolist())]
    ours = figure.series["rho=2"][0].double()
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-4, atol=0)


def test_tuned_steps_of_a_method_are_no_worse_by_held_out_loss_and_the_one_step_is_its_own() -> (
    None
):
    cells = [replace(TINY, rho=rho) for rho in (0.0, 2.0)]
    three = outcomes("FedProx", with_steps(cells, (0.5, 1.0, 2.0)), SEEDS)["FedProx"]
    alone = outcomes("FedProx", cells, SEEDS)["FedProx"]
    torch.testing.assert_close(three.at_step(1, 3).loss, alone.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(three.at_step(1, 3).held_out, alone.held_out, rtol=1e-12, atol=0)
    joined = three.joined(3)
    assert joined.loss.shape == (6, 2, 3)
    assert (joined.held_out.amin(0) <= alone.held_out.amin(0) + 1e-12).all()
    # cell 1 (rho = 2) at half the step is row 2 of 6
    half = outcomes("FedProx", [replace(cells[1], lr=0.01)], SEEDS)["FedProx"].loss[:, 0]
    torch.testing.assert_close(joined.loss[[0, 3], 1], half)


def test_a_choice_that_diverged_is_not_made() -> None:
    loss = torch.tensor([[[math.nan, 1.0]], [[2.0, 5.0]]])
    held_out = torch.tensor([[[math.nan, 4.0]], [[9.0, 3.0]]])
    assert Outcome(loss, held_out).chosen().tolist() == [[2.0, 5.0]]


def column(rows: list[list[float]]) -> torch.Tensor:
    """One seed."""
    return torch.tensor(rows)[..., None]


def hand_made(**changes: Any) -> dict[str, Any]:
    """Numbers that show all four claims: three rounds, rho = 0, 1, 2."""
    rising = torch.tensor([[1.0, 1.0, 1.0], [0.9, 0.9, 0.8], [0.8, 0.8, 0.9]])
    losses = torch.tensor([[1.0, 1.0, 1.0], [0.9, 0.9, 0.8], [0.8, 0.8, 0.95]])
    final = {name: torch.tensor([1.0, 1.5, 2.0]) for name in OTHERS}
    final["FedFrozen"] = torch.tensor([1.0, 1.2, 1.5])
    return {
        "profiles": torch.stack([rising, rising], dim=2),
        "losses": losses,
        "ratios": [1.0, 0.95, 0.9],
        "final": final,
    } | changes


def test_a_setting_that_shows_all_claims_is_found_to() -> None:
    claims = judge(**hand_made())
    assert claims.shown == dict.fromkeys(["a", "a1", "b", "c", "d", "d1"], True)
    assert claims.rise == pytest.approx(0.125) and claims.best == [1.0, 1.0, 0.5]
    assert claims.gain == pytest.approx(1 - 0.8 / 0.95)
    assert claims.against == {name: pytest.approx(0.75) for name in OTHERS}
    text = table({"one": claims})
    assert "| one | 12.5% | 2/2 | 1.00 0.95 0.90 | 1.00 1.00 0.50 |" in text
    assert "| a b c d |" in text
    counted = "(a) shows in 1, and by seeds, written (a), in 1; (b) in 1, (c) in 1, (d) in 1"
    assert f"Of 1 settings, {counted}" in text


def test_a_seed_that_still_falls_hides_those_that_rise_from_the_mean_only() -> None:
    at_0 = torch.tensor([[1.0], [0.9], [0.8]]).expand(3, 3)
    far = torch.tensor([[1.0, 1.0, 9.0], [0.8, 0.8, 8.0], [0.9, 0.9, 5.0]])
    claims = judge(**hand_made(profiles=torch.stack([at_0, at_0, far], dim=1)))
    assert claims.rise == 0 and claims.rising == "2/3"
    assert not claims.shown["a"] and claims.shown["a1"]
    assert "| (a) b c d |" in table({"one": claims})


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        # never rises
        ("a", {"profiles": column([[1.0, 1.0], [0.9, 0.8], [0.8, 0.8]])}),
        # never falls
        ("a", {"profiles": column([[1.0, 0.7], [0.9, 0.7], [0.8, 0.9]])}),
        # rises at rho 0
        ("a1", {"profiles": column([[0.7, 1.0], [0.8, 0.8], [0.6, 0.9]])}),
        ("b", {"ratios": [1.0, 1.0, 0.99]}),
        ("b", {"ratios": [1.0, 0.8, 0.9]}),
        ("c", {"losses": torch.tensor([[1.0, 1.0], [0.9, 0.9], [0.8, 0.8]])}),  # never best
        ("c", {"losses": torch.tensor([[1.0, 1.0], [0.7, 0.8], [0.8, 0.95]])}),  # does not move
        ("d", {"final": {**hand_made()["final"], "SCAFFOLD": torch.tensor([1.0, 1.0, 1.4])}}),
        ("d", {"final": {**hand_made()["final"], "FedAvg": torch.full((3,), math.nan)}}),
    ],
)
def test_a_claim_that_is_not_shown_is_not_found(claim: str, changes: dict[str, Any]) -> None:
    shown = judge(**hand_made(**changes)).shown
    assert not shown[claim]
    assert sum(shown.values()) >= 3


def test_a_map_has_a_row_for_every_setting_and_says_how_signals_do(tmp_path: Path) -> None:
    settings = {"tiny": TINY, "softmax": replace(TINY, teacher="softmax")}
    text = make_map(settings, SEEDS, (0.0, 1.0, 2.0), tmp_path)
    assert (tmp_path / "map.md").read_text() == text
    lines = text.splitlines()
    assert lines[2].startswith("| tiny | ") and lines[3].startswith("| softmax | ")
    written = json.loads((tmp_path / "map.json").read_text())
    assert written["settings"]["softmax"]["teacher"] == "softmax"
    assert written["signals"]["fixed 40%"]["mean"] >= 1
    assert f"| never | {written['signals']['never']['mean']:.3f} |" in text
    assert "54 runs" in text  # settings x E x rho x seeds


def test_no_freeze_beats_the_oracle() -> None:
    region = explore(TINY, SEEDS, (0.0, 2.0))
    assert len(region.groups) == 18
    for values in region.signals.values():
        assert values.shape == (18,) and (values >= 1 - 1e-6).all()


def test_the_map_varies_the_base_one_thing_at_a_time() -> None:
    for name, setting in MAP.items():
        changed = {k for k, v in vars(setting).items() if v != getattr(BASE, k)}
        assert bool(changed) == (name != "base")
        assert len(changed - {"lr"}) <= 3


def test_theory_needs_neither_flower_nor_matplotlib_until_it_draws() -> None:
    code = (
        "import sys, fedfrozen_app; assert 'torch' not in sys.modules; "
        "import fedfrozen_app.theory.command; "
        "print(sorted({'flwr', 'ray', 'timm', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_wrong_figure_name_ends_with_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["theory", "figure-5", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "theory knows profile, local-steps, warmup, heterogeneity, all, map" in result.stderr
