"""From uint8 batches to model input: augmented, normalised and resized on the device.

Everything is a batched tensor operation; nothing runs per image in Python.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow's RGB -> L
CROP_PADDING = 8  # a crop moves an image by up to 1/8 of its side: 4 pixels of 32
# A client's images up to this size are gathered once; larger ones stay on disk.
RESIDENT_BYTES = 256 * 1024**2


class Preprocessor:
    """Turns uint8 images [B, H, W, C] into float32 model input [B, channels, S, S].

    Parameters
    ----------
    image_size
        S in pixels. Images are resized bilinearly until the shorter side fits (with
        antialiasing when that shrinks them) and centre-cropped.
    mean, std
        Per channel, of pixel values in [0, 1].
    channels
        1 or 3. Grey images are repeated to 3 channels; RGB becomes grey as its luma.
    augment
        ``none``, ``crop`` (each image moved by its own offset of up to an eighth of its
        side, the border repeated) or ``crop-flip`` (also mirrored with probability 1/2).
    device
        Where the work is done and the result lies.
    """

    def __init__(
        self,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        channels: int,
        augment: str,
        device: str | torch.device,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {channels}; use 1 for grey, 3 for RGB")
        if not len(mean) == len(std) == channels:
            raise ValueError(
                f"mean and std need {channels} values each, got {len(mean)} and {len(std)}; "
                "give one value for each channel"
            )
        if min(std) <= 0:
            raise ValueError(f"std must be > 0, got {tuple(std)}; use 1 for no scaling")
        if augment not in ("none", "crop", "crop-flip"):
            raise ValueError(f"augment must be none, crop or crop-flip, got {augment!r}")
        self.image_size = image_size
        self.channels = channels
        self.augment = augment
        self.device = torch.device(device)
        # (x / 255 - mean) / std as one multiplication and one addition.
        deviation = torch.tensor(std, dtype=torch.float64)
        scale = 1 / (255 * deviation)
        shift = -torch.tensor(mean, dtype=torch.float64) / deviation
        self._scale = scale.float().view(1, channels, 1, 1).to(self.device)
        self._shift = shift.float().view(1, channels, 1, 1).to(self.device)
        self._luma = torch.tensor(LUMA, device=self.device)

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return [B, channels, S, S]; without a generator (evaluation) nothing is random."""
        images = images.to(self.device)
        if generator is not None and self.augment != "none":
            images = shift_and_flip(images, generator, flip=self.augment == "crop-flip")
        x = self._to_channels(images)
        # Normalising first is cheaper where images are enlarged, and bilinear weights sum
        # to one, so the order does not matter.
        x = torch.addcmul(self._shift, x, self._scale)
        return self._resize(x)

    def _to_channels(self, images: Tensor) -> Tensor:
        """[B, H, W, C] uint8 -> [B, channels, H, W] float32 in [0, 255]."""
        x = images.float()
        if images.shape[-1] == 3 and self.channels == 1:
            x = (x @ self._luma).unsqueeze(-1)
        x = x.permute(0, 3, 1, 2)
        return x.expand(-1, self.channels, -1, -1)

    def _resize(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        size, shorter = self.image_size, min(height, width)
        if shorter != size:
            target = (height * size // shorter, width * size // shorter)
            # Antialiasing changes nothing where pixels are only added, but costs time.
            x = F.interpolate(x, target, mode="bilinear", antialias=size < shorter)
        top, left = (round((side - size) / 2) for side in x.shape[-2:])
        return x[..., top : top + size, left : left + size].contiguous()


def shift_and_flip(images: Tensor, generator: torch.Generator, *, flip: bool) -> Tensor:
    """Return images [B, H, W, C], each moved and perhaps mirrored by its own draw.

    Moving by up to ``side // 8`` pixels with the border repeated equals padding by that
    many pixels (mode ``replicate``) and cropping at random. Repeating the border suits
    dark and white backgrounds alike, where zeros would draw a frame around white paper.
    """
    batch, height, width = images.shape[:3]
    device = images.device
    rows = _moved(batch, height, generator, device)
    columns = _moved(batch, width, generator, device)
    if flip:
        coins = torch.rand(batch, generator=generator, device=generator.device) < 0.5
        columns = torch.where(coins.to(device)[:, None], columns.flip(1), columns)
    index = torch.arange(batch, device=device)
    return images[index[:, None, None], rows[:, :, None], columns[:, None, :]]


def _moved(batch: int, side: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return source positions [B, side] after a shift drawn for each image."""
    reach = side // CROP_PADDING
    offsets = torch.randint(
        -reach, reach + 1, (batch, 1), generator=generator, device=generator.device
    )
    return (torch.arange(side, device=device) + offsets.to(device)).clamp(0, side - 1)


class ImageExamples:
    """Some examples of a split, gathered by position.

    Parameters
    ----------
    images
        uint8 [N, H, W, C], the whole split, usually mapped from disk.
    labels
        int64 [N].
    indices
        int64 [n], the examples' rows in the split.
    preprocessor
        Makes model input of a batch.

    Notes
    -----
    Up to :data:`RESIDENT_BYTES` the examples' images are gathered once, to the device;
    beyond that each batch is gathered from the split, which is never copied as a whole.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, indices: Tensor, preprocessor: Preprocessor
    ) -> None:
        self._preprocessor = preprocessor
        device = preprocessor.device
        indices = torch.as_tensor(indices, dtype=torch.int64)
        self._labels = labels[indices].to(device)
        self._resident = images[:1].nbytes * len(indices) <= RESIDENT_BYTES
        if self._resident:
            self._images = images.index_select(0, indices).to(device)
        else:
            self._images, self._indices = images, indices

    def __len__(self) -> int:
        """Return n."""
        return len(self._labels)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return model input [B, channels, S, S] and labels [B] on the device.

        Parameters
        ----------
        positions
            int64 [B] in [0, n).
        generator
            Source of the augmentation; None for evaluation.
        """
        if self._resident:
            positions = positions.to(self._images.device)
            images = self._images.index_select(0, positions)
        else:
            images = self._images.index_select(0, self._indices[positions.cpu()])
        y = self._labels.index_select(0, positions.to(self._labels.device))
        return self._preprocessor(images, generator), y
