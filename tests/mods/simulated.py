"""A federation in Flower's own simulation runtime; prints what came of it as JSON.

GROUP=strategies|mods|models CACHE=FOLDER python -m tests.mods.simulated
"""

import json
import os
import sys
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    FedAdam,
    FedAvg,
    Strategy,
)
from flwr.simulation import run_simulation

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.mods import active_entries, freeze_, selection_of
from fedfrozen_app.strategies import FedFrozen
from fedfrozen_app.transport.ledger import LedgerGrid
from tests.mods.project import classifier, loss_of
from tests.mods.test_models import hf_bert, seeded, words

GROUP, CACHE = os.environ["GROUP"], os.environ["CACHE"]
build, step = (seeded(hf_bert), words) if GROUP == "models" else (classifier, loss_of)

mods = [active_entries(CACHE), *([fixedclipping_mod] if GROUP == "mods" else [])]
client = ClientApp(mods=mods)


@client.train()
def train(message: Message, context: Context) -> Message:
    model = build()
    given = message.content["arrays"]
    whole = list(given) == list(model.state_dict())
    model.load_state_dict(given.to_torch_state_dict(), strict=True)
    freeze_(model, selection_of(message))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    loss = step(model, generator)
    loss.backward()
    optimizer.step()
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    metrics = {"num-examples": 7, "whole": int(whole), "trained": numbers, "pid": os.getpid()}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    inner: Strategy = FedAvg(fraction_evaluate=0.0)
    if GROUP == "strategies":
        inner = FedAdam(fraction_evaluate=0.0, eta=0.01)
    if GROUP == "mods":
        inner = DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 0.5, 2)
    strategy, ledger = FedFrozen(strategy=inner, warmup_rounds=1), LedgerGrid(grid)
    whole, lines = build().state_dict(), []

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        traffic, report = ledger.take(), strategy.report
        seen = [{k: v for k, v in record.items()} for record in report.metrics]
        model = arrays.copy().to_torch_state_dict()
        same = False
        if (block := strategy.state.block) is not None:
            cast = {name: tensor.to(whole[name].dtype) for name, tensor in model.items()}
            _, frozen = Selection.build("query-key", whole).split(cast)
            same = all(torch.equal(frozen[name], block.tensors[name]) for name in frozen)
        line: dict[str, Any] = {"up": traffic.bytes_up, "down": traffic.bytes_down}
        lines.append({**line, "dropped": report.dropped, "seen": seen, "frozen_same": same})
        return MetricRecord()

    strategy.start(ledger, ArrayRecord(whole), num_rounds=3, evaluate_fn=after_round)
    print("RESULT " + json.dumps(lines), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=2, backend_config=backend)  # type: ignore[arg-type]
    sys.exit(0)
