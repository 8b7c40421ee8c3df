"""Tables of settings: Markdown, LaTeX (booktabs) and CSV.

Among settings that are compared with each other the best mean is marked, and so is what cannot be
told from it: where the means differ by no more than two standard errors of their difference,

    |m_1 - m_2| <= 2 sqrt(s_1^2 / n_1 + s_2^2 / n_2),

which takes two or more seeds of each. A setting with a run that diverged is marked as such and is
never the best.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from fedfrozen_app.report.curves import client_measures
from fedfrozen_app.report.settings import (
    Setting,
    compared_label,
    label_names,
    panels_of,
)
from fedfrozen_app.runs.sweep_table import COLUMNS, result_row, spread

BEST, NEAR = "best", "within noise of the best"
NOTE = (
    "Bold: the best of what is compared; *: within two standard errors of it (two or more seeds)."
)
NUMBERS = ("quality", "best", "loss", "up_each", "down_each", "up", "down", "seconds")
SPECIAL = {
    "[": "{[}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def markdown(settings: Sequence[Setting]) -> str:
    """Return one row for every setting; the columns are those of ``fedfrozen sweep``."""
    names = label_names(settings)
    head = [*(names or ["run"]), *columns_of(settings)]
    body, marks = [], all_marks(settings)
    for setting in settings:
        texts = texts_of(setting, names)
        quality, *rest = result_row(setting.results)
        body.append([*texts, marked(quality, marks.get(setting.labels, "")), *rest])
    return markdown_table(head, body, len(names or ["run"]))


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]], texts: int) -> str:
    """Return a table whose first columns are text and the others numbers."""
    align = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(map(_row, [head, align, *body])) + "\n"


def columns_of(settings: Sequence[Setting]) -> list[str]:
    """Return the heads of the columns of a result row, the first by what was measured."""
    kinds = {setting.is_text for setting in settings}
    quality = "accuracy or perplexity" if len(kinds) > 1 else "perplexity"
    return [quality if True in kinds else COLUMNS[0], *COLUMNS[1:]]


def texts_of(setting: Setting, names: Sequence[str]) -> list[str]:
    """Return a row's first cells: the values of the labels, ``run`` where nothing has any."""
    return [setting.label(name) for name in names] or ["run"]


def pivot(settings: Sequence[Setting], columns: str, *, latex: bool = False) -> str:
    """Return the quality of every setting, one column for each value of the label ``columns``.

    This is the form of the papers' tables: methods below each other, data beside each other.
    """
    names = [name for name in label_names(settings) if name != columns]
    heads = list(dict.fromkeys(setting.label(columns) for setting in settings))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    marks = all_marks(settings)
    for setting in settings:
        key = tuple(setting.label(name) for name in names) or ("run",)
        text = quality_text(setting)
        cell = marked(text, marks.get(setting.labels, ""), latex=latex)
        rows.setdefault(key, {})[setting.label(columns)] = cell
    head = [*(names or ["run"]), *(f"{columns}={value}" for value in heads)]
    body = [[*key, *(cells.get(value, "") for value in heads)] for key, cells in rows.items()]
    if latex:
        escaped = [[escape(text) for text in row[: len(names)]] + row[len(names) :] for row in body]
        return latex_table([escape(text) for text in head], escaped, len(names or ["run"]))
    return markdown_table(head, body, len(names or ["run"]))


def latex(settings: Sequence[Setting]) -> str:
    """Return :func:`markdown` as a LaTeX ``tabular`` for the package booktabs."""
    names = label_names(settings)
    marks = all_marks(settings)
    body = []
    for setting in settings:
        texts = [escape(text) for text in texts_of(setting, names)]
        quality, *rest = result_row(setting.results)
        cells = [marked(quality, marks.get(setting.labels, ""), latex=True), *map(_pm, rest)]
        body.append([*texts, *cells])
    head = [escape(text) for text in [*(names or ["run"]), *columns_of(settings)]]
    return latex_table(head, body, len(names or ["run"]))


