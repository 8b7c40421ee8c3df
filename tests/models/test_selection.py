"""A selection says exactly which rows train, and its two halves are the whole."""

import pickle
import re

import numpy as np
import pytest
import torch

from fedfrozen_app.models.attention import Rows, find_attention, value_rows
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import numpy_generator

Shapes = dict[str, tuple[int, ...]]


class Shaped:
    """The least that a selection can be built from."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def shaped(shapes: Shapes) -> dict[str, Shaped]:
    return {name: Shaped(*shape) for name, shape in shapes.items()}


def arrays(shapes: Shapes) -> dict[str, np.ndarray]:
    generator = numpy_generator(3, "arrays")
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def active(frozen: str, shapes: Shapes, head: str = "") -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the active ranges of every entry that is not wholly active."""
    selection = Selection.build(frozen, shaped(shapes), head=head)
    return {e.name: e.active for e in selection.entries if not e.is_active}


# A block with 7 features, a head with 5 classes; shapes as each library has them.
TIMM: Shapes = {
    "pos_embed": (1, 3, 7),
    "blocks.0.attn.qkv.weight": (21, 7),
    "blocks.0.attn.qkv.bias": (21,),
    "blocks.0.attn.proj.weight": (7, 7),
    "blocks.0.mlp.fc1.weight": (11, 7),
    "fc_norm.weight": (7,),
    "steps": (),
    "head.weight": (5, 7),
    "head.bias": (5,),
}


# --- exact numbers of a real model --------------------------------------------------------
@pytest.fixture(scope="module")
def vit_base() -> dict[str, torch.Tensor]:
    import timm

    with torch.device("meta"):
        return timm.create_model("vit_base_patch32_224", num_classes=10).state_dict()


@pytest.mark.parametrize(
    ("frozen", "num_active"),
    [
        ("all", 87_462_922),
        ("query-key", 73_288_714),
        ("value-head", 7_094_794),
        ("head", 7_690),
        ("*[query]", 80_375_818),
    ],
)
def test_vit_b_32_trains_the_papers_numbers(
    vit_base: dict[str, torch.Tensor], frozen: str, num_active: int
) -> None:
    selection = Selection.build(frozen, vit_base)
    assert selection.num_active == num_active
    assert selection.num_active + selection.num_frozen == 87_462_922
    assert selection.is_all == (frozen == "all")


def test_vit_b_32_has_14174208_query_and_key_numbers(vit_base: dict[str, torch.Tensor]) -> None:
    selection = Selection.build("query-key", vit_base)
    assert selection.num_frozen == 14_174_208
    assert selection.describe() == (
        "frozen=query-key: 73,288,714 of 87,462,922 numbers train (83.8%), 24 entries partly"
    )
    name = "blocks.11.attn.qkv.weight"
    assert selection.active_rows(name) == (Rows(0, 1536, 2304),)
    assert selection.frozen_rows(name) == (Rows(0, 0, 1536),)
    assert selection.frozen_shapes()[name] == (1536, 768)
    assert value_rows(vit_base)[name] == Rows(0, 1536, 2304)


