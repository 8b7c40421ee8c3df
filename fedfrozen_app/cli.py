"""The ``fedfrozen`` command."""

import json
import logging
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig
from fedfrozen_app.config_input import parse_overrides, read_experiment
from fedfrozen_app.runs.provenance import remember_command

app = typer.Typer(
    help="Federated fine-tuning of Transformers that sends only what still moves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console()
errors = Console(stderr=True)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[EXPERIMENT.toml] [KEY=VALUE]...", help="experiment file and config"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-c", "--config", metavar="KEY=VALUE", help="override a config key; repeatable"),
]


def fail(message: str, code: int) -> NoReturn:
    """Print an error and end with an exit code."""
    errors.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def load_config(
    words: list[str] | None,
    overrides: list[str] | None,
    build: Callable[..., RunConfig] = RunConfig.from_mapping,
    **options: ConfigValue | None,
) -> RunConfig:
    """Build the config of a command line; later sources win.

    Order: defaults of ``build``, the experiment file, ``key=value`` words, ``-c``, options.
    """
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"one experiment file at most, got {files}")
    pairs = [word for word in words or [] if "=" in word]
    given = {key: value for key, value in options.items() if value is not None}
    config = build(
        read_experiment(Path(files[0])) if files else {},
        parse_overrides([*pairs, *(overrides or [])]),
        given,
    )
    if config.partitioner == "local":
        raise ConfigError(
            "partitioner=local is for nodes with data of their own, and here there are none; "
            "submit the run with `flwr run` (docs/deployment.md)"
        )
    return config.with_absolute_paths()


@app.command()
def run(
    words: Words = None,
    overrides: Overrides = None,
    engine: Annotated[
        str | None, typer.Option(help="local (this process) or flwr (Flower's runtime on Ray)")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="go on after the last checkpoint")
    ] = None,
) -> None:
    """Run a federation; without arguments the bundled digits."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    show_own_log()
    try:
        config = load_config(words, overrides, engine=engine, resume=resume)
    except ConfigError as error:
        fail(str(error), 2)
    try:
        folder = run_flower(config) if config.engine == "flwr" else run_here(config)
    except ConfigError as error:
        fail(str(error), 2)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        fail(f"interrupted; finished rounds, if any, are in {config.run_dir}", 130)
    show_result(folder)


def show_own_log() -> None:
    """Print what this package logs, for example that images are decoded once."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("fedfrozen_app")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def run_here(config: RunConfig) -> Path:
    """Run in this process and return the run folder."""
    from fedfrozen_app.engine.local_grid import LocalGrid
    from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation
    from fedfrozen_app.engine.start import prepare
    from fedfrozen_app.runs.store import RoundMetrics
    from fedfrozen_app.runs.summary import quality

    logging.getLogger("flwr").setLevel(logging.WARNING)  # the progress bar says the rest
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    worker, _ = prepare(config)
    with (
        Progress(*columns, console=console) as progress,
        LocalGrid(CLIENT_APP, worker.num_clients, config.to_mapping(), jobs=config.jobs) as grid,
    ):
        task = progress.add_task("rounds", total=config.rounds, note="loading")

        def on_round(metrics: RoundMetrics) -> None:
            note = f"{metrics.phase}"
            if metrics.test_accuracy is not None:
                note += f"  {quality(metrics)}"
            progress.update(task, completed=metrics.round, note=note)

        return run_federation(config, grid, on_round).path


def run_flower(config: RunConfig) -> Path:
    """Run through Flower's own runtime and return the run folder."""
    from fedfrozen_app.engine.flower import run_with_flower
    from fedfrozen_app.engine.start import prepare
    from fedfrozen_app.runs.store import RunFolder, free_name

    prepare(config)  # what is wrong is said here, not by a process of Flower's runtime
    name = config.resolved_run_name if config.resume else free_name(config)
    config = config.model_copy(update={"run_name": name})
    code = run_with_flower(config, lambda line: console.print(line, markup=False, highlight=False))
    path = Path(config.run_dir) / config.run_name
    if code != 0:
        reason = RunFolder(path).failure() or "the log above says why"
        raise RuntimeError(f"the run did not complete in Flower's runtime: {reason}")
    return path


