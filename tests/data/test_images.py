import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2 import functional as reference

from fedfrozen_app.data import images as module
from fedfrozen_app.data.images import ImageExamples, Preprocessor, shift_and_flip
from tests.data.pictures import random_pixels

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def pixels(*shape: int) -> torch.Tensor:
    return torch.from_numpy(random_pixels(1, *shape))


def preprocessor(image_size=17, mean=MEAN, std=STD, channels=3, augment="none"):
    return Preprocessor(image_size, mean, std, channels, augment, "cpu")


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- evaluation -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("native", "size"),
    [((13, 13), 13), ((13, 13), 29), ((31, 31), 17), ((19, 31), 17), ((43, 29), 31)],
)
def test_evaluation_equals_torchvision_resize_crop_and_normalize(native, size):
    batch = pixels(5, *native, 3)
    x = batch.permute(0, 3, 1, 2).float() / 255
    x = reference.resize(x, [size], antialias=True)
    x = reference.center_crop(x, [size])
    expected = reference.normalize(x, list(MEAN), list(STD))
    ours = preprocessor(size)(batch)
    assert ours.shape == (5, 3, size, size) and ours.dtype == torch.float32
    assert torch.allclose(ours, expected, atol=1e-5)


def test_grey_is_repeated_to_three_channels_and_normalised_per_channel():
    batch = pixels(5, 13, 13, 1)
    x = preprocessor(13)(batch)
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        expected = (batch[..., 0].float() / 255 - mean) / std
        assert torch.allclose(x[:, channel], expected, atol=1e-6)


def test_rgb_becomes_grey_as_pillow_does():
    batch = pixels(5, 13, 13, 3)
    x = preprocessor(13, mean=[0.0], std=[1.0], channels=1)(batch)
    assert x.shape == (5, 1, 13, 13)
    expected = np.stack(
        [np.asarray(Image.fromarray(image.numpy()).convert("L")) for image in batch]
    )
    assert np.abs(x[:, 0].numpy() * 255 - expected).max() < 1


def test_without_a_generator_augmentation_is_off():
    batch = pixels(7, 16, 16, 3)
    plain = preprocessor(16)(batch)
    assert torch.equal(preprocessor(16, augment="crop-flip")(batch), plain)
    assert torch.equal(preprocessor(16)(batch, generator()), plain)
    assert not torch.equal(preprocessor(16, augment="crop-flip")(batch, generator()), plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 2}, "channels must be 1 or 3, got 2"),
        ({"channels": 1}, "mean and std need 1 values each, got 3 and 3"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be > 0"),
        ({"augment": "mixup"}, "augment must be none, crop or crop-flip, got 'mixup'"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        preprocessor(**settings)


# --- augmentation -----------------------------------------------------------------------
def test_crop_equals_replicate_padding_and_a_crop_for_each_image():
    batch = pixels(101, 17, 32, 3)
    moved = shift_and_flip(batch, generator(), flip=False)
    draws = generator()
    down = torch.randint(-2, 3, (101, 1), generator=draws)[:, 0]  # 17 // 8 = 2
    right = torch.randint(-4, 5, (101, 1), generator=draws)[:, 0]  # 32 // 8 = 4
    padded = F.pad(batch.permute(0, 3, 1, 2).float(), (4, 4, 2, 2), mode="replicate")
    for i in range(101):
        top, left = 2 + int(down[i]), 4 + int(right[i])
        expected = padded[i, :, top : top + 17, left : left + 32]
        assert torch.equal(moved[i].permute(2, 0, 1).float(), expected)
    assert set(down.tolist()) == set(range(-2, 3)) and set(right.tolist()) == set(range(-4, 5))


def test_flip_mirrors_about_half_of_the_images_on_top_of_the_crop():
    batch = pixels(1009, 3, 8, 1)
    moved = shift_and_flip(batch, generator(), flip=False)
    both = shift_and_flip(batch, generator(), flip=True)
    mirrored = (both == moved.flip(2)).flatten(1).all(1)
    same = (both == moved).flatten(1).all(1)
    assert torch.all(mirrored | same)
    assert 450 < int(mirrored.sum()) < 560


def test_augmentation_follows_its_generator_alone():
    batch = pixels(7, 16, 16, 3)
    augment = preprocessor(16, augment="crop-flip")
    state = torch.get_rng_state()
    first = augment(batch, generator())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(augment(batch, generator()), first)
    assert not torch.equal(augment(batch, generator(2)), first)


def test_tiny_images_are_not_moved_but_can_be_mirrored():
    batch = pixels(11, 7, 7, 1)
    assert torch.equal(shift_and_flip(batch, generator(), flip=False), batch)
    assert not torch.equal(shift_and_flip(batch, generator(), flip=True), batch)


# --- examples ---------------------------------------------------------------------------
INDICES = np.array([3, 5, 11, 17, 90])


def examples(augment="crop-flip"):
    images, labels = pixels(97, 16, 16, 3), torch.arange(97)
    return images, ImageExamples(images, labels, INDICES, preprocessor(16, augment=augment))


@pytest.mark.parametrize("resident_bytes", [0, module.RESIDENT_BYTES])
def test_batch_holds_the_rows_at_the_given_positions(monkeypatch, resident_bytes):
    monkeypatch.setattr(module, "RESIDENT_BYTES", resident_bytes)
    images, some = examples()
    assert len(some) == 5
    x, y = some.batch(torch.tensor([4, 0, 0]))
    assert y.tolist() == [90, 3, 3]
    assert torch.equal(x, preprocessor(16)(images[[90, 3, 3]]))
    x, _ = some.batch(torch.tensor([4, 0, 0]), generator())
    expected = preprocessor(16, augment="crop-flip")(images[[90, 3, 3]], generator())
    assert torch.equal(x, expected)


def test_small_sets_are_resident_and_large_ones_stay_in_the_split(monkeypatch):
    images, some = examples()
    assert some._images.shape[0] == 5
    size = 5 * 16 * 16 * 3
    monkeypatch.setattr(module, "RESIDENT_BYTES", size)
    assert examples()[1]._images.shape[0] == 5
    monkeypatch.setattr(module, "RESIDENT_BYTES", size - 1)
    images, some = examples()
    assert some._images.data_ptr() == images.data_ptr()


def test_a_client_without_examples_has_length_zero():
    none = ImageExamples(
        pixels(3, 8, 8, 1), torch.arange(3), np.array([], dtype=np.int64), preprocessor()
    )
    assert len(none) == 0
