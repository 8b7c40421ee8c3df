"""Claims about heads that never train: how they are drawn, and which one a run keeps."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.head import METADATA_KEY, central_selection, never_trained
from fedfrozen_app.models.patterns import compose
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.models.weights import load_weights
from fedfrozen_app.tensor_file import read_metadata, write_tensors

KINDS = ("frozen-kaiming", "frozen-orthogonal")


def config(head: str = "frozen-orthogonal", **keys: Any) -> RunConfig:
    return RunConfig.from_mapping(
        {"head": head, **{k.replace("_", "-"): v for k, v in keys.items()}}
    )


def head_of(one: RunConfig, num_classes: int = 7, source: str = "none") -> torch.Tensor:
    model = create_model(one, num_classes)
    load_weights(model, source, one)
    return model.state_dict()["head.weight"].clone()


def test_an_orthogonal_head_has_orthonormal_rows_and_no_bias() -> None:
    model = create_model(config(), 7)
    weight = model.head.weight.detach().double()
    assert weight.shape == (7, 64)
    assert (weight @ weight.T - torch.eye(7)).abs().max() < 1e-6
    assert model.head.bias.count_nonzero() == 0


def test_with_more_classes_than_features_the_columns_are_orthonormal() -> None:
    weight = head_of(config(), 131).double()
    assert weight.shape == (131, 64)
    assert (weight.T @ weight - torch.eye(64)).abs().max() < 1e-6


def test_a_kaiming_head_is_drawn_as_a_linear_layer_starts() -> None:
    weight = head_of(config("frozen-kaiming"), 131)
    bound = 64**-0.5
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.02)


@pytest.mark.parametrize("head", KINDS)
def test_a_head_depends_on_the_seed_alone(head: str) -> None:
    torch.manual_seed(11)
    first = head_of(config(head))
    torch.manual_seed(13)
    assert torch.equal(head_of(config(head, batch_size=5)), first)
    assert not torch.equal(head_of(config(head, seed=2)), first)
    assert not torch.equal(head_of(config(KINDS[head == KINDS[0]])), first)


def test_a_frozen_head_changes_no_other_initial_value() -> None:
    trainable = create_model(config("trainable"), 7).state_dict()
    frozen = create_model(config(), 7).state_dict()
    differing = [name for name in frozen if not torch.equal(frozen[name], trainable[name])]
    assert differing == ["head.weight"]


def test_every_head_of_a_model_with_two_is_drawn_by_itself() -> None:
    one = config(model="deit_tiny_distilled_patch16_224", image_size=32)
    state = create_model(one, 7).state_dict()
    assert never_trained("frozen-orthogonal", state) == "head.*, head_dist.*"
    for name in ("head.weight", "head_dist.weight"):
        assert (state[name] @ state[name].T - torch.eye(7)).abs().max() < 1e-5
    assert not torch.equal(state["head.weight"], state["head_dist.weight"])


def write_base(path: Path, head: str | None, seed: int = 5, num_classes: int = 7) -> str:
    state = create_model(config("trainable" if head is None else head, seed=seed), num_classes)
    write_tensors(path, state.state_dict(), {METADATA_KEY: head} if head else None)
    return str(path)


@pytest.mark.parametrize("head", KINDS)
def test_a_file_trained_with_the_same_kind_keeps_its_head(tmp_path: Path, head: str) -> None:
    source = write_base(tmp_path / "base.safetensors", head)
    kept = head_of(config(head, seed=3), source=source)
    assert torch.equal(kept, head_of(config(head, seed=5)))
    assert not torch.equal(kept, head_of(config(head, seed=3)))


@pytest.mark.parametrize("made", [None, "trainable", "frozen-kaiming"])
def test_a_file_trained_with_another_head_gets_the_runs_own(
    tmp_path: Path, made: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_base(tmp_path / "base.safetensors", made)
    with caplog.at_level(logging.WARNING):
        drawn = head_of(config(seed=3), source=source)
    assert torch.equal(drawn, head_of(config(seed=3)))
    assert f"head={made or 'trainable'}" in caplog.text and "drawn anew" in caplog.text


def test_a_file_for_other_classes_gets_the_runs_own(tmp_path: Path) -> None:
    source = write_base(tmp_path / "base.safetensors", "frozen-orthogonal", num_classes=11)
    assert torch.equal(head_of(config(seed=3), source=source), head_of(config(seed=3)))


def test_a_trainable_head_takes_over_a_frozen_one(tmp_path: Path) -> None:
    source = write_base(tmp_path / "base.safetensors", "frozen-orthogonal")
    taken = head_of(config("trainable", seed=3), source=source)
    assert torch.equal(taken, head_of(config(seed=5)))


def test_a_torch_checkpoint_has_no_word_on_its_head(tmp_path: Path) -> None:
    path = tmp_path / "base.pth"
    torch.save(create_model(config("trainable"), 7).state_dict(), path)
    assert read_metadata(path) == {}
    assert torch.equal(head_of(config(seed=3), source=str(path)), head_of(config(seed=3)))


def test_specs_compose_to_the_union_of_what_they_freeze() -> None:
    model = create_model(config(), 7)
    state = model.state_dict()
    assert compose("all", "head.*") == "head.*"
    assert compose("query-key", "all") == "query-key"
    assert compose("all", "all") == "all"
    both = Selection.build(compose("query-key", "head.*"), state)
    kernel = Selection.build("query-key", state)
    assert both.num_frozen == kernel.num_frozen + 7 * 64 + 7
    # the head comes last: no pattern of the user's can train it again
    again = Selection.build(compose("head.*, !head.bias, query-key", "head.*"), state)
    assert again == both
    assert central_selection(config("trainable"), model).is_all
    assert central_selection(config(), model).num_frozen == 7 * 64 + 7


def test_what_would_leave_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="frozen=head trains only the head and head=frozen-kai"):
        config("frozen-kaiming", frozen="head")
    with pytest.raises(ValueError, match="head=frozen-kaiming found no entry of a head"):
        never_trained("frozen-kaiming", {"body.weight": torch.zeros(3)})
