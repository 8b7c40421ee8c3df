"""ViT-B/32 at its real size: exact uploads, and memory that fits a laptop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KEYS = ["model=vit-b-32", "weights=none", "public-fraction=0", "num-clients=2", "rounds=2",
        "warmup-rounds=1", "local-steps=1", "batch-size=2", "max-train-examples=20",
        "max-test-examples=10", "partitioner=iid"]  # fmt: skip


@pytest.mark.parametrize(
    ("frozen", "upload"), [("query-key", 293_154_856), ("value-head", 28_379_176)]
)
def test_two_clients_upload_exactly_the_active_entries_in_under_4_gb(
    tmp_path: Path, frozen: str, upload: int
) -> None:
    where = [f"run-dir={tmp_path}", f"cache-dir={tmp_path}/cache", "run-name=run"]
    command = [sys.executable, "-m", "fedfrozen_app.cli", "run", *KEYS, f"frozen={frozen}", *where]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines[1:])
    assert first["bytes_up"] == 2 * 4 * 87_462_922
    assert second["bytes_up"] == 2 * upload
    assert second["clients"] == 2 and second["dropped"] == 0
    assert usage.ru_maxrss * 1024 < 4e9
    print(f"peak memory {usage.ru_maxrss / 1e6:.2f} GB")
