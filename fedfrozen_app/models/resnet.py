"""ResNets for small images, with GroupNorm (arXiv:1512.03385, arXiv:1803.08494).

The models of the FLITE paper (arXiv:2607.18343, section 4): torchvision's ResNet-18 and -34 with
GroupNorm(32) in the place of BatchNorm, whose running statistics clients cannot average, and
with a 3x3 convolution without pooling as their stem, as images of 32 or 64 pixels need. And the
small one of the ResNet paper's section 4.2, ResNet-20 of widths 16, 32 and 64, which two CPU
cores train; its shortcuts are 1x1 convolutions and its groups have 2, 4 and 8 channels.

State dicts have torchvision's names. There are no weights of them on the hub.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import resnet18, resnet34
from torchvision.models.resnet import BasicBlock

from fedfrozen_app.config import ConfigError

Norm = Callable[[int], nn.Module]  # makes the normalisation of a width

STEM_WIDTH = 64
SMALL_WIDTHS, SMALL_DEPTH = (16, 32, 64), 3  # blocks per stage
IMAGE_SIZE = 32
SMALLEST_IMAGE = 8  # the last stage then sees one or two pixels


class SmallResNet(nn.Module):
    """ResNet-20: a 3x3 stem, three stages of three basic blocks, 272,474 weights for 10 classes."""

    def __init__(self, num_classes: int, norm_layer: Norm) -> None:
        super().__init__()
        width = SMALL_WIDTHS[0]
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = norm_layer(width)
        self.relu = nn.ReLU(inplace=True)
        for stage, width_out in enumerate(SMALL_WIDTHS, 1):
            blocks = [_block(width, width_out, norm_layer)]
            blocks += [_block(width_out, width_out, norm_layer) for _ in range(SMALL_DEPTH - 1)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            width = width_out
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                _kaiming_(module)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, 3, S, S]."""
        x = self.relu(self.bn1(self.conv1(images)))
        for stage in range(1, len(SMALL_WIDTHS) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _block(width: int, width_out: int, norm_layer: Norm) -> BasicBlock:
    if width == width_out:
        return BasicBlock(width, width_out, norm_layer=norm_layer)
    shortcut = nn.Conv2d(width, width_out, 1, stride=2, bias=False)
    downsample = nn.Sequential(shortcut, norm_layer(width_out))
    return BasicBlock(width, width_out, 2, downsample, norm_layer=norm_layer)


def _kaiming_(conv: nn.Conv2d) -> None:
    """Fill as torchvision's ResNets are (arXiv:1502.01852); the meta device has no values."""
    if not conv.weight.is_meta:
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


def _small(num_classes: int, norm_layer: Norm) -> nn.Module:
    return SmallResNet(num_classes, norm_layer)


def _large(num_classes: int, norm_layer: Norm, *, depth: int) -> nn.Module:
    build = {18: resnet18, 34: resnet34}[depth]
    model: nn.Module = build(num_classes=num_classes, norm_layer=norm_layer)
    stem = nn.Conv2d(3, STEM_WIDTH, 3, padding=1, bias=False)
    _kaiming_(stem)
    model.conv1, model.maxpool = stem, nn.Identity()
    return model


# by name: how to build it, and the groups of its GroupNorm
BUILDERS: dict[str, tuple[Callable[[int, Norm], nn.Module], int]] = {
    "resnet18-gn": (partial(_large, depth=18), 32),
    "resnet34-gn": (partial(_large, depth=34), 32),
    "resnet20-gn": (_small, 8),
}


def create_resnet(name: str, num_classes: int) -> nn.Module:
    """Build one of :data:`BUILDERS` with torchvision's own initial values.

    They come from the global generator (Kaiming normal for convolutions, GroupNorm at one and
    zero, the head as ``nn.Linear`` starts). Inputs are [B, 3, S, S] of any S from 8 on.
    """
    build, groups = BUILDERS[name]
    return build(num_classes, partial(nn.GroupNorm, groups))


def check_image_size(name: str, image_size: int) -> None:
    """Raise ConfigError for images that the halvings leave nothing of."""
    if image_size < SMALLEST_IMAGE:
        raise ConfigError(
            f"image-size of {name} must be >= {SMALLEST_IMAGE}, got {image_size}; for example "
            f"image-size={IMAGE_SIZE}"
        )