# --- where each library keeps queries, keys and values -------------------------------------
QUERY_KEY_IS_FROZEN = {
    "timm": (TIMM, {"blocks.0.attn.qkv.weight": [(14, 21)], "blocks.0.attn.qkv.bias": [(14, 21)]}),
    "timm beit": (
        {"a.qkv.weight": (21, 7), "a.q_bias": (7,), "a.v_bias": (7,), "a.proj.weight": (7, 7)},
        {"a.qkv.weight": [(14, 21)], "a.q_bias": []},
    ),
    "timm eva": (
        {
            "a.q_proj.weight": (7, 7),
            "a.q_proj.bias": (7,),
            "a.k_proj.weight": (7, 7),
            "a.v_proj.weight": (7, 7),
            "a.v_proj.bias": (7,),
        },
        {"a.q_proj.weight": [], "a.q_proj.bias": [], "a.k_proj.weight": []},
    ),
    "timm vit with query and key norms": (
        {
            "a.qkv.weight": (21, 7),
            "a.q_norm.weight": (7,),
            "a.k_norm.weight": (7,),
            "norm.q_norm.weight": (7,),
        },
        {"a.qkv.weight": [(14, 21)], "a.q_norm.weight": [], "a.k_norm.weight": []},
    ),
    "timm pvt": (
        {"a.q.weight": (7, 7), "a.q.bias": (7,), "a.kv.weight": (14, 7), "a.kv.bias": (14,)},
        {"a.q.weight": [], "a.q.bias": [], "a.kv.weight": [(7, 14)], "a.kv.bias": [(7, 14)]},
    ),
    "timm convit": (
        {"a.qk.weight": (14, 7), "a.v.weight": (7, 7)},
        {"a.qk.weight": []},
    ),
    "timm mvit": (
        {"a.qkv.weight": (33, 7), "a.proj.weight": (11, 11), "a.norm_q.weight": (11,)},
        {"a.qkv.weight": [(22, 33)], "a.norm_q.weight": []},
    ),
    "torch attention": (
        {
            "in_proj_weight": (21, 7),
            "in_proj_bias": (21,),
            "bias_k": (1, 1, 7),
            "bias_v": (1, 1, 7),
            "out_proj.weight": (7, 7),
        },
        {"in_proj_weight": [(14, 21)], "in_proj_bias": [(14, 21)], "bias_k": []},
    ),
    "torch attention with other sizes": (
        {
            "a.q_proj_weight": (7, 7),
            "a.k_proj_weight": (7, 5),
            "a.v_proj_weight": (7, 3),
            "a.in_proj_bias": (21,),
        },
        {"a.q_proj_weight": [], "a.k_proj_weight": [], "a.in_proj_bias": [(14, 21)]},
    ),
    "gpt2": (
        {"h.0.attn.c_attn.weight": (7, 21), "h.0.attn.c_attn.bias": (21,)},
        {"h.0.attn.c_attn.weight": [(14, 21)], "h.0.attn.c_attn.bias": [(14, 21)]},
    ),
    "gpt2 cross-attention": (
        {
            "x.c_attn.weight": (7, 14),
            "x.c_attn.bias": (14,),
            "x.q_attn.weight": (7, 7),
            "x.q_attn.bias": (7,),
        },
        {
            "x.c_attn.weight": [(7, 14)],
            "x.c_attn.bias": [(7, 14)],
            "x.q_attn.weight": [],
            "x.q_attn.bias": [],
        },
    ),
    "bert": (
        {"self.query.weight": (7, 7), "self.key.weight": (7, 7), "self.value.weight": (7, 7)},
        {"self.query.weight": [], "self.key.weight": []},
    ),
    "distilbert": (
        {"a.q_lin.weight": (7, 7), "a.k_lin.weight": (7, 7), "a.v_lin.weight": (7, 7)},
        {"a.q_lin.weight": [], "a.k_lin.weight": []},
    ),
    "llama with grouped keys": (
        {"a.q_proj.weight": (14, 14), "a.k_proj.weight": (7, 14), "a.v_proj.weight": (7, 14)},
        {"a.q_proj.weight": [], "a.k_proj.weight": []},
    ),
    "t5": (
        {"SelfAttention.q.weight": (7, 5), "SelfAttention.k.weight": (7, 5)}
        | {"SelfAttention.v.weight": (7, 5), "SelfAttention.o.weight": (5, 7)},
        {"SelfAttention.q.weight": [], "SelfAttention.k.weight": []},
    ),
    "lora on a separate projection": (
        {
            "a.q_proj.base.weight": (7, 7),
            "a.q_proj.lora_A.weight": (2, 7),
            "a.k_proj.weight": (7, 7),
            "a.v_proj.weight": (7, 7),
        },
        {"a.q_proj.base.weight": [], "a.q_proj.lora_A.weight": [], "a.k_proj.weight": []},
    ),
}


