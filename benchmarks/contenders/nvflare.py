"""NVIDIA FLARE: its PyTorch ``FedAvgRecipe`` in its simulator, a process per client at once.

    python -m contenders.nvflare TASK ROUNDS THREADS

The simulator runs this file again as every client's training script. Prints nothing; writes the
times at which clients began each round beside the task.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from contenders.conductor import peak_mb
from contenders.task import Task

TASK = "FEDERATION_TASK"


class Net(torch.nn.Module):
    """The task's model under FLARE's condition that a class builds it from JSON."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.model = Task(Path(task)).model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.model(x)
        return logits


def client() -> None:
    """Train in every round that the server begins."""
    import nvflare.client as flare

    torch.set_num_threads(1)
    flare.init()
    number = int(flare.get_site_name().rpartition("-")[2]) - 1
    path = os.environ[TASK]
    task, net = Task(Path(path)), Net(path)
    while flare.is_running():
        received = flare.receive()
        began, server_round = time.time(), received.current_round + 1
        net.load_state_dict({k: torch.as_tensor(v) for k, v in received.params.items()})
        net.train()
        task.train(net.model, server_round, number)
        weight = task.num_examples[number]
        flare.send(
            flare.FLModel(
                params={k: v.cpu() for k, v in net.state_dict().items()},
                metrics={"accuracy": 0.0},
                meta={"NUM_STEPS_CURRENT_ROUND": weight},
            )
        )
        with open(f"{path}.nvflare.log", "a") as log:
            log.write(json.dumps([server_round, number, began, peak_mb(os.getpid())]) + "\n")


def main() -> None:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    path, rounds = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    os.environ[TASK] = path
    number = len(Task(Path(path)).clients)
    recipe = FedAvgRecipe(
        name="fedavg",
        model={"class_path": "contenders.nvflare.Net", "args": {"task": path}},
        min_clients=number,
        num_rounds=rounds,
        train_script=os.path.abspath(__file__),
        train_args="client",
    )
    work = str(Path(path).parent / "nvflare")
    recipe.execute(SimEnv(num_clients=number, num_threads=int(sys.argv[3]), workspace_root=work))
    (found,) = Path(work).rglob("FL_global_model.pt")
    made = torch.load(found, weights_only=True)
    weights = {k.removeprefix("model."): torch.as_tensor(v) for k, v in made["model"].items()}
    torch.save(weights, f"{path}.nvflare")


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client()
    else:
        main()
