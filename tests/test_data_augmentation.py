"""Augmentation does to a batch what a plain loop would do to each image."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from vsm.data import ImageDataset, PixelNormalization
from vsm.data.dataset import LUMA, NO_AUGMENTATION, Augmentation, natural

CROP_AND_FLIP = Augmentation(crop_padding=3, flip_probability=0.5)
COLORS = Augmentation(brightness=0.4, contrast=0.4, saturation=0.4)
AFFINE = Augmentation(affine=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int, side: int = 9) -> Tensor:
    """Random uint8 ``[count, 3, side, side]``, channels-last in memory as images are loaded."""
    return (
        torch.randint(256, (count, side, side, 3), generator=seeded(1)).byte().permute(0, 3, 1, 2)
    )


def windows(image: Tensor, padding: int) -> dict[bytes, tuple[int, int, bool]]:
    """Every crop of one padded image and of its mirror image, by a plain loop."""
    channels, height, width = image.shape
    found = {}
    for mirrored in (False, True):
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding).byte()
        padded[:, padding:-padding, padding:-padding] = image.flip(2) if mirrored else image
        for top in range(2 * padding + 1):
            for left in range(2 * padding + 1):
                window = padded[:, top : top + height, left : left + width]
                found[window.numpy().tobytes()] = (top, left, mirrored)
    return found


def test_every_image_becomes_one_of_its_own_windows() -> None:
    pixels = batch(200)
    varied = CROP_AND_FLIP(pixels, seeded())
    chosen = [
        windows(image, 3)[result.contiguous().numpy().tobytes()]
        for image, result in zip(pixels, varied, strict=True)
    ]
    tops, lefts, mirrored = (np.array(values) for values in zip(*chosen, strict=True))
    assert set(tops) == set(lefts) == set(range(7))
    assert np.abs(np.corrcoef([tops, lefts, mirrored])[np.triu_indices(3, 1)]).max() < 0.25
    assert 0.35 < mirrored.mean() < 0.65


def test_colors_change_by_the_stated_formula() -> None:
    pixels = batch(50).float().contiguous(memory_format=torch.channels_last)
    changed = COLORS(pixels, seeded())
    factors = 1 + 0.4 * (2 * torch.rand(50, 3, generator=seeded()) - 1)
    luma = torch.tensor(LUMA).view(3, 1, 1)
    for image, result, (b, c, s) in zip(pixels, changed, factors, strict=True):
        gray = (image * luma).sum(0, keepdim=True)
        saturated = s * image + (1 - s) * gray
        contrasted = c * saturated + (1 - c) * gray.mean()
        torch.testing.assert_close(result, (b * contrasted).clamp(0, 255))


def test_whole_numbers_are_rounded() -> None:
    pixels = batch(50)
    exact = COLORS(pixels.float(), seeded())
    assert (COLORS(pixels, seeded()).float() - exact).abs().max() <= 0.5 + 1e-3


def test_affine_maps_are_those_of_a_plain_loop() -> None:
    pixels = batch(7).float().contiguous(memory_format=torch.channels_last)
    mapped = AFFINE(pixels, seeded())
    numbers = 0.3 * (2 * torch.rand(7, 6, generator=seeded()).double() - 1)
    assert numbers.abs().max() > 0.25
    side = pixels.shape[-1]
    centers = [(2 * n + 1) / side - 1 for n in range(side)]  # of pixels, where the image is [-1, 1]
    for image, result, (a, b, c, d, right, down) in zip(pixels, mapped, numbers, strict=True):
        for row, column in product(range(side), repeat=2):
            x, y = centers[column], centers[row]
            from_x, from_y = (1 + a) * x + c * y + right, b * x + (1 + d) * y + down
            expected = between_pixels(
                image, ((from_x + 1) * side - 1) / 2, ((from_y + 1) * side - 1) / 2
            )
            torch.testing.assert_close(result[:, row, column].double(), expected, atol=1e-2, rtol=0)


def between_pixels(image: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """Interpolate ``[C, H, W]`` at a place between pixels, all of them 0 outside: ``[C]``."""
    found = torch.zeros(len(image), dtype=torch.float64)
    for r, c in product(range(image.shape[1]), range(image.shape[2])):
        share = (1 - (row - r).abs()).clamp_min(0) * (1 - (column - c).abs()).clamp_min(0)
        found += share * image[:, r, c].double()
    return found


def test_affine_maps_of_whole_numbers_are_rounded() -> None:
    exact = AFFINE(batch(50).float(), seeded())
    assert (AFFINE(batch(50), seeded()).float() - exact).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("preset", [natural(4), CROP_AND_FLIP, COLORS, AFFINE, NO_AUGMENTATION])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_shape_dtype_and_layout_are_kept(preset: Augmentation, dtype: torch.dtype) -> None:
    pixels = batch(6).to(dtype)
    varied = preset(pixels, seeded())
    assert varied.shape == pixels.shape
    assert varied.dtype == dtype
    assert varied.is_contiguous(memory_format=torch.channels_last)


def test_the_generator_alone_decides() -> None:
    pixels = batch(20)
    torch.manual_seed(5)
    first = natural(4)(pixels, seeded(3))
    torch.manual_seed(6)
    assert torch.equal(first, natural(4)(pixels, seeded(3)))
    assert not torch.equal(first, natural(4)(pixels, seeded(4)))


def test_the_input_is_not_changed() -> None:
    pixels = batch(4)
    kept = pixels.clone()
    natural(4)(pixels, seeded())
    assert torch.equal(pixels, kept)


def test_gray_images_can_be_varied_too() -> None:
    pixels = batch(4)[:, :1].contiguous(memory_format=torch.channels_last)
    assert natural(2)(pixels, seeded()).shape == pixels.shape


def make_dataset(augmentation: Augmentation) -> ImageDataset:
    images = np.random.default_rng(0).integers(0, 256, (12, 9, 9, 3), dtype=np.uint8)
    return ImageDataset(
        name="drawn",
        images=images,
        class_names=("a", "b"),
        class_starts=np.array([0, 6, 12]),
        splits={"train": np.array([0, 1])},
        normalization=PixelNormalization((0.5, 0.4, 0.3), (0.25, 0.2, 0.1)),
        augmentation=augmentation,
    )


def test_a_dataset_augments_batches_of_any_leading_shape() -> None:
    dataset = make_dataset(natural(1))
    pixels = dataset.load(torch.arange(12).view(2, 3, 2))
    varied = dataset.augment(pixels, seeded())
    assert varied.shape == (2, 3, 2, 3, 9, 9)
    flat = dataset.augment(dataset.load(torch.arange(12)), seeded())
    assert torch.equal(varied.flatten(0, 2), flat)


def test_without_colors_only_crop_and_flip_are_left() -> None:
    dataset = make_dataset(natural(1))
    pixels = dataset.load(torch.arange(12))
    moved = dataset.augment(pixels, seeded(), colors=False)
    assert torch.equal(moved, Augmentation(1, 0.5)(pixels, seeded()))
    assert not torch.equal(moved, pixels)
    assert not torch.equal(moved, dataset.augment(pixels, seeded()))


def test_affine_maps_come_before_what_the_preset_does() -> None:
    dataset = make_dataset(natural(1))
    pixels, random = dataset.load(torch.arange(12)), seeded()
    mapped = Augmentation(affine=0.2)(pixels, random)
    expected = Augmentation(1, 0.5)(mapped, random)
    made = dataset.augment(pixels, seeded(), colors=False, affine=0.2)
    assert torch.equal(made, expected)
    assert not torch.equal(mapped, pixels)


def test_a_dataset_without_a_preset_is_left_alone() -> None:
    dataset = make_dataset(NO_AUGMENTATION)
    pixels = dataset.load(torch.arange(12))
    assert torch.equal(dataset.augment(pixels, seeded()), pixels)


def test_normalization_follows_its_definition_in_any_layout() -> None:
    dataset = make_dataset(NO_AUGMENTATION)
    pixels = dataset.load(torch.arange(12))
    mean = torch.tensor(dataset.normalization.mean).view(3, 1, 1)
    deviation = torch.tensor(dataset.normalization.std).view(3, 1, 1)
    expected = (pixels.float() / 255 - mean) / deviation
    torch.testing.assert_close(dataset.normalize(pixels), expected)
    torch.testing.assert_close(dataset.normalize(pixels.contiguous()), expected)
    assert dataset.normalize(pixels).is_contiguous(memory_format=torch.channels_last)
