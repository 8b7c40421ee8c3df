"""A Hugging Face ViT, made small and from nothing, on handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    num_labels=10,
)


def new_model() -> nn.Module:
    """Return a model whose weights are to be loaded."""
    return ViTForImageClassification(CONFIG)


def initial_model() -> nn.Module:
    """Return the model that the federation starts from."""
    torch.manual_seed(1)
    return new_model()


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test images of one client."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    mine = order[partition::num_partitions]
    split = int(0.8 * len(mine))
    train, test = (TensorDataset(images[part], labels[part]) for part in mine.tensor_split([split]))
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
