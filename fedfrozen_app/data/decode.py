"""Decode encoded images once into one uint8 array of a common size.

The common size of a data set (training and test split together):

1. all images alike: that size;
2. unlike sizes and ``image-size`` set: a square of that side;
3. unlike sizes, but more than half of the images share one: that size;
4. otherwise a square whose side is the median of the shorter sides, at most 224.

An image of another size is resized until its shorter side fits and centre-cropped.
Grey images keep one channel when every image is grey; otherwise all become RGB.
"""

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps

from fedfrozen_app.config import ConfigError

LARGEST_COMMON_SIDE = 224
# what Pillow raises for a broken image or one too large to be meant
UNDECODABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
# Below this many encoded bytes an image decodes faster than threads hand over the GIL.
BYTES_WORTH_A_THREAD = 4096

GREY_MODES = frozenset({"1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N"})
UNSUPPORTED_MODES = frozenset({"I", "F"})  # their value range is not known


@dataclass(frozen=True)
class ImageForm:
    """Height and width in pixels and number of channels (1 or 3) of decoded images."""

    height: int
    width: int
    channels: int


class ImageCensus:
    """Counts sizes and colour of encoded images from their headers, without decoding."""

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()  # (height, width)
        self.all_grey = True

    def add(self, batches: Iterable[Sequence[bytes]], split: str) -> None:
        """Count the images of one split."""
        for row, encoded in enumerate(chain.from_iterable(batches)):
            try:
                image = _open(encoded)
            except UNDECODABLE as error:
                raise _undecodable(row, split, error) from error
            turned = _orientation(image) >= 5
            height, width = image.size if turned else image.size[::-1]
            self.sizes[height, width] += 1
            self.all_grey &= image.mode in GREY_MODES

    def common_form(self, image_size: int = 0) -> ImageForm:
        """Return the form to decode to, by the rule in the module's docstring."""
        channels = 1 if self.all_grey else 3
        (size, count) = self.sizes.most_common(1)[0]
        alike = len(self.sizes) == 1
        if alike or (not image_size and 2 * count > self.sizes.total()):
            return ImageForm(*size, channels)
        side = image_size or min(LARGEST_COMMON_SIDE, self._median_shorter_side())
        return ImageForm(side, side, channels)

    def _median_shorter_side(self) -> int:
        sides = [min(size) for size in self.sizes]
        return int(np.median(np.repeat(sides, list(self.sizes.values()))))


def write_images(
    path: Path, batches: Iterable[Sequence[bytes]], num_images: int, form: ImageForm, split: str
) -> None:
    """Decode images into a ``.npy`` file, uint8 [num_images, height, width, channels].

    The file is written front to back, so a full disk is an error and not a crash of
    whoever touches a page of a sparse map.

    Raises
    ------
    ConfigError
        For an image that cannot be decoded, naming its row.
    """
    shape = (num_images, form.height, form.width, form.channels)
    with path.open("wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": shape}
        )
        row = 0
        for batch in batches:
            for part in _decode_batch(pool, batch, row, form, split):
                file.write(part.data)
            row += len(batch)


def _decode_batch(
    pool: ThreadPoolExecutor, batch: Sequence[bytes], row: int, form: ImageForm, split: str
) -> Iterator[npt.NDArray[np.uint8]]:
    decode = partial(_decode, form=form, split=split)
    if sum(map(len, batch)) < BYTES_WORTH_A_THREAD * len(batch):
        return iter([decode(batch, row)])
    step = -(-len(batch) // (os.cpu_count() or 1))
    starts = range(0, len(batch), step)
    return pool.map(decode, [batch[i : i + step] for i in starts], [row + i for i in starts])


def _decode(
    batch: Sequence[bytes], first_row: int, form: ImageForm, split: str
) -> npt.NDArray[np.uint8]:
    """Decode images to uint8 [B, height, width, channels]."""
    out = np.empty((len(batch), form.height, form.width, form.channels), dtype=np.uint8)
    for i, encoded in enumerate(batch):
        try:
            out[i] = _pixels(encoded, form).reshape(out.shape[1:])
        except UNDECODABLE as error:
            raise _undecodable(first_row + i, split, error) from error
    return out


def _pixels(encoded: bytes, form: ImageForm) -> npt.NDArray[np.uint8]:
    image = _open(encoded)
    if _orientation(image) != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit grey at 255 instead of scaling it.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("L" if form.channels == 1 else "RGB")
    if image.size != (form.width, form.height):
        image = ImageOps.fit(image, (form.width, form.height), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _open(encoded: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(encoded))
    if image.mode in UNSUPPORTED_MODES:
        raise ValueError(f"mode {image.mode} (32 bits a pixel) has no known value range")
    return image


def _orientation(image: Image.Image) -> int:
    """Return how a camera was held (1 = upright; 5 to 8 swap height and width)."""
    if "exif" not in image.info:
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def _undecodable(row: int, split: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"image {row} of the {split} split cannot be decoded: {error}; "
        "replace the image or drop the row"
    )