def latex_table(head: Sequence[str], body: Iterable[Sequence[str]], texts: int) -> str:
    """Return a ``tabular`` whose first columns are text and the others numbers."""
    lines = [
        r"\begin{tabular}{" + "l" * texts + "r" * (len(head) - texts) + "}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def comma_separated(settings: Sequence[Setting]) -> str:
    """Return numbers for other programs: labels, seeds, mean and deviation of every measure.

    Bytes are bytes and seconds are seconds; ``loss`` is empty where no run's is finite.
    """
    names = label_names(settings)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    measures = [f"{name}_{kind}" for name in NUMBERS for kind in ("mean", "std")]
    writer.writerow([*names, "measure", "runs", "diverged", *measures])
    for setting in settings:
        row: list[object] = [setting.label(name) for name in names]
        row += ["perplexity" if setting.is_text else "accuracy", len(setting.runs)]
        row.append(sum(result.diverged for result in setting.results))
        for name in NUMBERS:
            found = [getattr(result, name) for result in setting.results]
            values = [float(value) for value in found if value is not None]
            row.append(statistics.mean(values) if values else "")
            finite = len(values) > 1 and all(map(math.isfinite, values))
            row.append(statistics.stdev(values) if finite else "")
        writer.writerow(row)
    return out.getvalue()


def clients(settings: Sequence[Setting]) -> str:
    """Return how accuracy is spread over the clients' own tests, "" where there are none.

    Clients count alike. ``worst`` is the worst client's, ``p10`` the tenth percentile, ``std`` the
    deviation over clients: what fairness is about; ``after``: after a round of local training.
    """
    names = label_names(settings)
    columns = ["mean", "worst", "p10", "std", "mean after", "worst after", "tests"]
    heads, body = names or ["run"], []
    for setting in settings:
        if not (found := client_measures(setting, "accuracy")):
            continue
        after = client_measures(setting, "accuracy_after")
        texts = texts_of(setting, names)
        spreads = [np.mean(found), min(found), np.percentile(found, 10), np.std(found)]
        late = [f"{np.mean(after):.4f}", f"{min(after):.4f}"] if after else ["-", "-"]
        body.append([*texts, *(f"{each:.4f}" for each in spreads), *late, str(len(found))])
    return markdown_table([*heads, *columns], body, len(heads)) if body else ""


# --- marks ------------------------------------------------------------------------------
def all_marks(settings: Sequence[Setting]) -> dict[tuple[tuple[str, str], ...], str]:
    """Return ``BEST`` or ``NEAR`` by the labels of the settings that have it."""
    found = {}
    for panel in panels_of(settings, compared_label(settings)).values():
        sound = [one for one in panel if not one.has_diverged]
        sound = [one for one in sound if all(math.isfinite(q) for q in qualities(one))]
        if len(panel) < 2 or not sound or len({one.is_text for one in panel}) > 1:
            continue
        sign = 1 if sound[0].is_text else -1
        best = min(sound, key=lambda one: sign * statistics.mean(qualities(one)))
        top = statistics.mean(qualities(best))
        for one in sound:
            if statistics.mean(qualities(one)) == top:
                found[one.labels] = BEST
            elif within_noise(qualities(one), qualities(best)):
                found[one.labels] = NEAR
    return found


def qualities(setting: Setting) -> list[float]:
    """Return each run's last accuracy, of text its perplexity."""
    return [result.quality for result in setting.results]


def within_noise(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by no more than two standard errors of their difference."""
    if min(len(one), len(other)) < 2:
        return False
    return abs(statistics.mean(one) - statistics.mean(other)) <= noise(one, other)


def noise(one: Sequence[float], other: Sequence[float]) -> float:
    """Return two standard errors of the difference of two means, each over two values or more."""
    return 2 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (one, other)))


def quality_text(setting: Setting) -> str:
    """Return mean +- deviation, or that runs diverged."""
    diverged = sum(result.diverged for result in setting.results)
    if diverged == len(setting.results):
        return "diverged"
    text = spread(qualities(setting), 2 if setting.is_text else 4)
    return f"{text} ({diverged} of {len(setting.results)} diverged)" if diverged else text


def marked(text: str, mark: str, *, latex: bool = False) -> str:
    """Return a figure with its mark."""
    if latex:
        text = _pm(text)
        return rf"\textbf{{{text}}}" if mark == BEST else f"{text}$^*$" if mark == NEAR else text
    return f"**{text}**" if mark == BEST else f"{text} *" if mark == NEAR else text


def _pm(text: str) -> str:
    return text.replace("+-", r"$\pm$")


def escape(text: str) -> str:
    """Return a text as LaTeX prints it."""
    return re.sub(r"[\\~^&%$#_{}[]", lambda found: SPECIAL.get(found[0], "\\" + found[0]), text)


def _row(cells: Iterable[str]) -> str:
    safe = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(safe)} |"
