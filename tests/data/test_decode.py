import io

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.config import ConfigError
from fedfrozen_app.data import decode
from fedfrozen_app.data.decode import ImageCensus, ImageForm, write_images
from tests.data.pictures import encode, random_pixels


def census_of(*images: bytes) -> ImageCensus:
    census = ImageCensus()
    census.add([images], "train")
    return census


def decoded(path, images, form: ImageForm, batch: int = 3) -> np.ndarray:
    batches = [images[i : i + batch] for i in range(0, len(images), batch)]
    write_images(path / "out.npy", batches, len(images), form, "train")
    return np.load(path / "out.npy", mmap_mode="r")


def blank(height: int, width: int) -> bytes:
    return encode(np.zeros((height, width), np.uint8))


def test_alike_images_keep_their_size_whatever_image_size_says():
    census = census_of(blank(7, 11), blank(7, 11))
    assert census.common_form(image_size=224) == ImageForm(7, 11, 1)


def test_unlike_images_take_image_size_then_the_majority_then_the_median_side():
    mostly = census_of(blank(7, 11), blank(7, 11), blank(13, 5))
    assert mostly.common_form(image_size=17) == ImageForm(17, 17, 1)
    assert mostly.common_form() == ImageForm(7, 11, 1)
    # Shorter sides 3, 7, 7, 13 without a majority: their median is 7.
    scattered = census_of(blank(3, 19), blank(7, 11), blank(11, 7), blank(13, 17))
    assert scattered.common_form() == ImageForm(7, 7, 1)
    large = census_of(blank(301, 401), blank(401, 307))
    assert large.common_form() == ImageForm(224, 224, 1)


def test_grey_stays_one_channel_and_any_colour_makes_all_rgb(tmp_path):
    grey, colour = random_pixels(1, 5, 7), random_pixels(2, 5, 7, 3)
    assert census_of(encode(grey)).common_form() == ImageForm(5, 7, 1)
    form = census_of(encode(grey), encode(colour)).common_form()
    assert form == ImageForm(5, 7, 3)
    out = decoded(tmp_path, [encode(grey), encode(colour)], form)
    assert np.array_equal(out[0], np.repeat(grey[..., None], 3, axis=-1))
    assert np.array_equal(out[1], colour)


def test_lossless_images_come_back_bit_for_bit_in_order(tmp_path):
    pixels = random_pixels(3, 11, 5, 7, 3)
    out = decoded(tmp_path, [encode(image) for image in pixels], ImageForm(5, 7, 3))
    assert out.dtype == np.uint8
    assert np.array_equal(out, pixels)


def test_large_images_decode_in_threads_to_the_same_rows(tmp_path):
    pixels = random_pixels(4, 13, 61, 67, 3)
    images = [encode(image) for image in pixels]
    assert min(map(len, images)) > decode.BYTES_WORTH_A_THREAD
    assert np.array_equal(decoded(tmp_path, images, ImageForm(61, 67, 3), batch=7), pixels)


def test_other_sizes_fit_their_shorter_side_and_are_cropped_at_the_centre(tmp_path):
    # Three bands of 20 columns: the centre crop of 20x60 is the middle band alone.
    bands = np.repeat(np.array([10, 120, 250], np.uint8), 20)[None].repeat(20, axis=0)
    out = decoded(tmp_path, [encode(bands), encode(bands.T)], ImageForm(10, 10, 1))
    assert np.all(out[:, 1:-1, 1:-1] == 120)


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path):
    deep = (random_pixels(5, 5, 7).astype(np.uint16) << 8) + 3
    form = census_of(encode(deep)).common_form()
    assert form.channels == 1
    assert np.array_equal(decoded(tmp_path, [encode(deep)], form)[0, ..., 0], deep >> 8)


def test_camera_orientation_is_applied_to_size_and_pixels(tmp_path):
    pixels = random_pixels(6, 5, 7, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    turned = encode(pixels, exif=exif)
    form = census_of(turned).common_form()
    assert form == ImageForm(7, 5, 3)
    assert np.array_equal(decoded(tmp_path, [turned], form)[0], np.rot90(pixels, -1))


@pytest.mark.parametrize("broken", [b"", b"no image", encode(random_pixels(7, 31, 31, 3))[:-900]])
def test_broken_image_is_named_by_row_and_split(tmp_path, broken):
    images = [blank(31, 31)] * 4 + [broken]
    with pytest.raises(ConfigError, match="image 4 of the train split cannot be decoded"):
        census_of(*images)
        decoded(tmp_path, images, ImageForm(31, 31, 1))


def test_grey_of_unknown_range_is_an_error(tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.zeros((3, 5), np.float32)).save(file, "TIFF")
    with pytest.raises(ConfigError, match="image 0 of the train split.*mode F"):
        census_of(file.getvalue())


def test_broken_image_is_named_by_its_row_in_the_set_also_in_threads(tmp_path):
    images = [encode(image) for image in random_pixels(8, 17, 61, 67, 3)]
    images[15] = images[15][:5003]
    with pytest.raises(ConfigError, match="image 15 of the train split"):
        decoded(tmp_path, images, ImageForm(61, 67, 3), batch=7)
