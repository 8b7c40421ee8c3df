"""The Flower ServerApp."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import Net
from fedfrozen_app.strategies import FedFrozen

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Average the clients' models for some rounds."""
    torch.manual_seed(1)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    strategy = FedFrozen(strategy=strategy, warmup_rounds=2, frozen="query-key")
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(context.run_config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(context.run_config["lr"])}),
    )
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    print("accuracy by round:", result.evaluate_metrics_clientapp)
