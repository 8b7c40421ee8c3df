"""What ``fedfrozen theory NAME`` does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fedfrozen_app.theory import figures
from fedfrozen_app.theory.map import make_map
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.settings import (
    BASE,
    COMPARISON,
    LOCAL_STEPS,
    MANY_TOKENS,
    MAP,
    MAP_RHOS,
    RHOS,
    SHARES,
)

Build = Callable[..., figures.Figure]
FIGURES: dict[str, tuple[Build, Setting]] = {
    "profile": (partial(figures.profile, rhos=RHOS), MANY_TOKENS),
    "local-steps": (partial(figures.local_steps, rhos=RHOS[::2], steps=LOCAL_STEPS), BASE),
    "warmup": (partial(figures.warmup, rhos=RHOS, ratios=SHARES), BASE),
    "heterogeneity": (partial(figures.heterogeneity, rhos=RHOS), COMPARISON),
}
NAMES = (*FIGURES, "all", "map")


def run_theory(
    name: str,
    out: Path,
    *,
    seeds: int = 10,
    jobs: int = 1,
    say: Callable[[str], None] = print,
    base: Setting | None = None,
) -> None:
    """Write a figure, all four, or the map, into a folder.

    Parameters
    ----------
    name : str
        One of ``NAMES``.
    out : Path
        The folder.
    seeds, jobs : int
        How many seeds, from 0, and how many processes.
    say : callable
        Is told what was written.
    base : Setting, optional
        Another setting for the figures.

    Raises
    ------
    ValueError
        If there is no figure of that name.
    """
    if name not in NAMES:
        raise ValueError(f"theory knows {', '.join(NAMES)}, got {name!r}; name one of them")
    torch.set_num_threads(1)  # the matrices are small; processes are what helps
    if name == "map":
        say(make_map(MAP, range(seeds), MAP_RHOS, out, jobs=jobs))
        return
    for each in FIGURES if name == "all" else [name]:
        build, setting = FIGURES[each]
        build(base or setting, range(seeds), jobs=jobs).write(out)
        say(f"{out / each}.png, {out / each}.json")
