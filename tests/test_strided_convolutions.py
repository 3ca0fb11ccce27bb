"""No strided 1×1 convolution reaches torch: its gradient corrupts memory (docs/design/speed.md)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from vsm.encoders import BACKBONES, CustomBackbone, WideResNet
from vsm.encoders.networks import SubsampledConv2d, subsample_strided_1x1
from vsm.runs.configuration import PRESETS, preset_paths, read_settings
from vsm.runs.directory import shipped_folder, shipped_names
from vsm.settings import RunSettings
from vsm_lab.paper.tables import BUDGETS

WIDTHS = (1, 2, 4, 7, 8, 16, 24, 32, 48, 64)


class StridedPointwise(TorchDispatchMode):
    """Records the strided 1×1 convolutions that torch is asked for, forwards and backwards.

    Whatever the width and layout: fewer than 16 channels, channels-last, are the ones that corrupt
    memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.convolutions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = {
            torch.ops.aten.convolution.default: slice(1, 4, 2),  # weight and stride
            torch.ops.aten.convolution_backward.default: slice(2, 5, 2),
        }.get(func)
        if arguments is not None:
            weight, stride = args[arguments]
            self.convolutions += 1
            if max(weight.shape[2:]) == 1 < max(stride):
                self.found.append(f"{func} of weights {list(weight.shape)}, stride {stride}")
        return func(*args, **(kwargs or {}))


def strided_pointwise(network: nn.Module, images: Tensor) -> list[str]:
    """Run a network forwards and backwards in training mode; what was recorded."""
    images = images.contiguous(memory_format=torch.channels_last)
    watch = StridedPointwise()
    with watch:
        network.train()(images.requires_grad_()).square().sum().backward()
    assert watch.convolutions > 1
    return watch.found


def widths_in_use() -> Iterator[int]:
    for budget in BUDGETS.values():
        yield from budget.channels.values()
    for preset in PRESETS.glob("*.yaml"):
        yield read_settings(RunSettings, *preset_paths(preset.stem)).model.channels
    for name in shipped_names():
        yield read_settings(RunSettings, shipped_folder(name) / "config.yaml").model.channels


def test_every_width_in_use_is_walked() -> None:
    assert set(widths_in_use()) <= set(WIDTHS)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(
    ("channels", "shape"),
    [*((channels, (3, 32, 32)) for channels in WIDTHS), (8, (1, 28, 28)), (8, (3, 84, 84))],
)
def test_no_built_in_backbone_asks_for_a_strided_1x1_convolution(
    name: str, channels: int, shape: tuple[int, int, int]
) -> None:
    with torch.device("meta"):  # shapes and calls without numbers
        assert not strided_pointwise(BACKBONES[name](shape, channels), torch.rand(2, *shape))


@pytest.mark.parametrize("channels", WIDTHS)
def test_a_strided_shortcut_would_be_found_at_every_width(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubsampledConv2d, "_conv_forward", nn.Conv2d._conv_forward)
    with torch.device("meta"):
        found = strided_pointwise(WideResNet((3, 32, 32), channels), torch.rand(2, 3, 32, 32))
    assert len(found) == 4  # two shortcuts, forwards and backwards


def test_a_strided_call_of_the_function_would_be_found() -> None:
    class Functional(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return F.conv2d(images, images.new_ones(20, 3, 1, 1), stride=(1, 2))

    with torch.device("meta"):
        assert len(strided_pointwise(Functional(), torch.rand(2, 3, 8, 8))) == 2


# A network of the user's own.


class Scaled(nn.Conv2d):
    """A layer of the user's own that torch's class computes."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnNetwork(nn.Module):
    """Many kinds of strided 1×1 convolutions, one of them used twice, in channels-last layout."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.plain = nn.Conv2d(image_shape[0], 8, 1, stride=2)
        self.shared = [nn.Conv2d(8, 8, 1, stride=(1, 2), groups=2, bias=False)]
        self.layers = nn.Sequential(
            *self.shared,
            nn.LazyConv2d(8, 1, stride=(2, 1), padding=(0, 3)),
            weight_norm(nn.Conv2d(8, 4, 1, stride=2, padding=1, padding_mode="reflect")),
            Scaled(4, 6, 1, stride=2),
            nn.Conv2d(6, 6, 3, stride=2, padding=1),
        )
        self.plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.plain(images.contiguous(memory_format=torch.channels_last))
        return self.layers(self.shared[0](hidden)).mean((2, 3))  # type: ignore[no-any-return]


class Layout(nn.Module):
    """Features that tell the strides of the images that arrive."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__()

    def forward(self, images: Tensor) -> Tensor:
        return torch.tensor(images.stride(), dtype=torch.float32).expand(len(images), -1)


def own(network: type[nn.Module], image_shape: tuple[int, int, int]) -> CustomBackbone:
    torch.manual_seed(0)
    return CustomBackbone(f"{__name__}:{network.__name__}", image_shape)


@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 32, 32)])
def test_a_network_of_ones_own_asks_for_none(image_shape: tuple[int, int, int]) -> None:
    backbone = own(OwnNetwork, image_shape)
    images = torch.rand(2, *image_shape)
    with torch.no_grad(), StridedPointwise() as watch:
        untouched = OwnNetwork(image_shape)
        untouched(images)
        assert len(watch.found) == 6
        assert list(untouched.state_dict()) == list(backbone.network.state_dict())
        untouched.load_state_dict(backbone.network.state_dict())
        expected = untouched(images)
        watch.found.clear()
        torch.testing.assert_close(backbone(images), expected)
    assert not watch.found
    assert not strided_pointwise(backbone, images)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_reach_the_network_with_the_strides_of_the_default_layout(channels: int) -> None:
    images = torch.rand(2, channels, 8, 6).contiguous(memory_format=torch.channels_last)
    strides = own(Layout, (channels, 8, 6))(images)[0]
    assert strides.tolist() == [channels * 48, 48, 6, 1]


# The same function.


@pytest.mark.parametrize("in_channels", [1, 4, 10, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"stride": (3, 1), "bias": False},
        {"stride": 2, "padding": (0, 2), "dilation": 2},
        {"stride": 3, "padding": 1, "padding_mode": "circular"},
        {"stride": 2, "padding": "valid", "groups": True},
    ],
)
def test_values_and_gradients_are_those_of_torchs_strided_convolution(
    in_channels: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    groups = min(2, in_channels) if options.pop("groups", False) else 1
    strided = nn.Conv2d(in_channels, 6, 1, groups=groups, **options)  # NCHW, which is safe
    subsampled = SubsampledConv2d(in_channels, 6, 1, groups=groups, **options)
    subsampled.load_state_dict(strided.state_dict())
    subsampled.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(2, in_channels, 9, 8)
    layouts = (torch.contiguous_format, torch.channels_last)
    results = []
    for layer, layout in zip((strided, subsampled), layouts, strict=True):
        given = images.clone(memory_format=layout).requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        results.append([output, given.grad, *(weight.grad for weight in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_replacing_twice_or_where_nothing_is_strided_changes_nothing() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, stride=2), Scaled(4, 4, 1, 2))
    subsample_strided_1x1(network)
    kinds = [type(layer) for layer in network]
    assert kinds[:2] == [nn.Conv2d, nn.Conv2d]
    assert issubclass(kinds[2], Scaled)
    subsample_strided_1x1(network)
    assert [type(layer) for layer in network] == kinds
