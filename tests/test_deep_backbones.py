"""ResNet-12 and WRN-28-10 against the literature, and what every backbone promises."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memories import remember
from tiny import variant
from vsm.encoders import BACKBONES, BuiltInBackbone, ResNet12, WideResNet
from vsm.encoders.networks import SmallMapConv2d, drop, drop_blocks, unfolded_convolution
from vsm.model import FewShotModel
from vsm.settings import (
    BACKBONE_NAMES,
    METHODS,
    Method,
    ModelSettings,
    RunSettings,
    SamplingSettings,
)

DEEP = ["resnet12", "wrn28_10"]
NARROW = 4  # a sixteenth of the published widths


def build(name: str, size: int = 32, keep_probability: float = 1.0) -> BuiltInBackbone:
    torch.manual_seed(0)
    return BACKBONES[name]((3, size, size), NARROW, keep_probability)


def published(name: str, size: int) -> BuiltInBackbone:
    """The full network with shapes but no numbers."""
    with torch.device("meta"):
        return BACKBONES[name]((3, size, size))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(size: int = 32, num_images: int = 3) -> Tensor:
    return torch.randn(num_images, 3, size, size, generator=seeded(5))


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_settings_offer_exactly_the_backbones_there_are() -> None:
    assert tuple(BACKBONES) == BACKBONE_NAMES


# The literature's figures.


def test_resnet12_has_the_parameters_of_the_literature() -> None:
    expected = 0
    for before, width in pairwise((3, 64, 160, 320, 640)):
        expected += 9 * before * width + 2 * 9 * width**2  # three 3×3 convolutions without bias
        expected += before * width  # the shortcut
        expected += 4 * 2 * width  # four batch norms
    assert num_parameters(published("resnet12", 84)) == expected == 12_424_320  # "12.4 M"


def test_wrn_28_10_has_the_parameters_of_its_authors() -> None:
    expected, before = 9 * 3 * 16, 16
    for width in (160, 320, 640):
        expected += 9 * before * width + 7 * 9 * width**2  # four blocks of two convolutions
        expected += 2 * before + 7 * 2 * width  # a batch norm before each
        expected += before * width  # the shortcut of the first block
        before = width
    expected += 2 * 640  # the last batch norm
    parameters = num_parameters(published("wrn28_10", 32))
    assert parameters == expected == 36_472_784
    assert parameters + 640 * 10 + 10 == 36_479_194  # with CIFAR-10's classifier: "36.5 M"
    assert parameters + 640 * 100 + 100 == 36_536_884  # with CIFAR-100's


@pytest.mark.parametrize(
    ("name", "size", "sizes"),
    [
        ("resnet12", 32, [16, 8, 4, 2]),
        ("resnet12", 84, [42, 21, 10, 5]),
        ("wrn28_10", 32, [32] * 4 + [16] * 4 + [8] * 4),
        ("wrn28_10", 84, [84] * 4 + [42] * 4 + [21] * 4),
    ],
)
def test_the_published_widths_give_640_features_through_maps_of_the_right_size(
    name: str, size: int, sizes: list[int]
) -> None:
    backbone, seen = published(name, size), []
    for block in backbone.blocks:
        block.register_forward_hook(lambda *call: seen.append(call[-1].shape[-1]))
    features = backbone(torch.empty(2, 3, size, size, device="meta"))
    assert features.shape == (2, backbone.num_features) == (2, 640)
    assert seen == sizes


def test_wrn_28_10_is_28_layers_deep() -> None:
    kernels = [m.kernel_size for m in build("wrn28_10").modules() if isinstance(m, nn.Conv2d)]
    assert kernels.count((3, 3)) == 6 * 4 + 1  # two in each block, and the stem
    assert kernels.count((1, 1)) == 3  # the authors count the shortcuts
    assert len(kernels) == 28


def test_resnet12_computes_what_its_authors_write() -> None:
    backbone = build("resnet12").eval()
    blocks: Any = backbone.blocks
    hidden = images()
    for block in blocks:
        shortcut = block.shortcut(hidden)
        for index, convolution in enumerate(block.convolutions):
            hidden = convolution(hidden)
            hidden = F.leaky_relu(hidden, 0.1) if index < 2 else hidden
        hidden = F.max_pool2d(F.leaky_relu(hidden + shortcut, 0.1), 2)
    expected = F.adaptive_avg_pool2d(hidden, 1).flatten(1)
    torch.testing.assert_close(backbone(images()), expected)


def test_wrn_28_10_computes_what_its_authors_write() -> None:
    backbone = build("wrn28_10").eval()
    assert isinstance(backbone, WideResNet)
    blocks: Any = backbone.blocks
    hidden = backbone.stem(images())
    for index, block in enumerate(blocks):
        active = block.first_norm(hidden).relu()
        residual = block.second(block.second_norm(block.first(active)).relu())
        if index % 4 == 0:
            hidden = F.conv2d(active, block.shortcut.weight, stride=2 if index else 1)
        hidden = residual + hidden
    expected = F.adaptive_avg_pool2d(backbone.norm(hidden).relu(), 1).flatten(1)
    torch.testing.assert_close(backbone(images()), expected)
    assert expected.min() >= 0


# What every backbone promises.


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 32, 32), (3, 84, 84)])
@pytest.mark.parametrize("channels", [1, NARROW])
def test_narrow_versions_embed_every_size(
    name: str, image_shape: tuple[int, int, int], channels: int
) -> None:
    backbone = BACKBONES[name](image_shape, channels)
    features = backbone(torch.rand(2, *image_shape))
    assert features.shape == (2, backbone.num_features)
    assert features.isfinite().all()


@pytest.mark.parametrize("name", DEEP)
def test_channels_scale_all_widths(name: str) -> None:
    whole, eighth = published(name, 32), BACKBONES[name]((3, 32, 32), 8)
    assert eighth.num_features == 640 // 8
    for (key, large), small in zip(whole.named_parameters(), eighth.parameters(), strict=True):
        assert large.shape[0] == 8 * small.shape[0], key


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("keep_probability", [1.0, 0.6])
def test_features_do_not_depend_on_the_memory_layout(name: str, keep_probability: float) -> None:
    backbone = build(name, keep_probability=keep_probability)
    layouts = (torch.contiguous_format, torch.channels_last)
    one, two = (backbone(images().contiguous(memory_format=m), seeded(0)) for m in layouts)
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 32, 32)])
def test_every_convolution_gets_and_has_the_channels_last_layout(
    name: str, image_shape: tuple[int, int, int]
) -> None:
    backbone = BACKBONES[name](image_shape, NARROW, 0.6)
    layouts = []
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            layouts.append(module.weight.is_contiguous(memory_format=torch.channels_last))
            module.register_forward_pre_hook(
                lambda _, inputs: layouts.append(
                    inputs[0].is_contiguous(memory_format=torch.channels_last)
                )
            )
    backbone(torch.rand(2, *image_shape), seeded(0))
    assert all(layouts)


@pytest.mark.parametrize("name", BACKBONES)
def test_what_is_dropped_comes_from_the_generator_alone(name: str) -> None:
    backbone = build(name, keep_probability=0.6)
    before = torch.get_rng_state()
    one, two, three = (backbone(images(), seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="random: dropout needs a generator"):
        backbone(images())


@pytest.mark.parametrize("name", BACKBONES)
def test_nothing_is_dropped_in_evaluation_or_with_keep_probability_one(name: str) -> None:
    dropping, keeping = build(name, keep_probability=0.6).eval(), build(name)
    random = seeded(0)
    state = random.get_state()
    keeping(images(), random)
    keeping.load_state_dict(dropping.state_dict())
    assert torch.equal(dropping(images(), random), keeping.eval()(images()))
    assert torch.equal(state, random.get_state())


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    backbone = build(name, keep_probability=0.9)
    backbone(images(), seeded(0)).square().sum().backward()
    for key, parameter in backbone.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


def test_images_too_small_for_a_network_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_shape: resnet12 needs 16 pixels or more"):
        ResNet12((3, 15, 32), NARROW)
    with pytest.raises(ValueError, match="image_shape: expected positive sizes"):
        WideResNet((3, 0, 32), NARROW)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DEEP)
def test_the_width_of_the_features_flows_through_every_method(name: str, method: Method) -> None:
    settings = variant(
        RunSettings(),
        method=method,
        model=ModelSettings(backbone=name, channels=2, hidden_units=8),
        sampling=SamplingSettings(train_prototypes=2, evaluation_prototypes=2),
    )
    model = FewShotModel(settings, (1, 28, 28))
    assert model.num_features == 20
    features = model.embed(torch.rand(2 * 3 * 4, 1, 28, 28), seeded(0)).unflatten(0, (2, 3, 4))
    memory = remember(model.consolidation, torch.rand(5, 20))
    prediction = model(features[:, :, :1], features[:, :, 1:], memory, seeded(1))
    assert prediction.log_probabilities.shape[:3] == (2, 9, 3)
    assert prediction.posterior.prototypes.shape[-1] == 20
    assert prediction.log_probabilities.isfinite().all()


# DropBlock.


def test_blocks_are_dropped_as_whole_squares() -> None:
    maps = drop_blocks(torch.ones(40, 3, 10, 11), 0.8, 4, seeded(0)).flatten(0, 1)
    for kept in maps:
        covered = torch.zeros(10, 11, dtype=torch.bool)
        for row in range(10 - 4 + 1):
            for column in range(11 - 4 + 1):
                square = (slice(row, row + 4), slice(column, column + 4))
                if not kept[square].any():
                    covered[square] = True
        assert torch.equal(kept == 0, covered)
    assert (maps == 0).any()


@pytest.mark.parametrize(("size", "side"), [(10, 5), (5, 5), (4, 2), (2, 2), (2, 5), (1, 2)])
def test_dropping_blocks_keeps_the_mean_and_about_the_share_asked_for(size: int, side: int) -> None:
    maps = drop_blocks(torch.ones(500, 40, size, size), 0.9, side, seeded(0))
    assert maps.mean().item() == pytest.approx(1.0, abs=0.01)
    kept = (maps > 0).float().mean().item()
    assert 0.89 < kept < 0.93  # squares overlap, so that a little more is kept


def test_a_map_no_larger_than_a_block_is_dropped_as_a_whole() -> None:
    maps = drop_blocks(torch.ones(50, 4, 3, 3), 0.75, 5, seeded(0)).flatten(2)
    assert torch.equal(maps.amin(-1), maps.amax(-1))
    torch.testing.assert_close(maps.unique(), torch.tensor([0.0, 1 / 0.75]))


def test_what_survives_is_scaled_the_same_whatever_was_dropped() -> None:
    patterns = [drop_blocks(torch.ones(2, 3, 10, 10), 0.9, 5, seeded(seed)) for seed in range(8)]
    assert len({pattern.count_nonzero().item() for pattern in patterns}) > 1
    assert len({pattern.max().item() for pattern in patterns}) == 1


def test_dropping_keeps_the_memory_layout() -> None:
    hidden = images(10).contiguous(memory_format=torch.channels_last)
    for dropped in (drop(hidden, 0.5, seeded(0)), drop_blocks(hidden, 0.5, 5, seeded(0))):
        assert dropped.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("size", "side"), [(84, 5), (32, 2), (28, 2)])
def test_blocks_have_the_side_of_the_literature(size: int, side: int) -> None:
    backbone = build("resnet12", size)
    assert isinstance(backbone, ResNet12)
    assert backbone.block_size == side


# Small maps


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 1)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_unfolded_patches_learn_as_a_convolution_does(
    size: tuple[int, int], memory_format: torch.memory_format
) -> None:
    hidden = torch.randn(2, 3, *size, generator=seeded(1), dtype=torch.float64)
    weight = torch.randn(5, 3, 3, 3, generator=seeded(2), dtype=torch.float64)
    hidden, weight = given = [
        one.contiguous(memory_format=memory_format).requires_grad_() for one in (hidden, weight)
    ]
    made, expected = unfolded_convolution(hidden, weight), F.conv2d(hidden, weight, padding=1)
    torch.testing.assert_close(made, expected)
    towards = torch.randn(made.shape, generator=seeded(3), dtype=torch.float64)
    found = torch.autograd.grad(made, given, towards)
    for one, other in zip(found, torch.autograd.grad(expected, given, towards), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(unfolded_convolution, given)


def test_patches_are_unfolded_for_small_maps_in_bfloat16_and_for_nothing_else() -> None:
    convolution = SmallMapConv2d(3, 5)
    small, large = (torch.randn(2, 3, 4, width, generator=seeded(3)) for width in (4, 5))
    unfolded = "_UnfoldedConvolutionBackward"
    assert unfolded not in str(convolution(small).grad_fn)
    with torch.autocast("cpu", torch.bfloat16):
        assert unfolded not in str(convolution(large).grad_fn)
        made = convolution(small)
        assert convolution(small[:0]).shape == (0, 5, 4, 4)
        with torch.inference_mode():
            torch.testing.assert_close(convolution(small), made)
    assert unfolded in str(made.grad_fn)
    assert made.dtype == torch.bfloat16
    made.float().sum().backward()
    assert convolution.weight.grad is not None
    assert convolution.weight.grad.dtype == torch.float32
    exact = F.conv2d(small, convolution.weight, padding=1)
    torch.testing.assert_close(made.float(), exact, rtol=0.02, atol=0.02)
