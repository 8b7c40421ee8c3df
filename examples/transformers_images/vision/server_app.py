"""The Flower ServerApp: stock FedAvg, frozen after a warm-up."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedfrozen_app.strategies import FedFrozen
from vision.task import initial_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train everything for some rounds, then all but what is frozen."""
    config = context.run_config
    strategy = FedFrozen(
        strategy=FedAvg(),
        warmup_rounds=int(config["warmup-rounds"]),
        frozen=str(config["frozen"]),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(initial_model().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
    )
