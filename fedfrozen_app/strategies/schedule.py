"""When which entries are frozen."""

from dataclasses import dataclass
from typing import Self

from fedfrozen_app.models.patterns import ALL, compose

# presets that are named by what trains under them, or by the word for all
FROZEN = {
    ALL: "nothing",
    "value-head": "all but value rows and head",
    "head": "all but the head",
}


def in_words(spec: str) -> str:
    """Return what a selection freezes, for the log."""
    return FROZEN.get(spec.strip(), spec)


@dataclass(frozen=True)
class FreezeSchedule:
    """Maps a server round to what is frozen in it, in any number of stages.

    Parameters
    ----------
    stages : tuple of (int, str)
        First round of each stage and its selection (a preset or name patterns), rounds
        rising, the first stage from round 1: ``((1, "all"), (11, "query-key"))``.
    always : str
        What never trains, in any stage, for example a frozen head: ``head.*``.
    """

    stages: tuple[tuple[int, str], ...]
    always: str = ALL

    def __post_init__(self) -> None:
        rounds = [first for first, _ in self.stages]
        if not rounds or rounds[0] != 1 or sorted(set(rounds)) != rounds:
            raise ValueError(
                f"the rounds of a freeze schedule must rise from 1, got {rounds}; for example "
                '((1, "all"), (11, "query-key"))'
            )

    @classmethod
    def warmup(cls, rounds: int, frozen: str, *, always: str = ALL) -> Self:
        """Train all but ``always`` for ``rounds`` rounds, then freeze (arXiv:2605.06446)."""
        if rounds < 0:
            raise ValueError(f"warmup_rounds must be >= 0, got {rounds}; 0 freezes from round 1")
        return cls(((1, ALL), (rounds + 1, frozen)) if rounds else ((1, frozen),), always)

    def spec(self, server_round: int) -> str:
        """Return the selection in force in a round (1, 2, ...)."""
        stage = [spec for first, spec in self.stages if first <= max(server_round, 1)][-1]
        return compose(stage, self.always)

    def specs(self) -> list[str]:
        """Return the selection of every stage."""
        return [compose(spec, self.always) for _, spec in self.stages]

    def describe(self) -> str:
        """Return what is frozen when, for the log: ``nothing; from round 11: query-key``."""
        kept = "" if self.always == ALL else in_words(self.always)
        stages = []
        for first, spec in self.stages:
            parts = [kept] if spec == ALL and kept else [in_words(spec), kept]
            what = ", ".join(filter(None, parts))
            stages.append(what if first == 1 else f"from round {first}: {what}")
        return "; ".join(stages)
