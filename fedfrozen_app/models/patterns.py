"""The ``frozen`` language: presets and name patterns that say what stops training.

A spec is a list of items, separated by commas or spaces and applied from left to right::

    spec    = item {("," | " ") item}
    item    = preset | ["!"] glob ["[" rows "]"] | "head=" prefix
    preset  = "all" | "query-key" | "value-head" | "head"
    rows    = role {"," role} | [start] ":" [stop]
    role    = "query" | "key" | "value"

- ``all`` freezes nothing and stands alone; ``query-key`` freezes query and key weights, biases
  and norms; ``value-head`` freezes all but value rows and head; ``head`` all but the head.
- A glob is matched against whole state-dict names; ``*`` crosses dots: ``blocks.0.*``.
- ``[key]`` takes only the key rows, ``[a:b]`` the rows a to b - 1 (columns of GPT-2's ``c_attn``).
- ``!`` trains again what an item further left froze: ``blocks.*, !*.norm1.*``.
- ``head=decoder`` names the head's prefix for the presets where its name is not a usual one.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from fedfrozen_app.models.attention import (
    ROLES,
    Attention,
    HasShape,
    Rows,
    find_attention,
    is_like_attention,
)

ALL = "all"
PRESETS = (ALL, "query-key", "value-head", "head")
# First components of the names under which libraries keep the head.
HEADS = (
    "head",
    "heads",
    "head_dist",
    "aux_head",
    "classifier",
    "pre_classifier",
    "fc",
    "lm_head",
    "score",
    "qa_outputs",
    "cls",
)

Ranges = tuple[tuple[int, int], ...]

_ITEM = re.compile(r"(?:[^\s,\[\]]|\[[^\]]*\]?|\])+")
_SUFFIX = re.compile(r"(?P<glob>.+)\[(?P<rows>[^\[\]]*(?::|[a-z]{2})[^\[\]]*)\]$")


class Active(NamedTuple):
    """Which slices of an entry train: sorted, disjoint ranges along ``dim``."""

    dim: int
    ranges: Ranges


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted ranges with neighbours and overlaps joined; empty ones are dropped."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def complement(ranges: Ranges, size: int) -> Ranges:
    """Return the part of ``0:size`` outside sorted, disjoint ``ranges``."""
    edges = [0, *(edge for pair in ranges for edge in pair), size]
    return union(zip(edges[::2], edges[1::2], strict=True))


def compose(*specs: str) -> str:
    """Return the spec that freezes what any of the given ones does, applied in their order.

    ``all`` freezes nothing, so it drops out beside others: ``compose("all", "head.*")`` is
    ``head.*``.
    """
    return ", ".join(spec for spec in specs if spec.strip() != ALL) or ALL


def resolve(spec: str, entries: Mapping[str, HasShape], head: str = "") -> dict[str, Active]:
    """Return what trains under a spec, for every entry in the order given.

    Raises
    ------
    ValueError
        For an item that matches nothing, rows that cannot be told or do not exist, or a
        spec that freezes nothing or everything.
    """
    return _Resolver(spec, entries, head).run()


class _Resolver:
    """One pass over a spec's items; ``frozen`` holds the ranges frozen so far by entry."""

    def __init__(self, spec: str, entries: Mapping[str, HasShape], head: str) -> None:
        self.spec = spec
        self.items = _ITEM.findall(spec)
        self.head = head
        self.entries = entries
        self.attention: Attention = find_attention(entries)
        self.frozen: dict[str, Ranges] = dict.fromkeys(entries, ())

    def dim(self, name: str) -> int:
        """Return the dimension an entry is sliced along: where q, k, v lie, else rows."""
        rows = self.attention.rows.get(name, {})
        return next((r.dim for r in rows.values()), 0)

    def size(self, name: str) -> int:
        shape = self.entries[name].shape
        return int(shape[self.dim(name)]) if shape else 1

    def run(self) -> dict[str, Active]:
        for item in self.items:
            if item.startswith("head="):
                self.head = item.removeprefix("head=")
        items = [item for item in self.items if not item.startswith("head=")]
        if not items or ("all" in items and len(items) > 1):
            raise ValueError(
                f"frozen={self.spec!r} must be one of {', '.join(PRESETS)}, or name patterns "
                "without 'all'; use frozen=all to freeze nothing"
            )
        for item in items:
            self.apply(item)
        return self.result(freezes=items != ["all"])

    def result(self, freezes: bool) -> dict[str, Active]:
        active = {
            name: Active(self.dim(name), complement(ranges, self.size(name)))
            for name, ranges in self.frozen.items()
        }
        if freezes and not any(self.frozen.values()):
            raise ValueError(f"frozen={self.spec!r} freezes nothing; use frozen=all for that")
        if not any(ranges for _, ranges in active.values()):
            raise ValueError(
                f"frozen={self.spec!r} leaves nothing to train; add an item like '!head.*'"
            )
        return active

    def apply(self, item: str) -> None:
        """Freeze, or with ``!`` train again, what one item names."""
        if item in PRESETS:
            for name, ranges in self.preset(item).items():
                self.frozen[name] = union((*self.frozen[name], *ranges))
            return
        for name, ranges in self.pattern(item).items():
            if item.startswith("!"):
                kept = union((*complement(self.frozen[name], self.size(name)), *ranges))
                self.frozen[name] = complement(kept, self.size(name))
            else:
                self.frozen[name] = union((*self.frozen[name], *ranges))

    # --- presets ------------------------------------------------------------------------
    def preset(self, preset: str) -> dict[str, Ranges]:
        """Return the ranges that a preset freezes, by entry."""
        if preset == "all":
            return {}
        if preset == "query-key":
            return self.roles(preset, ("query", "key"))
        trained = dict.fromkeys(self.head_names(preset), True)
        values = self.roles(preset, ("value",)) if preset == "value-head" else {}
        return {
            name: complement(values.get(name, ()), self.size(name))
            for name in self.entries
            if name not in trained
        }

    def roles(self, preset: str, roles: tuple[str, ...]) -> dict[str, Ranges]:
        self.refuse(f"frozen={preset}", self.attention.refused)
        found = {
            name: union((r.start, r.stop) for role, r in rows.items() if role in roles)
            for name, rows in self.attention.rows.items()
        }
        if not any(found.values()):
            like = [name for name in self.entries if is_like_attention(name)]
            shown = f"entries that look like attention are {_one_of_each_kind(like)}"
            first = (like or [*self.entries] or ["blocks.0.weight"])[0]
            raise ValueError(
                f"frozen={preset} found no {' or '.join(roles)} entries, and "
                f"{shown if like else 'no entry looks like attention by its name'}; name what to "
                f"freeze by patterns, for example frozen='{first}' (a model without attention "
                "takes frozen=all)"
            )
        return found

    def head_names(self, preset: str) -> list[str]:
        if self.head:
            prefix = self.head.removesuffix(".")
            names = [n for n in self.entries if n == prefix or n.startswith(f"{prefix}.")]
        else:
            names = [n for n in self.entries if n.split(".")[0] in HEADS]
        if not names:
            rule = f"head={self.head}" if self.head else f"a head ({', '.join(HEADS)})"
            raise ValueError(
                f"frozen={preset} found no entry of {rule}; closest are "
                f"{self.closest(self.head or 'head.weight')}; name the head's prefix, for "
                f"example frozen='{preset} head=decoder'"
            )
        return names

    # --- patterns -----------------------------------------------------------------------
    def pattern(self, item: str) -> dict[str, Ranges]:
        """Return the ranges that a glob with an optional row suffix names, by entry."""
        glob, rows = item.removeprefix("!"), ""
        if match := _SUFFIX.match(glob):
            glob, rows = match["glob"], match["rows"]
        names = [name for name in self.entries if fnmatchcase(name, glob)]
        if not names:
            near = difflib.get_close_matches(item, PRESETS, n=1, cutoff=0.75)
            hint = f"the preset is {near[0]!r}" if near else f"closest are {self.closest(glob)}"
            raise ValueError(
                f"frozen item {item!r} matches no entry; {hint}; use a glob over state-dict names "
                f"or one of {', '.join(PRESETS)}"
            )
        if not rows:
            return {name: ((0, self.size(name)),) for name in names}
        if ":" in rows:
            return {name: self.numbered(item, rows, name) for name in names}
        return self.named(item, rows, names)

    def numbered(self, item: str, rows: str, name: str) -> Ranges:
        size = self.size(name)
        start, _, stop = (part.strip() for part in rows.partition(":"))
        try:
            low, high = int(start or 0), int(stop or size)
        except ValueError:
            raise ValueError(f"frozen item {item!r}: rows are start:stop, got [{rows}]") from None
        if not 0 <= low < high <= size or not self.entries[name].shape:
            raise ValueError(
                f"frozen item {item!r}: rows must satisfy 0 <= start < stop <= {size} of entry "
                f"{name!r} {list(self.entries[name].shape)}, got [{rows}]"
            )
        return ((low, high),)

    def named(self, item: str, rows: str, names: list[str]) -> dict[str, Ranges]:
        roles = [role.strip() for role in rows.split(",")]
        if unknown := [role for role in roles if role not in ROLES]:
            raise ValueError(
                f"frozen item {item!r}: rows must be {', '.join(ROLES)} or start:stop, "
                f"got {unknown[0]!r}"
            )
        self.refuse(
            f"frozen item {item!r}", [name for name in names if name in self.attention.refused]
        )
        found = {
            name: union((r.start, r.stop) for role, r in parts.items() if role in roles)
            for name in names
            if (parts := self._parts(name))
        }
        found = {name: ranges for name, ranges in found.items() if ranges}
        if not found:
            raise ValueError(
                f"frozen item {item!r}: entry {names[0]!r} "
                f"{list(self.entries[names[0]].shape)} holds no {' or '.join(roles)} rows; drop "
                "the suffix to freeze whole entries or give rows as [start:stop]"
            )
        return found

    def _parts(self, name: str) -> dict[str, Rows]:
        return self.attention.rows.get(name, {})

    # --- errors -------------------------------------------------------------------------
    def refuse(self, what: str, names: Iterable[str]) -> None:
        """Raise for the first entry whose query, key and value rows cannot be told apart."""
        for name in names:
            shape = list(self.entries[name].shape)
            raise ValueError(
                f"{what} cannot tell the query, key and value rows of {name!r} {shape} apart: "
                f"{self.attention.refused[name]}; freeze whole entries by patterns, or rows "
                f"that you know as '{name}[0:{shape[0] if shape else 1}]'"
            )

    def closest(self, text: str) -> str:
        """Return the entry names most like a pattern, quoted, one of each kind."""
        near = sorted(self.entries, key=lambda name: likeness(name, text), reverse=True)
        return _one_of_each_kind(near) or "none: there are no entries"


def likeness(name: str, glob: str) -> tuple[bool, int, float, float]:
    """Return how like an entry's name is to a glob: by path first, and by spelling last.

    Parts of attention come first where the glob names one, then what ends in the same modules,
    then what has the most modules in common.
    """
    path, wanted = name.split("."), glob.strip("!.").split(".")
    ends = zip(reversed(path), reversed(wanted), strict=False)
    suffix = len(list(itertools.takewhile(lambda pair: fnmatchcase(*pair), ends)))
    common = difflib.SequenceMatcher(None, path, wanted, autojunk=False).ratio()
    plain = re.sub(r"[*?!\[\]]", "", glob)
    spelling = difflib.SequenceMatcher(None, name, plain, autojunk=False).ratio()
    return is_like_attention(glob) and is_like_attention(name), suffix, common, spelling


def _one_of_each_kind(names: Iterable[str], most: int = 3) -> str:
    """Return the first names that differ in more than the number of their block, quoted."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), name)
    return ", ".join(map(repr, list(kinds.values())[:most]))