@pytest.mark.parametrize("library", QUERY_KEY_IS_FROZEN)
def test_query_key_freezes_exactly_the_query_and_key_rows(library: str) -> None:
    shapes, expected = QUERY_KEY_IS_FROZEN[library]
    found = active("query-key", shapes)
    assert found == {name: tuple(ranges) for name, ranges in expected.items()}
    columns = {e.name for e in Selection.build("query-key", shaped(shapes)).entries if e.dim == 1}
    assert columns == {n for n in shapes if n.endswith(("c_attn.weight", "q_attn.weight"))} - {
        "x.q_attn.weight"
    }


VALUES = {
    "timm": {"blocks.0.attn.qkv.weight": Rows(0, 14, 21)},
    "timm beit": {"a.qkv.weight": Rows(0, 14, 21)},
    "timm pvt": {"a.kv.weight": Rows(0, 7, 14)},
    "timm convit": {"a.v.weight": Rows(0, 0, 7)},
    "torch attention": {"in_proj_weight": Rows(0, 14, 21)},
    "torch attention with other sizes": {"a.v_proj_weight": Rows(0, 0, 7)},
    "gpt2": {"h.0.attn.c_attn.weight": Rows(1, 14, 21)},
    "gpt2 cross-attention": {"x.c_attn.weight": Rows(1, 7, 14)},
    "llama with grouped keys": {"a.v_proj.weight": Rows(0, 0, 7)},
}


@pytest.mark.parametrize("library", VALUES)
def test_value_rows_are_the_weights_and_no_biases(library: str) -> None:
    assert value_rows(shaped(QUERY_KEY_IS_FROZEN[library][0])) == VALUES[library]


REFUSED: dict[str, tuple[str, Shapes]] = {
    "GPT-NeoX": ("interleave query, key and value by head", {"a.query_key_value.weight": (21, 7)}),
    "Falcon": ("interleave query, key and value by head", {"query_key_value.weight": (11, 7)}),
    "LeViT": (
        "LeViT family interleaves",
        {"a.qkv.weight": (21, 7), "a.attention_biases": (1, 7), "a.proj.weight": (7, 7)},
    ),
    "LeViT with norms": ("do not settle", {"a.qkv.linear.weight": (21, 7)}),
    "MaxViT": ("depending on its configuration", {"b.attn_grid.attn.qkv.weight": (21, 7)}),
    "Exaone": ("do not settle", {"a.qkv.weight": (21, 11), "a.proj.weight": (11, 11)}),
    "GC ViT": ("do not settle", {"a.qkv.weight": (18, 9), "a.proj.weight": (9, 9)}),
    "CoAtNet": ("do not settle", {"a.qkv.weight": (21, 7, 1, 1)}),
    "GPTBigCode": ("do not settle", {"h.c_attn.weight": (21, 7), "h.c_attn.bias": (21,)}),
    "keys unlike queries": ("do not settle", {"a.q.weight": (7, 7), "a.kv.weight": (8, 7)}),
    "Phi-3": ("do not settle", {"a.qkv_proj.weight": (21, 7)}),
    "DeepSeek": ("do not settle", {"a.kv_b_proj.weight": (14, 7), "a.q_proj.weight": (7, 7)}),
    "DeBERTa": ("DeBERTa interleaves", {"s.in_proj.weight": (21, 7), "s.q_bias": (7,)}),
}


@pytest.mark.parametrize("library", REFUSED)
@pytest.mark.parametrize("frozen", ["query-key", "value-head", "*weight[key]"])
def test_layouts_that_cannot_be_told_are_refused(library: str, frozen: str) -> None:
    reason, shapes = REFUSED[library]
    with pytest.raises(ValueError, match=f"cannot tell the query, key and value rows.*{reason}"):
        Selection.build(frozen, shaped(TIMM | shapes))
    assert Selection.build("head", shaped(TIMM | shapes)).num_active == 40
    with pytest.raises(ValueError, match="cannot tell the value rows"):
        value_rows(shaped(TIMM | shapes))


def test_projections_without_all_three_siblings_are_not_attention() -> None:
    found = find_attention(shaped({"memory.key.weight": (7, 7), "memory.value.weight": (7, 7)}))
    assert (found.rows, found.refused) == ({}, {})


