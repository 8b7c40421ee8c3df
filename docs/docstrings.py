"""Griffe extension: the cross references and examples of our docstrings as Markdown.

A role such as ``:class:`ServerRule``` becomes a link where a page documents its target, else
code; one that names nothing in the package is a warning, which fails a strict build.
"""

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from griffe import Alias, Class, Extension, Module, NameResolutionError, Object
from mkdocstrings import get_logger

ROLE = re.compile(r":(?:class|data|func|meth|mod):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n(?:>>> |\.\.\. ).*)*")
LITERAL_BLOCK = re.compile(r"(?m)::$")
CHOICES = re.compile(r"(?m)^(\w+ : )\{(.+?)\}(?=$|, optional$)")  # numpydoc's set of values

logger = get_logger("fedfrozen")


def documented(parent: Module | Class) -> Iterator[Object]:
    """Yield an object and all that is defined in it."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, Module | Class):
            yield from documented(member)
        elif not isinstance(member, Alias):
            yield member


def absolute(obj: Object, target: str) -> str:
    """Return the full path of what a role in the docstring of ``obj`` names."""
    name = target.lstrip(".")
    if dots := len(target) - len(name):  # .x is beside the module, ..x one package up
        parts = obj.module.path.split(".")
        return ".".join([*parts[: len(parts) - dots], name])
    first, _, rest = name.partition(".")
    if first == obj.package.path:
        return name
    return ".".join(filter(None, [obj.resolve(first), rest]))


class Docstrings(Extension):
    """Turns every docstring of the package to Markdown before it is parsed."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a package that has been loaded whole."""
        for obj in documented(pkg):
            if obj.docstring is not None:
                text = ROLE.sub(lambda role, obj=obj: link(obj, role), obj.docstring.value)
                text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
                text = CHOICES.sub(r"\1typing.Literal[\2]", text)
                obj.docstring.value = LITERAL_BLOCK.sub(":", text)


def link(obj: Object, role: re.Match[str]) -> str:
    """Return the link of one role; warn of a target that does not exist."""
    shortened, target = role.groups()
    shown = target.rpartition(".")[2] if shortened else target.lstrip(".")
    try:
        path = absolute(obj, target)
        obj.modules_collection[path]
    except (KeyError, NameResolutionError):
        logger.warning(f"{obj.path}: {role[0]} names nothing in {obj.package.path}")
        return f"`{shown}`"
    return f'<autoref identifier="{escape(path)}" optional><code>{escape(shown)}</code></autoref>'