def show_result(path: Path) -> None:
    """Print the closing table and where the run lies."""
    from fedfrozen_app.runs.store import RunFolder
    from fedfrozen_app.runs.summary import closing_table

    folder = RunFolder(path)
    console.print(closing_table(folder.metrics(), path.name))
    if reason := folder.early_end():
        console.print(f"ended early: {reason}", markup=False, highlight=False)
    console.print(f"run folder: {path}", soft_wrap=True, highlight=False)


@app.command()
def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SWEEP.toml [KEY=VALUE]...",
            help="file with a [sweep] table of lists, and config for every run",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run folders; else runs/<name of the file>")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs at once; they share the cores")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE[,VALUE]", help="part of a swept list; repeatable"),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="print the runs and start none")] = False,
) -> None:
    """Run a grid of runs; those that are done are not run again."""
    from fedfrozen_app.runs.sweep import parse_only, read_sweep
    from fedfrozen_app.runs.sweep_command import print_plan, run_sweep

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        files = [word for word in words if "=" not in word]
        if len(files) != 1:
            raise ConfigError(f"sweep takes one file with a [sweep], got {files or 'none'}")
        pairs = parse_overrides([*(word for word in words if "=" in word), *(overrides or [])])
        grid = read_sweep(Path(files[0]), pairs, only=parse_only(only or []), out=out)
        failures = (print_plan if dry_run else run_sweep)(grid, console, jobs)
    except ConfigError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on with the runs that are not done", 130)
    if failures:
        lines = [f"{name}: {reason}" for name, reason in failures.items()]
        fail(
            "\n  ".join([f"{len(failures)} runs failed; the same command tries again:", *lines]), 1
        )


@app.command("tune-warmup")
def tune(
    words: Words = None,
    overrides: Overrides = None,
    ratios: Annotated[
        str, typer.Option(help="candidates T_warm / T, comma-separated; 1 never freezes")
    ] = "0.2,0.4,0.6,0.8,1.0",
    out: Annotated[Path | None, typer.Option(help="JSON file for the table")] = None,
) -> None:
    """Choose the warm-up's length: several freezes from one shared warm-up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show_own_log()
    try:
        from fedfrozen_app.engine.tune_command import print_tuning, read_ratios

        print_tuning(load_config(words, overrides), read_ratios(ratios), console, out)
    except ConfigError as error:
        fail(str(error), 2)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; nothing was chosen", 130)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="run folders, or folders of a sweep")],
    out: Annotated[Path, typer.Option(help="folder for tables, pictures, page")] = Path("report"),
    panels: Annotated[str, typer.Option(help="label whose values get a picture each")] = "",
) -> None:
    """Write tables and pictures of finished runs, and one page with all of them."""
    from fedfrozen_app.report.write import write_report

    try:
        written = write_report(paths, out, panels)
    except (ConfigError, OSError) as error:
        fail(str(error), 2)
    typer.echo(written[0].read_text(), nl=False)
    typer.echo(", ".join(map(str, written)))


@app.command("pretrain")
def pretrain_base(
    out: Annotated[Path, typer.Option(help="safetensors file to write, for weights=FILE")],
    words: Words = None,
    overrides: Overrides = None,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training data")] = 100,
    warmup_epochs: Annotated[int, typer.Option(min=0, help="epochs until lr is reached")] = 3,
    resume: Annotated[bool, typer.Option(help="go on from the checkpoint beside out")] = False,
) -> None:
    """Train the run's model centrally, by the FLITE paper's recipe, as the base of federations."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show_own_log()
    try:
        from fedfrozen_app.training.central import Epoch, pretrain, pretraining_config

        def on_epoch(line: Epoch) -> None:
            typer.echo(f"epoch {line.epoch}/{epochs}  {line.describe()}")

        config = load_config(words, overrides, pretraining_config)
        pretrain(
            config,
            out.expanduser().absolute(),
            epochs=epochs,
            warmup_epochs=warmup_epochs,
            resume=resume,
            on_start=typer.echo,
            on_epoch=on_epoch,
        )
    except ConfigError as error:
        fail(str(error), 2)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; --resume goes on after the last finished epoch", 130)
    typer.echo(f"weights: {out}")