# --- presets ------------------------------------------------------------------------------
def test_value_head_trains_value_rows_with_biases_and_the_head_only() -> None:
    found = active("value-head", TIMM)
    assert found == {
        "pos_embed": (),
        "blocks.0.attn.qkv.weight": ((14, 21),),
        "blocks.0.attn.qkv.bias": ((14, 21),),
        "blocks.0.attn.proj.weight": (),
        "blocks.0.mlp.fc1.weight": (),
        "fc_norm.weight": (),
        "steps": (),
    }
    selection = Selection.build("value-head", shaped(TIMM))
    assert selection.active_shapes() == {
        "blocks.0.attn.qkv.weight": (7, 7),
        "blocks.0.attn.qkv.bias": (7,),
        "head.weight": (5, 7),
        "head.bias": (5,),
    }


@pytest.mark.parametrize(
    "name", ["head.fc", "heads.head", "classifier.out_proj", "fc", "lm_head", "score"]
)
def test_every_librarys_head_is_found(name: str) -> None:
    shapes = {"body.fc.weight": (7, 7), f"{name}.weight": (5, 7), "norm.weight": (7,)}
    assert active("head", shapes) == {"body.fc.weight": (), "norm.weight": ()}


@pytest.mark.parametrize("given", ["keyword", "item"])
def test_a_head_of_another_name_is_given_by_its_prefix(given: str) -> None:
    shapes = {"body.weight": (7, 7), "decoder.weight": (5, 7), "decoder_norm.weight": (7,)}
    with pytest.raises(ValueError, match="found no entry of a head.*'decoder.weight'.*head=decod"):
        active("head", shapes)
    spec, head = ("head", "decoder") if given == "keyword" else ("head head=decoder", "")
    assert active(spec, shapes, head) == {"body.weight": (), "decoder_norm.weight": ()}
    with pytest.raises(ValueError, match="found no entry of head=decode; closest.*'decoder.weigh"):
        active("head head=decode", shapes)


def test_all_freezes_nothing_and_stands_alone() -> None:
    selection = Selection.build("all", shaped(TIMM))
    assert selection.is_all and selection.frozen_shapes() == {}
    with pytest.raises(ValueError, match="frozen='all, head' must be one of all, query-key"):
        Selection.build("all, head", shaped(TIMM))


# --- patterns -----------------------------------------------------------------------------
QKV = "blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("blocks.0.attn.qkv.weight", {QKV: ()}),
        ("*.weight[query], head.bias", {QKV: ((7, 21),), "head.bias": ()}),
        ("*.qkv.weight[key]", {QKV: ((0, 7), (14, 21))}),
        (
            "*.qkv.weight[query, value]  head.*",
            {QKV: ((7, 14),), "head.weight": (), "head.bias": ()},
        ),
        ("*.qkv.weight[query] *.qkv.weight[key]", {QKV: ((14, 21),)}),
        ("*.qkv.weight[2:5]", {QKV: ((0, 2), (5, 21))}),
        ("*.qkv.weight[:5]", {QKV: ((5, 21),)}),
        ("*.qkv.weight[5:]", {QKV: ((0, 5),)}),
        ("*.qkv.weight !*[value]", {QKV: ((14, 21),)}),
        ("*.qkv.weight,!*.qkv.weight[3:9]", {QKV: ((3, 9),)}),
        ("query-key, !*.bias", {QKV: ((14, 21),)}),
        ("head.[bw]eight, pos_embed", {"head.weight": (), "pos_embed": ()}),
        ("[hp]ead.bia[r-t]", {"head.bias": ()}),
        ("step?", {"steps": ()}),
    ],
)
def test_patterns_name_what_is_frozen(
    spec: str, expected: dict[str, tuple[tuple[int, int], ...]]
) -> None:
    assert active(spec, TIMM) == expected


