"""ResNets for small images, with GroupNorm (arXiv:1512.03385, arXiv:1803.08494).

The models of the FLITE paper (arXiv:2607.18343, section 4): torchvision's ResNet-18 and -34 with
GroupNorm(32) in the place of BatchNorm, whose running statistics clients cannot average, and
with a 3x3 convolution without pooling as their stem, as images of 32 or 64 pixels need. State
dicts have torchvision's names. There are no weights of them on the hub.
"""

from functools import partial

from torch import nn
from torchvision.models import ResNet, resnet18, resnet34

from fedfrozen_app.config import ConfigError

BUILDERS = {"resnet18-gn": resnet18, "resnet34-gn": resnet34}
GROUPS = 32
IMAGE_SIZE = 32
SMALLEST_IMAGE = 8  # the last stage then sees one pixel
STEM_WIDTH = 64


def create_resnet(name: str, num_classes: int) -> ResNet:
    """Build ``resnet18-gn`` or ``resnet34-gn`` with torchvision's own initial values.

    They come from the global generator (Kaiming normal for convolutions, GroupNorm at one and
    zero, the head as ``nn.Linear`` starts). Inputs are [B, 3, S, S] of any S from 8 on.
    """
    norm = partial(nn.GroupNorm, GROUPS)
    model: ResNet = BUILDERS[name](num_classes=num_classes, norm_layer=norm)
    stem = nn.Conv2d(3, STEM_WIDTH, 3, padding=1, bias=False)
    if not stem.weight.is_meta:
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model


def check_image_size(name: str, image_size: int) -> None:
    """Raise ConfigError for images that the three halvings leave nothing of."""
    if image_size < SMALLEST_IMAGE:
        raise ConfigError(
            f"image-size of {name} must be >= {SMALLEST_IMAGE}, got {image_size}; for example "
            f"image-size={IMAGE_SIZE}"
        )
