"""Marks, LaTeX and CSV of settings whose figures are known."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedfrozen_app.report import tables
from fedfrozen_app.report.figures import pareto_front
from fedfrozen_app.report.page import html_table
from fedfrozen_app.report.settings import Setting, compared_label, panels_of
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.runs.sweep_table import Result


def setting(
    accuracies: Sequence[float], diverged: int = 0, is_text: bool = False, **labels: str
) -> Setting:
    made = Setting(tuple(labels.items()), tuple(RunFolder(Path(str(i))) for i in accuracies))
    made.__dict__["results"] = [
        Result(is_text, value, value, 0.5, 1e3, 2e3, 1e6, 2e6, 3.0, index < diverged)
        for index, value in enumerate(accuracies)
    ]
    return made


SETTINGS = [
    setting([0.80, 0.82], method="a", alpha="0.1"),
    setting([0.79, 0.81], method="b", alpha="0.1"),
    setting([0.60, 0.61], method="c_d", alpha="0.1"),
    setting([0.95, 0.10], diverged=1, method="e", alpha="0.1"),
    setting([0.70], method="a", alpha="0.5"),
    setting([0.69], method="b", alpha="0.5"),
    setting([0.1, 0.1], diverged=2, method="e", alpha="0.5"),
]


def test_the_best_and_what_cannot_be_told_from_it_are_marked_panel_by_panel() -> None:
    marks = tables.all_marks(SETTINGS)
    assert [marks.get(one.labels, "") for one in SETTINGS] == [
        tables.BEST, tables.NEAR, "", "", tables.BEST, "", "",
    ]  # fmt: skip
    assert compared_label(SETTINGS) == "method"
    assert list(panels_of(SETTINGS, "method")) == ["alpha=0.1", "alpha=0.5"]


def test_two_standard_errors_of_the_difference_are_noise() -> None:
    # variances .0002 and .0002, two runs each: 2 * sqrt(.0001 + .0001) = .0283
    assert tables.within_noise([0.80, 0.82], [0.772, 0.792])
    assert not tables.within_noise([0.80, 0.82], [0.771, 0.791])
    assert not tables.within_noise([0.80], [0.80])  # of one run no noise is known


def test_less_is_better_of_a_perplexity() -> None:
    text = [setting([90.0], is_text=True, method=m) for m in "x"] + [
        setting([80.0], is_text=True, method="y")
    ]
    assert tables.all_marks(text) == {text[1].labels: tables.BEST}


def test_the_papers_form_has_methods_below_each_other() -> None:
    lines = tables.pivot(SETTINGS, "alpha").splitlines()
    assert lines[0] == "| method | alpha=0.1 | alpha=0.5 |"
    assert lines[2:] == [
        "| a | **0.8100 +- 0.0141** | **0.7000** |",
        "| b | 0.8000 +- 0.0141 * | 0.6900 |",
        "| c_d | 0.6050 +- 0.0071 |  |",
        "| e | 0.5250 +- 0.6010 (1 of 2 diverged) | diverged |",
    ]


def test_latex_is_booktabs_with_its_own_characters_escaped() -> None:
    text = tables.pivot(SETTINGS, "alpha", latex=True)
    assert text.startswith(
        "\\begin{tabular}{lrr}\n\\toprule\nmethod & alpha=0.1 & alpha=0.5 \\\\\n"
    )
    assert "a & \\textbf{0.8100 $\\pm$ 0.0141} & \\textbf{0.7000} \\\\" in text
    assert "c\\_d & 0.6050 $\\pm$ 0.0071 &  \\\\" in text
    assert text.endswith("\\bottomrule\n\\end{tabular}\n")
    assert tables.escape(r"50%_\~^{}#&$") == (
        r"50\%\_\textbackslash{}\textasciitilde{}\textasciicircum{}\{\}\#\&\$"
    )


def test_csv_has_numbers_in_full() -> None:
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated(SETTINGS))))
    assert rows[0]["method"] == "a" and rows[0]["measure"] == "accuracy"
    assert float(rows[0]["quality_mean"]) == pytest.approx(0.81)
    assert float(rows[0]["quality_std"]) == pytest.approx(math.sqrt(0.0002))
    assert (float(rows[0]["up_mean"]), rows[4]["quality_std"]) == (1e6, "")
    assert [row["diverged"] for row in rows] == ["0", "0", "0", "1", "0", "0", "2"]


def test_the_front_is_what_nobody_beats_in_both() -> None:
    points = [(3.0, 0.7), (1.0, 0.5), (2.0, 0.4), (4.0, 0.7), (1.0, 0.3)]
    assert pareto_front(points) == [(1.0, 0.5), (3.0, 0.7)]
    assert pareto_front(points, smaller_is_better=True) == [(1.0, 0.3)]


def test_a_label_may_hold_what_divides_cells() -> None:
    one = tables._row(["a|b", "two\nlines"])
    assert one == r"| a\|b | two lines |"
    assert '<td class="text">a|b</td>' in html_table(f"| x | y |\n| --- | ---: |\n{one}\n")
    assert tables.escape("[0.1]") == "{[}0.1]"  # or \\ would take it for its argument
