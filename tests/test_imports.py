"""What a Flower project that plugs the package in has to wait for, and what it must not."""

import importlib.util
import subprocess
import sys

HEAVY = (
    *("timm", "datasets", "flwr_datasets", "matplotlib", "ray", "torchvision", "pydantic"),
    *("sklearn", "scipy", "pandas", "pyarrow", "PIL", "tokenizers", "transformers"),
    *("huggingface_hub", "tomli_w"),
)
ROOMS = ("fedfrozen_app.strategies", "fedfrozen_app.mods", "fedfrozen_app.engine.local_grid")


def test_the_parts_that_plug_in_load_nothing_heavy() -> None:
    code = f"import {', '.join(ROOMS)}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert loaded.issuperset({*ROOMS, "torch", "flwr.serverapp.strategy"})
    assert sorted(loaded.intersection(HEAVY)) == []
    assert "fedfrozen_app.config" not in loaded
    rooms = {name.split(".")[1] for name in loaded if name.startswith("fedfrozen_app.")}
    assert rooms.isdisjoint({"data", "runs", "theory", "cli"})


def test_the_heavy_ones_are_installed_so_that_the_test_could_see_them() -> None:
    found = [name for name in HEAVY if importlib.util.find_spec(name)]
    assert len(found) >= len(HEAVY) - 1  # flwr_datasets is a dev dependency
