"""Claims about two hundred rounds: neither the memory nor the files of a run grow with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fedfrozen_app.transport.client_state import LIMIT_BYTES

ROUNDS, CLIENTS, EVERY, STEADY = 200, 200, 10, 50
KEYS = {
    "strategy": "scaffold", "frozen": "value-head", "warmup-rounds": 1, "compression": "topk:0.1",
    "num-clients": CLIENTS, "fraction-train": 0.2, "rounds": ROUNDS, "local-steps": 1,
    "batch-size": 8, "max-test-examples": 50, "eval-every": EVERY, "checkpoint-every": EVERY,
    "weights": "none", "public-fraction": 0.0, "partitioner": "iid", "lr": 0.01, "threads": 1,
    "run-name": "run",
}  # fmt: skip
# By round 50 all clients keep what they will ever keep: they have taken part ten times.
RUN = """
import ctypes, gc, json, sys
from pathlib import Path
from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation
from fedfrozen_app.transport.client_state import ClientState

config = RunConfig.from_mapping(json.loads(sys.argv[1]))
ClientState.__init__.__kwdefaults__["limit_bytes"] = int(sys.argv[2])

def size(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

def sample(line):
    if line.round % EVERY:
        return
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what is free but kept would hide what is not
    status = Path("/proc/self/status").read_text()
    (rss,) = [int(row.split()[1]) for row in status.splitlines() if row.startswith("VmRSS")]
    folder = Path(config.run_dir) / "run"
    lines = (folder / "metrics.jsonl").stat().st_size
    print(json.dumps({"round": line.round, "rss_mb": rss / 1024, "objects": len(gc.get_objects()),
                      "lines": lines, "folder": size(folder) - lines,
                      "cache": size(config.cache_dir)}), flush=True)

with LocalGrid(CLIENT_APP, config.num_clients, config.to_mapping()) as grid:
    run_federation(config, grid, sample)
"""


def samples(root: Path, limit_bytes: int) -> dict[str, npt.NDArray[np.float64]]:
    """Return what a run of its own process uses after every tenth round, from round 50 on."""
    where = {"run-dir": str(root / "runs"), "cache-dir": str(root / "cache")}
    script, config = RUN.replace("EVERY", str(EVERY)), json.dumps({**KEYS, **where})
    done = subprocess.run(
        [sys.executable, "-c", script, config, str(limit_bytes)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print("\n".join(map(str, rows)))
    rows = [row for row in rows if row["round"] >= STEADY]
    assert [row["round"] for row in rows] == list(range(STEADY, ROUNDS + 1, EVERY))
    return {key: np.array([row[key] for row in rows], dtype=float) for key in rows[0]}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("limit_bytes", [LIMIT_BYTES, 0], ids=["in contexts", "in files"])
def test_two_hundred_rounds_take_what_fifty_take(tmp_path: Path, limit_bytes: int) -> None:
    found = samples(tmp_path, limit_bytes)
    # a leak adds in every round; the allocator takes 4 MB more now and then, and is done
    steps = np.diff(found["rss_mb"])
    assert np.median(steps) * len(steps) < 3, found["rss_mb"]  # 20 kB a round, of 40 clients
    assert steps.sum() < 10, found["rss_mb"]
    assert np.ptp(found["objects"]) < 500, found["objects"]  # three a round would be too many
    for kind in ("folder", "cache"):
        before = found[kind][0]  # it may shrink: the first round's states are of whole models
        assert found[kind].max() < 1.01 * before, found[kind]
    assert found["lines"][-1] < 600 * (ROUNDS + 1)  # bytes of a round's line
