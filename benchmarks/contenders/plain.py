"""The yardstick: a loop over clients without any federation.

Per client the global state dict is loaded, the client trains, and its state dict is copied;
per round the copies are averaged by the clients' examples.
"""

import copy
import sys
from pathlib import Path

from torch import nn

from contenders.conductor import Conductor
from contenders.task import State, Task


def one_round(task: Task, model: nn.Module, weights: State, server_round: int) -> State:
    """Return the weighted mean of the clients' models after a round from ``weights``."""
    states: list[State] = []
    for client in range(len(task.clients)):
        model.load_state_dict(weights)
        task.train(model, server_round, client)
        states.append(copy.deepcopy(model.state_dict()))
    shares = [n / sum(task.num_examples) for n in task.num_examples]
    mean = {name: shares[0] * value for name, value in states[0].items()}
    for share, state in zip(shares[1:], states[1:], strict=True):
        for name, value in state.items():
            mean[name] += share * value
    return mean


def main() -> None:
    task = Task(Path(sys.argv[1]))
    model, weights, server_round = task.model(), task.weights, 0
    conductor = Conductor()
    while conductor.next():
        server_round += 1
        weights = one_round(task, model, weights, server_round)
    conductor.save(weights)


if __name__ == "__main__":
    main()
