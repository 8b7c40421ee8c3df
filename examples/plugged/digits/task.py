"""Model, data, training and test; nothing of Flower in here."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A Transformer that reads an 8 x 8 image as 8 rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.randn(8, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, 10] of images [n, 8, 8]."""
        return self.head(self.encoder(self.embed(x) + self.position).mean(dim=1))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test images of one client."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    mine = order[partition_id::num_partitions]
    data = TensorDataset(images[mine], labels[mine])
    split = int(0.8 * len(data))
    train, test = data[:split], data[split:]
    return (
        DataLoader(TensorDataset(*train), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(*test), batch_size=64),
    )


def train(net: Net, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train with SGD and return the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
    return total / len(loader.dataset)


def test(net: Net, loader: DataLoader) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            logits = net(images)
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(loader.dataset), correct / len(loader.dataset)
