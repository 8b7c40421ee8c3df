"""What ``fedfrozen sweep`` does, beside reading its command line."""

from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.measure import Measurement

from fedfrozen_app.config import ConfigError
from fedfrozen_app.models.registry import model_spec
from fedfrozen_app.models.weights import check_weights
from fedfrozen_app.runs.comparison import statement
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.runs.sweep import Cell, Sweep
from fedfrozen_app.runs.sweep_children import run_cells
from fedfrozen_app.runs.sweep_progress import shown
from fedfrozen_app.runs.sweep_table import plan_summary, plan_table, result_table

WIDEST = 1000


def print_plan(sweep: Sweep, console: Console, jobs: int) -> dict[str, str]:
    """Print the runs and what they come to; nothing fails."""
    finished = sweep.finished()
    print_whole(plan_table(sweep, finished), console)
    todo = [cell for cell in sweep.cells if cell.name not in finished]
    print_whole(progress(finished, len(sweep.cells), todo, jobs), console)
    return {}


def run_sweep(sweep: Sweep, console: Console, jobs: int) -> dict[str, str]:
    """Run what is not done, print the results, return why runs failed by their names.

    Raises
    ------
    ConfigError
        Where a model or its weights cannot be, or another sweep is at work in the folder.
    """
    finished = sweep.finished()
    todo = [cell for cell in sweep.cells if cell.name not in finished]
    check_models(todo)
    sweep.write_labels()
    total, done = len(sweep.cells), len(finished)
    print_whole(progress(finished, total, todo, jobs), console)
    with shown(console, total, done, jobs) as watch:
        failures = run_cells(todo, sweep.out, jobs=jobs, watch=watch)
    finished = sweep.finished()
    print_whole(result_table(sweep, finished), console)
    if finished:
        print_whole(statement(list(finished.values())), console)
    print_whole(f"run folders: {sweep.out}", console)
    return failures


def progress(finished: Mapping[str, RunFolder], total: int, todo: Sequence[Cell], jobs: int) -> str:
    """Return how many runs are done and what is left."""
    line = f"{len(finished)} of {total} runs are done"
    return f"{line}, {plan_summary(todo, finished.values(), jobs)}" if todo else line


def check_models(cells: Sequence[Cell]) -> None:
    """Raise ConfigError for models that do not exist and weights that are not there."""
    problems: dict[str, str] = {}
    for cell in cells:
        try:
            model_spec(cell.config)
            check_weights(cell.config)
        except ConfigError as error:
            problems.setdefault(str(error), cell.name)  # the same one is said once
    if problems:
        lines = [f"{name}: {problem}" for problem, name in problems.items()]
        raise ConfigError("\n  ".join(["these runs cannot be:", *lines]))


def print_whole(content: RenderableType, console: Console) -> None:
    """Print without folding or cutting, however narrow the terminal, pipe or log is."""
    needed = Measurement.get(console, console.options.update(width=WIDEST), content).maximum
    whole = Console(file=console.file, width=max(needed, console.width), highlight=False)
    whole.print(content, soft_wrap=isinstance(content, str), markup=False)