def test_presets_can_be_widened_by_patterns() -> None:
    both = active("value-head, !fc_norm.*", TIMM)
    assert both == {n: r for n, r in active("value-head", TIMM).items() if n != "fc_norm.weight"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("block.0.atn.qkv.*", "matches no entry; closest are 'blocks.0.attn.qkv.bias', 'blocks.0."),
        ("head.*, !bias", "item '!bias' matches no entry; closest are 'head.bias'"),
        ("pos_embed[key]", r"'pos_embed' \[1, 3, 7\] holds no key rows; drop the suffix"),
        ("*[quary]", "rows must be query, key, value or start:stop, got 'quary'"),
        (
            "head.weight[0:6]",
            r"0 <= start < stop <= 5 of entry 'head.weight' \[5, 7\], got \[0:6\]",
        ),
        ("head.weight[3:3]", "0 <= start < stop <= 5"),
        ("head.weight[a:3]", r"rows are start:stop, got \[a:3\]"),
        ("steps[0:1]", r"of entry 'steps' \[\]"),
        ("head.bias !head.bias", "freezes nothing; use frozen=all"),
        ("*", r"leaves nothing to train; add an item like '!head"),
        ("", "frozen='' must be one of all, query-key, value-head, head, or name patterns"),
        ("auto", "item 'auto' matches no entry"),
        ("query_key", "item 'query_key' matches no entry; the preset is 'query-key'; use a glob"),
        ("blocks.0.attn.qkv", "item 'blocks.0.attn.qkv' matches no entry"),
    ],
)
def test_a_wrong_item_is_an_error_that_says_what_to_do(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection.build(spec, shaped(TIMM))


def test_a_preset_that_matches_nothing_names_the_closest_entries() -> None:
    shapes = {"conv1.weight": (7, 3, 3, 3), "layer1.attn.weight": (7, 7), "fc.weight": (5, 7)}
    with pytest.raises(
        ValueError,
        match="query-key found no query or key entries, and entries that look like attention are "
        "'layer1.attn.weight'; .* example frozen='layer1.attn.weight'",
    ):
        Selection.build("query-key", shaped(shapes))
    with pytest.raises(ValueError, match="found no value entries"):
        Selection.build("value-head", shaped(shapes))
    with pytest.raises(ValueError, match="no value weights .* set value-l2=0"):
        value_rows(shaped(shapes))
    with pytest.raises(ValueError, match="'note' has no shape"):
        Selection.build("all", {"note": "text"})


@pytest.mark.parametrize("preset", ["query-key", "value-head"])
def test_a_model_without_attention_is_told_so_and_no_unrelated_entry(preset: str) -> None:
    shapes = {"conv1.weight": (7, 3, 3, 3), "layer1.monkey.weight": (7, 7), "fc.weight": (5, 7)}
    with pytest.raises(ValueError, match="no entry looks like attention by its name") as error:
        Selection.build(preset, shaped(shapes))
    assert "monkey" not in str(error.value)


BERT = "bert.encoder.layer.0."


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        # the same module at the end wins over a longer piece of the same letters
        ("encoder.layer.0.attn.query.weight", f"{BERT}attention.self.query.weight"),
        # a typo in the module: what lies beside it
        (f"{BERT}attention.self.querry.weight", f"{BERT}attention.self.query.weight"),
        (f"{BERT}attention.self.query.weigth", f"{BERT}attention.self.query.weight"),
        # another library's names: parts of attention, and not the output's dense
        ("encoder.layers.0.attn.q_proj.weight", f"{BERT}attention.self.query.weight"),
        ("*.attn.q_proj.weight", f"{BERT}attention.self.query.weight"),
        (f"{BERT}intermediate.densed.weight", f"{BERT}intermediate.dense.weight"),
        # a module's name without its entries
        ("bert.encoder.layer.1.output", "bert.encoder.layer.1.output.dense.weight"),
    ],
)
def test_the_nearest_names_go_by_path_before_spelling(spec: str, nearest: str) -> None:
    parts = ("attention.self.query", "attention.self.key", "attention.output.dense")
    modules = [f"layer.{i}.{p}" for i in (0, 1) for p in (*parts, "intermediate.dense")]
    modules += [f"layer.{i}.output.dense" for i in (0, 1)]
    shapes = {f"bert.encoder.{m}.weight": (7, 7) for m in modules} | {"query_weight": (7,)}
    with pytest.raises(ValueError, match=f"closest are '{re.escape(nearest)}'"):
        Selection.build(spec, shaped(shapes))


