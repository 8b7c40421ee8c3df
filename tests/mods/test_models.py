"""Model families behind the mod: three rounds each, query and key frozen after the first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedFrozen
from tests.mods.project import Project, Step, check_frozen, classifier, loss_of

CLASSES, WORDS = 3, 97


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model every time, without a trace in the global random state."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return build()

    return made


def images(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(5, 3, 16, 16, generator=generator)
    labels = torch.randint(0, CLASSES, (5,), generator=generator)
    out: Any = model(x)
    return nn.functional.cross_entropy(getattr(out, "logits", out), labels)


def words(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(0, WORDS, (5, 11), generator=generator)
    labels = torch.randint(0, CLASSES, (5,), generator=generator)
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def next_words(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(0, WORDS, (5, 11), generator=generator)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=CLASSES
    )


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=16,
        patch_size=8,
        num_layers=2,
        num_heads=3,
        hidden_dim=12,
        mlp_dim=20,
        num_classes=CLASSES,
    )


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        image_size=16,
        patch_size=8,
        num_labels=CLASSES,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=13,
        num_labels=CLASSES,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=13, n_embd=12, n_layer=2, n_head=3)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def hf_llama() -> nn.Module:
    """Grouped keys and values: 4 heads of queries, 2 of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=13,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


class OwnAttention(nn.Module):
    """Names that no library has."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.answer, self.tell = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attend = nn.functional.scaled_dot_product_attention
        out: torch.Tensor = self.head(attend(self.ask(x), self.answer(x), self.tell(x)).mean(dim=1))
        return out


QUERY_KEY = "query-key"
MODELS: dict[str, tuple[Callable[[], nn.Module], Step, str, tuple[str, ...]]] = {
    "nn.TransformerEncoder": (classifier, loss_of, QUERY_KEY, ("in_proj",)),
    "own": (OwnAttention, loss_of, "ask.*, answer.*", ("ask", "answer")),
    "timm": (timm_vit, images, QUERY_KEY, ("attn.qkv",)),
    "torchvision": (torchvision_vit, images, QUERY_KEY, ("in_proj",)),
    "transformers-ViT": (hf_vit, images, QUERY_KEY, ("q_proj", "k_proj", "query", "key")),
    "transformers-BERT": (hf_bert, words, QUERY_KEY, ("query", "key")),
    "transformers-GPT-2": (hf_gpt2, next_words, QUERY_KEY, ("c_attn",)),
    "transformers-Llama": (hf_llama, next_words, QUERY_KEY, ("q_proj", "k_proj")),
}


@pytest.mark.parametrize("name", MODELS)
def test_three_rounds_of_a_model_family(name: str, tmp_path: Path) -> None:
    build, step, spec, parts = MODELS[name]
    project = Project(tmp_path, build=seeded(build), step=step, num_clients=2)
    strategy = FedFrozen(strategy=FedAvg(fraction_evaluate=0.0), warmup_rounds=1, frozen=spec)
    project.run(strategy)
    check_frozen(project, strategy, spec)
    frozen = Selection.build(spec, project.models[-1]).frozen_shapes()
    assert all(any(part in entry for part in parts) for entry in frozen)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "own"])
def test_a_wrong_name_is_answered_with_the_nearest_of_the_model(name: str) -> None:
    state = MODELS[name][0]().state_dict()
    wanted = next(entry for entry in state if "attn" in entry or "attention" in entry)
    with pytest.raises(ValueError, match="closest are") as error:
        Selection.build(wanted.replace("weight", "weigth"), state)
    assert repr(wanted) in str(error.value)
