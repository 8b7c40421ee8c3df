"""The benchmark for a GPU runs, small, on the CPU: the same work as the plain loop beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# a folder of modules that must not be there: what needs them fails
MISSING = ("ray", "datasets", "sklearn")


def test_a_dry_run_trains_what_the_plain_loop_trains_without_ray_or_data_sets(
    tmp_path: Path,
) -> None:
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--dry-run", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["moved"] > 1e-3 > 100 * row["difference"]
    # 2 x 2 patches and the class
    assert row["tokens_per_second"] == pytest.approx(5 * row["images_per_second"])
    assert "| vit_tiny_patch16_224 | 2 |" in (tmp_path / "out.md").read_text()
