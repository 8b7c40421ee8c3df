"""Claims about FedFrozen's penalty on the value rows."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedfrozen_app.models.freeze import freeze_, trainable_parameters
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.training.hooks import ValueL2
from fedfrozen_app.training.local import LocalTraining, train

WIDTH = 15  # of the qkv weight [3 * 15, 15]: rows 30:45 are W_V
WHERE = {"seed": 3, "server_round": 5, "partition_id": 7}


class Images:
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(11, 3, 8, 8, generator=generator)
        self.y = torch.randint(5, (11,), generator=generator)

    def __len__(self):
        return 11

    def batch(self, positions, generator):
        return self.x[positions], self.y[positions]


def vit():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        shape = {"img_size": 8, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 3}
        return VisionTransformer(**shape, num_classes=5, class_token=False, global_pool="avg")


def frozen_vit(frozen):
    model = vit()
    selection = Selection.build(frozen, model.state_dict())
    freeze_(model, selection)
    return model, selection


def with_gradients(model):
    params = trainable_parameters(model)
    for parameter in params.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    return params


def test_the_gradient_is_lambda_times_the_value_rows_and_nothing_else():
    model = vit()
    params = with_gradients(model)
    hook = ValueL2(0.5, model.state_dict())
    hook.begin(params)
    hook.correct(params)
    for name, parameter in params.items():
        expected = torch.full_like(parameter, 2.0)
        if name in ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"):
            expected[30:45] += 0.5 * parameter.detach()[30:45]
            assert not torch.equal(expected, torch.full_like(parameter, 2.0))
        assert torch.equal(parameter.grad, expected), name


def test_under_a_frozen_kernel_the_active_rows_are_all_value_rows():
    model, selection = frozen_vit("query-key")
    params = with_gradients(model)
    hook = ValueL2(0.5, model.state_dict(), selection)
    hook.begin(params)
    hook.correct(params)
    weight = params["blocks.1.attn.qkv.weight"]
    assert weight.shape == (15, WIDTH)
    assert torch.equal(weight, vit().blocks[1].attn.qkv.weight[30:45])
    assert torch.equal(weight.grad, 2.0 + 0.5 * weight.detach())
    assert torch.equal(params["blocks.1.attn.qkv.bias"].grad, torch.full((15,), 2.0))


def test_the_rows_follow_a_selection_that_keeps_keys_and_values():
    model = vit()
    entries = model.state_dict()
    whole = Selection.build("all", entries)
    # Freeze the query rows 0:15 alone: the parameter is [k; v], values are its rows 15:30.
    selection = Selection(
        tuple(
            type(e)(e.name, e.shape, 0, ((15, 45),)) if e.name.endswith("qkv.weight") else e
            for e in whole.entries
        ),
        "queries",
    )
    freeze_(model, selection)
    params = with_gradients(model)
    hook = ValueL2(0.5, entries, selection)
    hook.begin(params)
    hook.correct(params)
    weight = params["blocks.0.attn.qkv.weight"]
    assert weight.shape == (30, WIDTH)
    assert torch.equal(weight.grad[:15], torch.full((15, WIDTH), 2.0))
    assert torch.equal(weight.grad[15:], 2.0 + 0.5 * weight.detach()[15:])


def test_training_with_the_penalty_equals_training_with_its_term_in_the_loss():
    class Term(ValueL2):
        def extra_loss(self, params):
            squares = [params[n].narrow(*r[:2], r[2] - r[1]).square().sum() for n, r in rows()]
            return self.value_l2 / 2 * sum(squares)

        def correct(self, params):
            pass

    model, selection = frozen_vit("query-key")
    term_model, _ = frozen_vit("query-key")
    term = Term(3.0, model.state_dict(), selection)
    rows = term.rows.items
    settings = LocalTraining(epochs=2, batch_size=7, lr=0.05)
    train(model, Images(), settings, hooks=[ValueL2(3.0, model.state_dict(), selection)], **WHERE)
    train(term_model, Images(), settings, hooks=[term], **WHERE)
    plain, _ = frozen_vit("query-key")
    train(plain, Images(), settings, **WHERE)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, term_model.state_dict()[key], rtol=1e-5, atol=1e-7)
    weight = "blocks.0.attn.qkv.weight"
    shrunk, free = model.state_dict()[weight], plain.state_dict()[weight]
    assert shrunk[30:].norm() < 0.7 * free[30:].norm()
    assert torch.equal(shrunk[:30], vit().blocks[0].attn.qkv.weight[:30])


def test_a_missing_selection_is_noticed_before_training():
    model, _ = frozen_vit("query-key")
    hook = ValueL2(0.5, model.state_dict())
    with pytest.raises(ValueError, match="has 15 trainable rows, but its value rows end at 45"):
        hook.begin(trainable_parameters(model))


def test_a_penalty_on_frozen_values_is_refused():
    model, selection = frozen_vit("head")
    with pytest.raises(ValueError, match=r"value-l2=0\.5 has no effect: all value rows are froz"):
        ValueL2(0.5, model.state_dict(), selection)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no value weights"):
        ValueL2(0.5, nn.Linear(3, 5).state_dict())
