"""What a terminal, or a log, shows of a sweep while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from fedfrozen_app.runs.finished import has_diverged
from fedfrozen_app.runs.summary import quality
from fedfrozen_app.runs.sweep_children import Child, Watch, seconds_left


class Lines(Watch):
    """One line for every run that ends."""

    def __init__(self, console: Console, total: int, done: int, jobs: int) -> None:
        self.console, self.total, self.done, self.jobs = console, total, done, jobs
        self.durations: list[float] = []

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def moved(self, path: Path) -> None:
        """Say where a folder of that name is now."""
        self.say(f"another run was there: moved to {path}")

    def ended(self, child: Child, failure: str | None) -> None:
        """Print what a run came to."""
        self.done += failure is None
        self.durations.append(child.seconds)
        self.say(
            f"[{self.done}/{self.total}] {child.cell.name}  {outcome(child, failure)}  "
            f"{child.seconds:.1f} s"
        )


class Bars(Lines):
    """The same, and below it bars: the whole sweep, and each run that is going on."""

    def __init__(self, progress: Progress, total: int, done: int, jobs: int) -> None:
        super().__init__(progress.console, total, done, jobs)
        self.progress = progress
        self.whole = progress.add_task("sweep", total=total, completed=done, note="")
        self.tasks: dict[str, TaskID] = {}

    def poll(self, children: Sequence[Child], waiting: int) -> None:
        """Move the bars."""
        shares = []
        for child in children:
            name, rounds = child.cell.name, child.cell.config.rounds
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(name, total=rounds, note="")
            self.progress.update(self.tasks[name], completed=child.rounds_done)
            shares.append((child.seconds, child.rounds_done / rounds))
        left = seconds_left(self.durations, shares, waiting, self.jobs)
        note = "" if left is None else f"about {clock(left)} left"
        self.progress.update(self.whole, note=note)

    def ended(self, child: Child, failure: str | None) -> None:
        """Print what a run came to and take its bar away."""
        self.progress.remove_task(self.tasks.pop(child.cell.name))
        super().ended(child, failure)
        self.progress.update(self.whole, completed=self.done)


def outcome(child: Child, failure: str | None) -> str:
    """Return a run's last test, or why there is none."""
    if failure is not None:
        return f"failed: {failure}"
    tested = [line for line in child.folder.metrics() if line.test_accuracy is not None]
    text = quality(tested[-1]) if tested else "not tested"
    return f"{text} (diverged)" if has_diverged(child.folder) else text


def clock(seconds: float) -> str:
    """Return seconds as ``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def shown(console: Console, total: int, done: int, jobs: int) -> Iterator[Watch]:
    """Yield bars on a terminal and lines anywhere else."""
    if not console.is_terminal:
        yield Lines(console, total, done, jobs)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress, total, done, jobs)
