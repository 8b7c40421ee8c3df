"""``fedfrozen report``: all tables and pictures of some runs, and one page that holds them."""

import json
from collections.abc import Sequence
from pathlib import Path

from fedfrozen_app.config import ConfigError
from fedfrozen_app.report import figures, tables
from fedfrozen_app.report.page import Section, write_page
from fedfrozen_app.report.provenance import provenance
from fedfrozen_app.report.settings import (
    Setting,
    compared_label,
    label_names,
    left_out,
    panels_of,
    read_settings,
)
from fedfrozen_app.runs.comparison import statement
from fedfrozen_app.runs.sweep import safe_name

PICTURES = "pictures"
KINDS = ("quality-by-", "loss-by-", "pareto", "clients", "partition", "timing")  # of pictures
MOST_PANELS = 12  # on the page; beyond, only what all settings share is drawn


def write_report(paths: Sequence[Path], out: Path, panels: str = "") -> list[Path]:
    """Write the report of run or sweep folders to a folder.

    ``table.md``, ``.tex`` and ``.csv``; with two or more labels ``pivot.md`` and ``.tex``, whose
    columns are the values of ``panels`` (else of the last label that is not compared);
    ``clients.md`` where clients tested on their own examples; ``provenance.md``, how the runs were
    made;
    ``bandwidth.png``, ``.svg`` and ``.json``; ``pictures/``; ``report.html``, which needs nothing
    beside itself.

    Raises
    ------
    ConfigError
        If there is no finished run, or no setting has the label ``panels``.
    """
    settings = read_settings(paths)
    names = label_names(settings)
    if panels and panels not in names:
        raise ConfigError(
            f"panels must be a label of the runs, got {panels!r}; they have {sorted(names)}"
        )
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    remove_earlier(out)
    said = statement([run for setting in settings for run in setting.runs])
    if missing := left_out(paths):
        said += f" Left out: {', '.join(missing)}."
    everything = table = tables.markdown(settings)
    written = [_text(out / "table.md", f"{everything}\n{tables.NOTE}\n\n{said}\n")]
    written += [
        _text(out / "table.tex", tables.latex(settings)),
        _text(out / "table.csv", tables.comma_separated(settings)),
    ]
    if (columns := panels or _columns(settings)) in names and len(names) > 1:
        table = tables.pivot(settings, columns)
        written.append(_text(out / "pivot.md", f"{table}\n{tables.NOTE}\n"))
        written.append(_text(out / "pivot.tex", tables.pivot(settings, columns, latex=True)))
    if of_clients := tables.clients(settings):
        written.append(_text(out / "clients.md", of_clients))
    made = provenance(settings)
    written.append(_text(out / "provenance.md", made))
    pictures = [out / f"bandwidth.{ending}" for ending in ("png", "svg")]
    drawn = figures.draw_bandwidth(settings, pictures, panels)
    written += pictures
    written.append(_text(out / "bandwidth.json", json.dumps(drawn, indent=1) + "\n"))
    sections = draw_all(settings, out / PICTURES)
    shown = [table, of_clients, everything]
    written.append(write_page(out / "report.html", settings, shown, said, made, sections))
    return written


def remove_earlier(out: Path) -> None:
    """Remove what an earlier report wrote there and this one may not write again."""
    for pattern in ("pivot.*", "clients.md", *(f"{PICTURES}/{kind}*.*" for kind in KINDS)):
        for path in out.glob(pattern):
            path.unlink()


def _columns(settings: Sequence[Setting]) -> str:
    others = [name for name in label_names(settings) if name != compared_label(settings)]
    return others[-1] if others else ""


def draw_all(settings: Sequence[Setting], folder: Path) -> list[Section]:
    """Draw what belongs together, panel by panel, as PNG and SVG; return it for the page."""
    compared = compared_label(settings)
    groups = panels_of(settings, compared)
    if len(groups) > MOST_PANELS:
        groups = {"": list(settings)}
    sections: list[Section] = []
    stems: set[str] = set()
    for title, members in groups.items():
        alone = len(groups) > 1 or len(label_names(settings)) == 1

        def name(setting: Setting, alone: bool = alone) -> str:
            return setting.label(compared) if alone and compared else setting.name()

        stem = safe_name(title)
        if len(groups) > 1 and (stem in stems or not stem):  # letters that no file name has
            stem = f"{stem}-{len(sections) + 1}".strip("-")
        stems.add(stem)
        section = Section(title or "All runs")
        for measure in ("quality", "loss"):
            for by in ("round", "bytes"):
                what = figures.quality_name(members) if measure == "quality" else "test loss"
                figure = figures.draw_curves(members, name, measure, by)
                section.add(f"{what} by {by}", figure, folder, f"{measure}-by-{by}", stem)
        pareto = figures.draw_pareto(members, name)
        section.add("quality for bytes; the line: nobody is better in both", pareto, folder,
                    "pareto", stem)  # fmt: skip
        if (spread := figures.draw_clients(members, name)) is not None:
            section.add("clients' own tests", spread, folder, "clients", stem)
        if (partition := figures.draw_partition(members[0].runs[0])) is not None:
            held = f"who holds what in {members[0].runs[0].path.name}"
            section.add(held, partition, folder, "partition", stem)
        sections.append(section)
    times = Section("Time")
    times.add("seconds by phase", figures.draw_timing(settings), folder, "timing", "")
    return [*sections, times]


def _text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path