@app.command("config")
def show_config(words: Words = None, overrides: Overrides = None) -> None:
    """Print every config key with its type, value and meaning."""
    try:
        config = load_config(words, overrides)
    except ConfigError as error:
        fail(str(error), 2)
    values, resolved = config.to_mapping(), config.resolved()
    for key, field in zip(RunConfig.keys(), RunConfig.model_fields.values(), strict=True):
        line = f"{key} = {json.dumps(values[key])}"
        if key in resolved and resolved[key] != values[key]:
            line += f"  (here {json.dumps(resolved[key])})"
        typer.echo(line)
        meaning = f"{type_name(field.annotation)}: {field.description}"
        typer.echo(textwrap.indent(textwrap.fill(meaning, 84), "    "))


def type_name(annotation: object) -> str:
    """Return a short name of a config key's type."""
    choices = getattr(annotation, "__args__", ()) or [annotation]
    names = [getattr(choice, "__name__", str(choice)) for choice in choices]
    return " | ".join(names)


@app.command()
def partition(
    words: Words = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder for partition.json and partition.png")] = Path(
        "partition"
    ),
) -> None:
    """Divide a data set among the clients and draw who holds what."""
    from fedfrozen_app.data.datasets import load_dataset
    from fedfrozen_app.data.partition import draw_partition, make_partition, partition_report

    try:
        config = load_config(words, overrides)
        dataset = load_dataset(config)
        report = partition_report(make_partition(config, dataset), dataset)
        out.mkdir(parents=True, exist_ok=True)
        (out / "partition.json").write_text(json.dumps(report) + "\n")
        draw_partition(report, out / "partition.png")
    except ConfigError as error:
        fail(str(error), 2)
    except (ValueError, OSError) as error:
        fail(str(error), 1)
    sizes = sorted(report["sizes"])
    console.print(
        f"{len(sizes)} clients, {sizes[0]} to {sizes[-1]} examples (median "
        f"{sizes[len(sizes) // 2]}); {out / 'partition.json'}, {out / 'partition.png'}",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def theory(
    name: Annotated[
        str, typer.Argument(help="profile, local-steps, warmup, heterogeneity, all (four) or map")
    ],
    out: Annotated[Path, typer.Option(help="folder for NAME.png and NAME.json")],
    seeds: Annotated[int, typer.Option(min=1, help="seeds 0, 1, ...")] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="processes, of one thread each")] = 1,
) -> None:
    """Repeat the linear-attention simulation of the FedFrozen paper, or map where it holds."""
    from fedfrozen_app.theory.command import run_theory

    try:
        run_theory(name, out, seeds=seeds, jobs=jobs, say=typer.echo)
    except (ValueError, OSError) as error:
        fail(str(error), 2)


@app.command()
def keys(
    out: Annotated[Path, typer.Option(help="folder of the keys; what is there stays")],
    nodes: Annotated[int, typer.Option(help="SuperNodes, numbered from 0")],
    hosts: Annotated[
        str, typer.Option(help="names and addresses by which the SuperLink is reached")
    ] = "superlink,localhost,127.0.0.1",
    days: Annotated[int, typer.Option(help="lifetime of the server's certificate")] = 365,
    ca_days: Annotated[int, typer.Option(help="lifetime of the CA")] = 5 * 365,
) -> None:
    """Make the keys of a deployment: CA, server certificate, a pair for each node."""
    from fedfrozen_app.deploy.keys import KeyRequest, make_keys

    names = [host.strip() for host in hosts.split(",") if host.strip()]
    try:
        made = make_keys(KeyRequest(out, nodes, names, days, ca_days))
    except ConfigError as error:
        fail(str(error), 2)
    for path in made:
        typer.echo(f"made {path}")
    typer.echo("keep ca.key off every host" if made else f"nothing is missing in {out}")


def main() -> None:
    """Entry point of the console script."""
    remember_command(sys.argv[1:])
    app()


if __name__ == "__main__":
    main()
