"""Claims about reused features: the same training, for the price of the head."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedfrozen_app.models.freeze import freeze_, train_mode_
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.training.features import Backbone, FeatureExamples, FeatureStore
from fedfrozen_app.training.hooks import Hook
from fedfrozen_app.training.local import LocalTraining, evaluate, train
from tests.training.test_local import TensorExamples, images, vit

WHERE = {"seed": 3, "server_round": 5, "partition_id": 7}
SETTINGS = LocalTraining(epochs=1, batch_size=7, lr=0.1, weight_decay=0.01)


def headed(frozen: str = "head", **keys: object) -> VisionTransformer:
    model = vit(**keys)
    freeze_(model, Selection.build(frozen, model.state_dict()))
    train_mode_(model)
    return model


def features_of(model: nn.Module, examples: TensorExamples) -> tuple[Backbone, FeatureExamples]:
    backbone = Backbone.of(model, examples.x[:1])
    assert backbone is not None
    return backbone, FeatureExamples(examples, backbone, bf16=False)


def head_of(model: nn.Module) -> Tensor:
    return torch.cat([model.head.weight.detach().flatten(), model.head.bias.detach()])


def trained(passes: int, *, reuse: bool) -> Tensor:
    model, examples = headed(), images(23)
    forward, shown = None, examples
    if reuse:
        backbone, shown = features_of(model, examples)
        forward = backbone.head
    for _ in range(passes):
        train(model, shown, SETTINGS, forward=forward, **WHERE)
    return head_of(model)


def test_the_first_pass_is_plain_training_bit_for_bit() -> None:
    assert torch.equal(trained(1, reuse=True), trained(1, reuse=False))
    assert not torch.equal(trained(1, reuse=True), head_of(vit()))


def test_later_passes_are_plain_training_to_rounding() -> None:
    reused, plain, start = trained(5, reuse=True), trained(5, reuse=False), head_of(vit())
    assert float((reused - plain).norm()) < 1e-6 * float((plain - start).norm())


def test_every_example_passes_the_backbone_once_and_evaluation_reuses_it() -> None:
    model, examples = headed(), images(23)
    backbone, shown = features_of(model, examples)
    passed: list[int] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: passed.append(len(output)))
    for server_round in (1, 2, 3):
        train(
            model, shown, SETTINGS, forward=backbone.head, **{**WHERE, "server_round": server_round}
        )
    assert sum(passed) == 23
    loss, accuracy = evaluate(backbone.head, shown, batch_size=11)
    assert sum(passed) == 23
    plain_loss, plain_accuracy = evaluate(model, examples, batch_size=11)
    assert accuracy == plain_accuracy
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert shown.nbytes == 23 * 12 * 4


def test_a_pass_over_some_of_the_examples_computes_only_those() -> None:
    model, examples = headed(), images(23)
    backbone, shown = features_of(model, examples)
    train(model, shown, LocalTraining(steps=2, batch_size=5), forward=backbone.head, **WHERE)
    assert sum(map(len, examples.asked)) == 10


def test_hooks_see_the_head_under_its_name_in_the_model() -> None:
    class Names(Hook):
        seen: tuple[str, ...] = ()

        def begin(self, params: dict[str, nn.Parameter]) -> None:
            self.seen = tuple(params)

    model, hook = headed(), Names()
    backbone, shown = features_of(model, images(11))
    train(model, shown, SETTINGS, forward=backbone.head, hooks=[hook], **WHERE)
    assert hook.seen == ("head.weight", "head.bias")


class Scaled(nn.Module):
    """A model that goes on after its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.head(self.body(x))


def test_what_is_not_one_last_module_after_a_constant_backbone_is_left_alone() -> None:
    x = images(2).x
    assert Backbone.of(headed(), x) is not None
    # dropout after the backbone's last entry is before the head; at rate 0 it does nothing
    for rate in ("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        assert Backbone.of(headed(**{rate: 0.1}), x) is None
    assert Backbone.of(headed("value-head"), x) is None
    assert Backbone.of(headed("query-key"), x) is None
    assert Backbone.of(headed("*, !fc_norm.*"), x) is None
    scaled = Scaled()
    freeze_(scaled, Selection.build("head", scaled.state_dict()))
    assert Backbone.of(scaled, torch.zeros(2, 3)) is None


def test_a_batchnorm_counts_as_constant_only_where_its_statistics_are_frozen() -> None:
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(3))
    model.add_module("head", nn.Linear(3, 2))
    freeze_(model, Selection.build("norm.weight, norm.bias", model.state_dict()))
    train_mode_(model)
    assert Backbone.of(model, torch.zeros(2, 3)) is None
    freeze_(model, Selection.build("head", model.state_dict()))
    train_mode_(model)
    assert Backbone.of(model, torch.zeros(2, 3)) is not None


def test_the_store_forgets_the_least_recently_used_beyond_its_bytes() -> None:
    model, examples = headed(), images(5)
    store = FeatureStore(limit_bytes=5 * 12 * 4)
    made: list[str] = []

    def get(key: str) -> FeatureExamples:
        def make() -> FeatureExamples:
            made.append(key)
            return features_of(model, examples)[1]

        found = store.get(key, make)
        found.batch(torch.arange(5), None)
        return found

    first = get("a")
    get("b")
    assert get("a") is first and made == ["a", "b"]
    get("c")  # a and b are more than the limit; b was used before a
    assert get("a") is first and made == ["a", "b", "c"]
    get("b")
    assert made == ["a", "b", "c", "b"]
    store.clear()
    get("a")
    assert made[-1] == "a"
