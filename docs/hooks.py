"""MkDocs hooks: what pages show of the package itself is made at every build.

A page says ``<!-- made: config keys -->`` where that belongs; what nothing makes ends the build.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo
from pygments.formatters import HtmlFormatter
from typer.cli import get_docs_for_click

from fedfrozen_app.cli import app
from fedfrozen_app.config import RunConfig

logger = get_plugin_logger("fedfrozen")
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
MEMBERS = re.compile(r"(?m)^::: (\S+)\n(?:    .*\n)*?    +members: \[([^]]*)\]")
COLUMNS = ("key", "type", "default", "meaning")


def config_keys() -> str:
    """Return a table of keys for every section of ``RunConfig``."""
    lines: list[str] = []
    for section, name in sections():
        field = RunConfig.model_fields[name]
        if section:
            lines += ["", f"## {section.capitalize()}", "", row(COLUMNS), row(["---"] * 4)]
        key = name.replace("_", "-")
        default = f"`{str(field.default).lower() if field.annotation is bool else field.default}`"
        shown = default if field.default != "" else "empty"
        meaning = (field.description or "").replace("|", r"\|").replace("*", r"\*")
        lines.append(row([f'<span id="{key}">`{key}`</span>', kind(field), shown, meaning]))
    return "\n".join(lines)


def sections() -> Iterator[tuple[str, str]]:
    """Yield every field with the heading above it, empty but for the first of a section."""
    heading, left = "", set(RunConfig.model_fields)
    for line in inspect.getsource(RunConfig).splitlines():
        if title := re.match(r"    # --- (.+?) -+$", line):
            heading = title[1]
        elif (field := re.match(r"    (\w+): ", line)) and field[1] in left:
            left.remove(field[1])
            yield heading, field[1]
            heading = ""
    if left:
        raise PluginError(f"the table of config keys lacks {sorted(left)}")


def kind(field: FieldInfo) -> str:
    """Return a field's choices, or its type and range."""
    choices = get_args(field.annotation) or (field.annotation,)
    names = [getattr(choice, "__name__", str(choice)) for choice in choices]
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    ]
    return ", ".join(f"`{name}`" for name in names) + "".join(f", {bound}" for bound in bounds)


def row(cells: Any) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def command_line() -> str:
    """Return typer's help of all commands, below the page's own title."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    text = get_docs_for_click(obj=command, ctx=context, name="fedfrozen")
    return re.sub(r"\A# .*\n", "", text)


MADE: dict[str, Callable[[], str]] = {"config keys": config_keys, "command line": command_line}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is made in its places."""

    def made(marker: re.Match[str]) -> str:
        if marker[1] not in MADE:
            raise PluginError(f"{page.file.src_uri}: nothing makes {marker[1]!r}, only {[*MADE]}")
        return MADE[marker[1]]()

    return re.sub(r"<!-- made: (.+?) -->", made, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Warn of members that a page asks for and does not have, which mkdocstrings passes over."""
    for path, members in MEMBERS.findall(page.markdown or ""):
        for name in re.findall(r"\w+", members):
            if f'id="{path}.{name}"' not in html:
                where = f"{page.file.src_uri}: {path}"
                logger.warning(f"{where} has no member {name!r}, or one without a docstring")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the colours of code."""
    style = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    files.append(File.generated(config, "pygments.css", content=style))
    return files
