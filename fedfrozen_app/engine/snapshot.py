"""A federation between two rounds, so that it, or several continuations, can go on from there."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedfrozen_app.strategies.fedfrozen import FedFrozen
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_files import run_folder

Plain = dict[str, Any]  # nested containers of tensors, numbers and strings
RECORDS = {"config": ConfigRecord, "metrics": MetricRecord}


@dataclass(frozen=True)
class Snapshot:
    """What crosses rounds: the model, the strategy's state, and what the clients keep.

    Attributes
    ----------
    model : dict of str to Tensor
        All entries.
    strategy : dict
        ``state_dict()`` of the strategy.
    contexts : dict of int to dict
        What clients keep in their contexts, by node and record; empty where another process
        holds them.
    files : Path or None
        A copy of the run's folder of large client states, None where there are none.
    """

    model: dict[str, torch.Tensor]
    strategy: Plain
    contexts: dict[int, Plain]
    files: Path | None

    @classmethod
    def take(
        cls,
        arrays: ArrayRecord,
        strategy: FedFrozen,
        grid: Grid,
        client_states: Path,
        copy_to: Path,
    ) -> Self:
        """Copy a federation's state; files of clients go to the new folder ``copy_to``."""
        state = strategy.state_dict()
        source = run_folder(client_states, _run(state))
        if source.is_dir():
            copy_files(source, copy_to)
        kept = grid.state_dict() if hasattr(grid, "state_dict") else {}
        return cls(
            model={name: tensor.clone() for name, tensor in to_tensors(arrays).items()},
            strategy=_copied(state),
            contexts={node: _to_plain(records) for node, records in kept.items()},
            files=copy_to if source.is_dir() else None,
        )

    def restore(self, strategy: FedFrozen, grid: Grid, client_states: Path) -> ArrayRecord:
        """Let a new strategy and the clients go on from here; return the model."""
        strategy.load_state_dict(_copied(self.strategy))
        if hasattr(grid, "load_state_dict"):
            kept = {node: _to_records(_copied(plain)) for node, plain in self.contexts.items()}
            grid.load_state_dict(kept)
        target = run_folder(client_states, _run(self.strategy))
        shutil.rmtree(target, ignore_errors=True)
        if self.files is not None:
            copy_files(self.files, target)
        return to_record({name: tensor.clone() for name, tensor in self.model.items()})


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder of files that are replaced and never written to: by hard links if it can be."""
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    with contextlib.suppress(OSError):  # another file system, or one without links
        os.link(source, target)
        return
    shutil.copyfile(source, target)


def _run(state: Plain) -> str:
    """Return the token that clients keep their states of a run under."""
    return str(state["inner"]["run"])


def _copied(value: Any) -> Any:
    """Return nested containers of tensors with all tensors copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


# --- records as plain data --------------------------------------------------------------
def _to_plain(records: RecordDict) -> Plain:
    """Return what a context holds: kind and content by name."""
    plain: Plain = {}
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            plain[name] = ["arrays", _copied(to_tensors(record))]
        else:
            (kind,) = [kind for kind, type_ in RECORDS.items() if isinstance(record, type_)]
            plain[name] = [kind, _copied(dict(cast(Plain, record)))]
    return plain


def _to_records(plain: Plain) -> RecordDict:
    """Return the context that :func:`_to_plain` was given."""
    records = RecordDict()
    for name, (kind, content) in plain.items():
        records[name] = to_record(content) if kind == "arrays" else RECORDS[kind](content)
    return records
