"""The paper's table of shallow architectures."""

import pytest
import torch
from torch.nn import functional as F

from vsm.encoders import Conv4
from vsm.encoders.networks import drop


@pytest.mark.parametrize(
    ("image_shape", "num_blocks"), [((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 84, 84), 5)]
)
def test_every_input_size_of_the_paper_gives_256_features(
    image_shape: tuple[int, int, int], num_blocks: int
) -> None:
    backbone = Conv4(image_shape)
    assert len(backbone.blocks) == num_blocks
    assert backbone.num_features == 256
    assert backbone(torch.rand(2, *image_shape)).shape == (2, 256)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    first = image_shape[0] * 9 * 64 + 64 + 128
    assert parameters == first + (num_blocks - 1) * (64 * 9 * 64 + 64 + 128)


@pytest.mark.parametrize(
    ("image_shape", "sizes"),
    [((1, 28, 28), [14, 7, 4, 2]), ((3, 32, 32), [16, 8, 4, 2]), ((3, 84, 84), [42, 21, 10, 5, 2])],
)
def test_feature_maps_shrink_as_in_the_paper(
    image_shape: tuple[int, int, int], sizes: list[int]
) -> None:
    backbone = Conv4(image_shape, channels=4)
    hidden = torch.rand(1, *image_shape)
    for block, size in zip(backbone.blocks, sizes, strict=True):
        hidden = F.max_pool2d(block(hidden), 2, ceil_mode=backbone.pool_rounds_up)
        assert hidden.shape[-2:] == (size, size)


def test_pooling_before_rectifying_gives_the_papers_order() -> None:
    backbone = Conv4((1, 28, 28), channels=4).eval()
    images = torch.randn(3, 1, 28, 28)
    hidden = images
    for block in backbone.blocks:
        hidden = F.max_pool2d(F.relu(block(hidden)), 2, ceil_mode=True)
    torch.testing.assert_close(backbone(images), hidden.flatten(1))


def test_features_do_not_depend_on_the_memory_layout() -> None:
    backbone = Conv4((3, 32, 32), channels=4).eval()
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(
        backbone(images), backbone(images.contiguous(memory_format=torch.channels_last))
    )


def test_dropout_keeps_the_mean_and_comes_from_its_generator() -> None:
    backbone = Conv4((1, 28, 28), channels=4, keep_probability=0.5)
    hidden = torch.ones(200, 4, 14, 14)
    dropped = drop(hidden, 0.5, torch.Generator().manual_seed(0))
    assert dropped.unique().tolist() == [0.0, 2.0]
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    images = torch.rand(2, 1, 28, 28)
    one, two = (backbone(images, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match="random: dropout needs a generator"):
        backbone(images)


@pytest.mark.parametrize("keep_probability", [0.5, 0.9])
def test_dropping_before_rectifying_gives_the_papers_order(keep_probability: float) -> None:
    backbone = Conv4((3, 32, 32), channels=4, keep_probability=keep_probability)
    images = torch.randn(3, 3, 32, 32)
    random = torch.Generator().manual_seed(1)
    hidden = images
    for block in backbone.blocks:
        active = F.relu(block(hidden)).contiguous(memory_format=torch.channels_last)
        hidden = F.max_pool2d(drop(active, keep_probability, random), 2)
    made = backbone(images, torch.Generator().manual_seed(1))
    torch.testing.assert_close(made, hidden.flatten(1))


def test_nothing_is_dropped_in_evaluation() -> None:
    backbone = Conv4((1, 28, 28), channels=4, keep_probability=0.5).eval()
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(backbone(images), backbone(images))


def test_images_too_small_for_four_poolings_still_work_or_are_refused() -> None:
    assert Conv4((1, 5, 5), channels=4).num_features == 4
    with pytest.raises(ValueError, match="image_shape"):
        Conv4((1, 0, 0), channels=4)