def test_the_nearest_names_are_of_several_kinds_and_not_one_of_every_block() -> None:
    shapes = {f"blocks.{i}.attn.{kind}.weight": (21, 7) for i in range(12) for kind in "abcd"}
    with pytest.raises(ValueError, match="closest are") as error:
        Selection.build("blocks.3.attn.qkv.weight", shaped(shapes))
    assert re.findall(r"'blocks\.3\.attn\.(\w)\.weight'", str(error.value)) == ["a", "b", "c"]


# --- split and merge ----------------------------------------------------------------------
SPECS = ["all", "query-key", "value-head", "head", "*[key]", "*.qkv.*[3:5] *.qkv.*[7:11]"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_merge_of_split_and_split_of_merge_are_bit_identical(spec: str, kind: str) -> None:
    whole = arrays(TIMM | {"h.c_attn.weight": (7, 21), "n": ()})
    whole = {n: np.asarray(a) for n, a in whole.items()}
    if kind == "torch":
        whole = {n: torch.from_numpy(a) for n, a in whole.items()}
    selection = Selection.build(spec, whole)
    shuffled = dict(reversed(whole.items()))
    halves = selection.split(shuffled)
    merged = selection.merge(*(dict(reversed(half.items())) for half in halves))
    assert list(merged) == list(whole)
    for name, array in whole.items():
        assert type(merged[name]) is type(array) and merged[name].dtype == array.dtype
        assert np.array_equal(merged[name], array)
    shapes = (selection.active_shapes(), selection.frozen_shapes())
    for half, again, expected in zip(halves, selection.split(merged), shapes, strict=True):
        assert {n: tuple(a.shape) for n, a in half.items()} == expected
        assert list(half) == list(again) == [n for n in whole if n in expected]
        assert all(np.array_equal(half[n], again[n]) for n in half)


def test_split_gives_views_and_merge_gives_references() -> None:
    whole = arrays(TIMM | {"h.c_attn.weight": (7, 21)})
    selection = Selection.build("query-key", whole)
    active_half, frozen_half = selection.split(whole)
    for name in (QKV, "h.c_attn.weight"):
        for half in (active_half, frozen_half):
            assert np.shares_memory(half[name], whole[name])
    assert active_half["head.weight"] is whole["head.weight"]
    assert np.array_equal(active_half[QKV], whole[QKV][14:])
    assert np.array_equal(frozen_half["h.c_attn.weight"], whole["h.c_attn.weight"][:, :14])
    merged = selection.merge(active_half, frozen_half)
    assert merged["head.weight"] is whole["head.weight"]
    assert not np.shares_memory(merged[QKV], whole[QKV])
    tensors = {n: torch.from_numpy(a) for n, a in whole.items() if a.ndim}
    tensors["steps"] = torch.tensor(3)
    active_half, _ = selection.split(tensors)
    assert active_half[QKV].data_ptr() == tensors[QKV][14:].data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, f: a.pop("head.bias"), "active: entry 'head.bias' is missing"),
        (lambda a, f: f.pop(QKV), f"frozen: entry '{QKV}' is missing"),
        (lambda a, f: a.update(more=np.ones(2)), "active: entry 'more' does not belong here"),
        (
            lambda a, f: f.update({"head.bias": a["head.bias"]}),
            "frozen: entry 'head.bias' does not",
        ),
        (
            lambda a, f: a.update({QKV: np.ones((14, 7))}),
            rf"active: entry '{QKV}' must have shape \[7, 7\], got \[14, 7\]",
        ),
        (
            lambda a, f: a.update({QKV: a[QKV].astype(np.float32)}),
            f"entry '{QKV}' is ndarray float32 in the active half and ndarray float64",
        ),
        (
            lambda a, f: a.update({QKV: torch.from_numpy(a[QKV])}),
            f"entry '{QKV}' is Tensor torch.float64 in the active half and ndarray",
        ),
    ],
)
def test_merge_refuses_halves_that_do_not_fit(change: object, message: str) -> None:
    whole = arrays(TIMM)
    selection = Selection.build("query-key", whole)
    active_half, frozen_half = selection.split(whole)
    change(active_half, frozen_half)
    with pytest.raises(ValueError, match=message):
        selection.merge(active_half, frozen_half)


