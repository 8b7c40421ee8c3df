"""One of each group of the table through Flower's own simulation runtime, on Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfrozen_app.models.selection import Selection
from tests.mods.project import classifier, len_of
from tests.mods.test_models import hf_bert, seeded

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("group", ["strategies", "mods", "models"])
def test_three_rounds_in_flowers_simulation(group: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    environment = {
        **os.environ,
        "GROUP": group,
        "CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.mods.simulated"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert result, done.stderr[-3000:]
    _, *rounds = json.loads(result[0].removeprefix("RESULT "))
    whole = (seeded(hf_bert) if group == "models" else classifier)().state_dict()
    active, frozen = Selection.build("query-key", whole).split(whole)
    sizes = [8 * len_of(whole), 8 * len_of(active), 8 * len_of(active)]  # of two clients
    assert [r["dropped"] for r in rounds] == [0, 0, 0]
    assert [r["up"] for r in rounds] == sizes
    assert [r["down"] for r in rounds] == [sizes[0], *sizes[:2]]
    assert [r["frozen_same"] for r in rounds] == [False, True, True]
    assert all(seen["whole"] == 1 for r in rounds for seen in r["seen"])
    trained = [{seen["trained"] for seen in r["seen"]} for r in rounds]
    assert trained == [{len_of(whole)}] + [{len_of(whole) - len_of(frozen)}] * 2
