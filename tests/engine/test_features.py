"""Claims about a run whose backbone does not train: its features are computed once."""

from pathlib import Path

import pytest

from fedfrozen_app.training.features import FeatureExamples
from fedfrozen_app.training.worker import Worker
from tests.engine.run import Run, equal

HEAD = {"strategy": "fedavg", "frozen": "head", "warmup_rounds": 1, "rounds": 3,
        "local_epochs": 1}  # fmt: skip


def run(
    root: Path, cache: str, monkeypatch: pytest.MonkeyPatch, reuse: bool, **keys: object
) -> Run:
    with monkeypatch.context() as patched:
        if not reuse:
            patched.setattr(
                Worker, "_as_features", lambda self, key, make, **_: (make(), self.model)
            )
        return Run(root, cache, **{**HEAD, **keys})


def test_a_run_that_freezes_all_but_the_head_ends_where_it_did_without_features(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = FeatureExamples.__init__

    def counted(self: FeatureExamples, *args: object, **keys: object) -> None:
        make(self, *args, **keys)  # type: ignore[arg-type]
        made.append(len(self))

    monkeypatch.setattr(FeatureExamples, "__init__", counted)
    with_features = run(tmp_path / "with", cache, monkeypatch, True, augment="none")
    assert len(made) == 4 and sum(made) == 251 + 97  # three clients and the test set
    without = run(tmp_path / "without", cache, monkeypatch, False, augment="none")
    assert len(made) == 4
    for one, other in zip(with_features.metrics, without.metrics, strict=True):
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-6)
        assert one.test_accuracy == other.test_accuracy
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
    with_augmentation = run(tmp_path / "crop", cache, monkeypatch, True, augment="crop")
    assert len(made) == 5 and made[-1] == 97  # only the test set is the same in every pass
    plain = run(tmp_path / "plain", cache, monkeypatch, False, augment="crop")
    assert equal(with_augmentation.model, plain.model)
