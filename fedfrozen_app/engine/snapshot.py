"""A federation between two rounds, kept in memory so that several continuations can start there."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from flwr.app import ArrayRecord, RecordDict

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.strategies.fedfrozen import FedFrozen
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_files import run_folder


@dataclass(frozen=True)
class Snapshot:
    """What crosses rounds: the model, the strategy's state, and what the clients keep.

    ``files`` is a copy of the run's folder of large client states, None where there are none.
    """

    model: dict[str, torch.Tensor]
    strategy: dict[str, Any]
    contexts: dict[int, RecordDict]
    files: Path | None

    @classmethod
    def take(
        cls,
        arrays: ArrayRecord,
        strategy: FedFrozen,
        grid: LocalGrid,
        client_states: Path,
        copy_to: Path,
    ) -> Self:
        """Copy a federation's state; files of clients go to the new folder ``copy_to``."""
        state = strategy.state_dict()
        source = run_folder(client_states, _run(state))
        if source.is_dir():
            shutil.copytree(source, copy_to)
        return cls(
            model={name: tensor.clone() for name, tensor in to_tensors(arrays).items()},
            strategy=_copied(state),
            # a client replaces the records of its state, and never writes to one
            contexts={node: RecordDict(dict(kept)) for node, kept in grid.state_dict().items()},
            files=copy_to if source.is_dir() else None,
        )

    def restore(self, strategy: FedFrozen, grid: LocalGrid, client_states: Path) -> ArrayRecord:
        """Let a new strategy and the clients go on from here; return the model."""
        strategy.load_state_dict(_copied(self.strategy))
        grid.load_state_dict({node: RecordDict(dict(kept)) for node, kept in self.contexts.items()})
        target = run_folder(client_states, _run(self.strategy))
        shutil.rmtree(target, ignore_errors=True)
        if self.files is not None:
            shutil.copytree(self.files, target)
        return to_record({name: tensor.clone() for name, tensor in self.model.items()})


def _run(state: dict[str, Any]) -> str:
    """Return the token that clients keep their states of a run under."""
    return str(state["inner"]["run"])


def _copied(value: Any) -> Any:
    """Return nested containers of tensors with all tensors copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