def test_split_refuses_arrays_of_another_model_and_restrict_takes_a_subset() -> None:
    whole = arrays(TIMM)
    selection = Selection.build("query-key", whole)
    momentum = {n: whole[n] for n in ("head.bias", QKV)}
    with pytest.raises(ValueError, match="split: entry 'pos_embed' is missing"):
        selection.split(momentum)
    part = selection.restrict(momentum)
    assert list(part) == [QKV, "head.bias"]
    assert np.array_equal(part[QKV], whole[QKV][14:])
    with pytest.raises(ValueError, match="entry 'other' is not in the selection of 9 entries"):
        selection.restrict({"other": np.ones(3)})
    with pytest.raises(ValueError, match=r"split: entry 'head.bias' must have shape \[5\]"):
        selection.split(whole | {"head.bias": np.ones(3)})


def test_parts_and_locate_follow_the_keys_of_trainable_parameters() -> None:
    whole = arrays(TIMM)
    selection = Selection.build("*.weight[key]", whole)
    active_half, _ = selection.split(whole)
    parts = selection.parts(active_half)
    assert list(parts)[:4] == ["pos_embed", f"{QKV}#0", f"{QKV}#1", "blocks.0.attn.qkv.bias"]
    assert np.array_equal(parts[f"{QKV}#0"], whole[QKV][:7])
    assert np.array_equal(parts[f"{QKV}#1"], whole[QKV][14:])
    assert np.shares_memory(parts[f"{QKV}#1"], active_half[QKV])
    assert selection.locate({QKV: Rows(0, 4, 16)}) == {
        f"{QKV}#0": Rows(0, 4, 7),
        f"{QKV}#1": Rows(0, 0, 2),
    }
    query_key = Selection.build("query-key", whole)
    assert query_key.locate({QKV: Rows(0, 14, 21), "head.weight": Rows(0, 1, 3)}) == {
        QKV: Rows(0, 0, 7),
        "head.weight": Rows(0, 1, 3),
    }
    assert query_key.locate({QKV: Rows(0, 0, 14)}) == {}
    with pytest.raises(ValueError, match="sliced along dim 0, not 1"):
        query_key.locate({QKV: Rows(1, 0, 2)})


# --- identity -----------------------------------------------------------------------------
def test_selections_are_equal_if_the_same_slices_train() -> None:
    by_preset = Selection.build(" query-key ", shaped(TIMM))
    by_pattern = Selection.build("*[query,key]", shaped(TIMM))
    assert by_preset == by_pattern and hash(by_preset) == hash(by_pattern)
    assert (by_preset.spec, by_pattern.spec) == ("query-key", "*[query,key]")
    assert by_preset != Selection.build("*[key]", shaped(TIMM))
    assert by_preset != Selection.build("query-key", shaped(TIMM | {"head.bias": (7,)}))
    assert pickle.loads(pickle.dumps(by_preset)) == by_preset
    with pytest.raises(AttributeError):
        by_preset.spec = "all"


def test_writing_parts_into_views_puts_an_active_half_back_in_place() -> None:
    entries = {
        "blocks.0.attn.qkv.weight": torch.arange(147, dtype=torch.float32).reshape(21, 7),
        "blocks.0.attn.qkv.bias": torch.arange(21, dtype=torch.float32),
        "scale": torch.tensor(3.0),
        "head.weight": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    }
    # only the key rows frozen: the active rows of the fused weight are two ranges
    selection = Selection.build("*.qkv.*[key]", entries)
    active, frozen = selection.split({name: tensor + 0.5 for name, tensor in entries.items()})
    target = {name: tensor.clone() for name, tensor in entries.items()}
    views = selection.views(target)
    parts = selection.parts(active)
    assert views.keys() == parts.keys()
    assert "blocks.0.attn.qkv.weight#1" in views and "scale" in views
    for key, part in parts.items():
        views[key].copy_(part)
    _, before = selection.split(entries)
    expected = selection.merge(active, before)
    assert all(torch.equal(target[name], expected[name]) for name in entries)
    assert not torch.equal(frozen["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])
