"""A stand-in for ``fedfrozen run``: leaves a run folder in no time; the seed says how it ends."""

import json
import signal
import sys
import time
from pathlib import Path

from fedfrozen_app.config_input import parse_overrides

FAILS_BEFORE, DIVERGES, FAILS_LATER, HANGS = 13, 17, 19, 23
LINE = {
    "round": 0, "phase": "start", "strategy": "fedavg", "train_loss": None, "test_loss": 2.5,
    "test_accuracy": 0.5, "clients": 2, "num_examples": 3, "bytes_up": 4, "bytes_down": 5,
    "wire_bytes_up": 6, "wire_bytes_down": 7, "seconds_train": 0.1, "seconds_total": 0.5,
    "dropped": 0,
}  # fmt: skip


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = parse_overrides(sys.argv[1:])
    out, seed = Path(str(config["run-dir"])), config["seed"] if "seed" in config else 1
    with (out / "started.txt").open("a") as file:
        file.write(f"{config['run-name']} threads={config.get('threads', 0)}\n")
    if seed == FAILS_BEFORE:
        print("loading\nerror: no such data", file=sys.stderr)
        return 2
    folder = out / str(config["run-name"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": config}))
    rounds = [0] if seed in (DIVERGES, FAILS_LATER, HANGS) else [0, config["rounds"]]
    with (folder / "metrics.jsonl").open("a") as file:
        for number in rounds:
            file.write(json.dumps({**LINE, "round": number}) + "\n")
    try:
        while seed == HANGS:
            time.sleep(0.05)
    except KeyboardInterrupt:
        (folder / "failure.txt").write_text("KeyboardInterrupt: \n")
    if seed == DIVERGES:
        (folder / "failure.txt").write_text("DivergedError: round 1\n")
    if seed == FAILS_LATER:
        (folder / "failure.txt").write_text("RuntimeError: no\npower\n")
    (folder / "model.safetensors").touch()
    return len(rounds) % 2


if __name__ == "__main__":
    sys.exit(main())
