"""One HTML file with the tables and pictures of a report, which loads nothing from elsewhere."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedfrozen_app.report.figures import save
from fedfrozen_app.report.settings import Setting
from fedfrozen_app.report.tables import NOTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = re.compile(r"(?<!\\)\|")  # the line between two cells, not one that is part of a text
# the browser itself refuses what is not in the file, and says so in its console
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; --line: #d5d9de; --soft: #f5f7f9; --text: #1c2330; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--text); background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { background: var(--soft); } th.text, td.text { text-align: left; }
tr:last-child td { border-bottom: 0; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
code { overflow-wrap: anywhere; }
figure { margin: 0; } img { width: 100%; height: auto; display: block; }
figcaption, .note { color: #556070; font-size: .875rem; }
"""


@dataclass
class Section:
    """A heading and its pictures: caption and SVG of each."""

    title: str
    pictures: list[tuple[str, bytes]] = field(default_factory=list)

    def add(self, caption: str, figure: "Figure", folder: Path, kind: str, stem: str) -> None:
        """Write a picture to ``folder`` as PNG and SVG and keep the SVG for the page."""
        name = f"{kind}-{stem}" if stem else kind
        paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
        save(figure, paths)
        self.pictures.append((caption, paths[1].read_bytes()))


def write_page(
    path: Path,
    settings: Sequence[Setting],
    tables: Sequence[str],
    said: str,
    made: str,
    sections: Sequence[Section],
) -> Path:
    """Write the page and return its path.

    ``tables`` and the list ``made``, of how runs were made, are Markdown; ``said`` is a line of
    text.
    """
    table, of_clients, everything = tables
    runs = sum(len(setting.runs) for setting in settings)
    parts = [
        f"<p>{runs} runs of {len(settings)} settings.</p>",
        html_table(table),
        f'<p class="note">{html.escape(NOTE)}<br>{html.escape(said)}</p>',
        *map(_section, sections),
        *(["<h2>Clients' own tests</h2>", html_table(of_clients)] if of_clients else []),
        "<h2>Everything measured</h2>",
        html_table(everything),
        '<p class="note">kB: of a client in the last round, MB: of the run; tensor payload.</p>',
        "<h2>How these runs were made</h2>",
        html_list(made),
    ]
    title = "fedfrozen report"
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n" + "\n".join(parts) + "\n"
        "</body></html>\n"
    )
    return path


def _section(section: Section) -> str:
    figures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg).decode()}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        for caption, svg in section.pictures
    )
    return f'<h2>{html.escape(section.title)}</h2><div class="pictures">{figures}</div>'


def html_table(table: str) -> str:
    """Return a Markdown table of this package as HTML."""
    head, align, *body = [
        [cell.strip().replace(r"\|", "|") for cell in COLUMN.split(line.strip())[1:-1]]
        for line in table.strip().splitlines()
    ]
    classes = ["" if each.endswith(":") else ' class="text"' for each in align]
    rows = [_cells("th", head, classes), *(_cells("td", row, classes) for row in body)]
    return (
        '<div class="wide"><table>' + "".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"
    )


def html_list(text: str) -> str:
    """Return a Markdown list of this package as HTML; what is between ticks is code."""
    items = [html.escape(line.removeprefix("- ")) for line in text.strip().splitlines()]
    coded = [re.sub(r"`([^`]*)`", r"<code>\1</code>", item) for item in items]
    return "<ul>" + "".join(f"<li>{item}</li>" for item in coded) + "</ul>"


def _cells(tag: str, texts: Sequence[str], classes: Sequence[str]) -> str:
    return "".join(
        f"<{tag}{each}>{_bold(html.escape(text))}</{tag}>"
        for text, each in zip(texts, classes, strict=True)
    )


def _bold(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return text.replace("+-", "&plusmn;")
