"""Encoders that others publish: ``hf:NAME``, ``timm:NAME`` and ``onnx:FILE``.

Each is a network from images ``[B, C, H, W]`` to features ``[B, D]``, and says how it wants
images in its own configuration. Weights are read without running code of their publisher: no
pickles of Hugging Face, no remote code.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsm.data.preprocessing import Preprocessing
from vsm.encoders.custom import current_folder_on_path, load_factory
from vsm.errors import BackboneError

CONFIGURATION = "preprocessor_config.json"
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's numbers
FEATURE_OUTPUTS = ("features", "image_embeds", "pooler_output", "last_hidden_state")
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def load_pretrained(name: str) -> nn.Module:
    """Return the network of ``hf:NAME``, ``timm:NAME`` or ``onnx:FILE``, in evaluation mode."""
    kind, _, source = name.partition(":")
    load = {"hf": _hugging_face_network, "timm": _timm_network, "onnx": _onnx_network}[kind]
    with wrap_errors(name):
        return load(source).eval()


def pretrained_preprocessing(name: str, network: nn.Module | None = None) -> Preprocessing:
    """Return how an encoder wants images.

    ``network`` is what :func:`load_pretrained` returned, if it was called before.
    """
    kind, _, source = name.partition(":")
    with wrap_errors(name):
        if kind == "hf":
            found = _hugging_face_preprocessing(source)
        elif kind == "timm":
            found = _timm_preprocessing(network or _timm_network(source))
        else:
            found = _onnx_preprocessing(source, network or _onnx_network(source))
    return _checked(name, found)


def own_preprocessing(name: str) -> Preprocessing | None:
    """Return what the user's own ``module:attribute`` says of images in ``preprocessing``."""
    with current_folder_on_path():
        stated = getattr(load_factory(name), "preprocessing", None)
    if stated is None:
        return None
    fields = {"side", "channels", "ink", "mean", "std", "crop", "resampling"}
    if not isinstance(stated, Mapping) or "side" not in stated or not fields.issuperset(stated):
        raise BackboneError(
            f"encoder: {name}.preprocessing: expected a dictionary with side, and perhaps "
            f"{', '.join(sorted(fields - {'side'}))}, got {stated!r:.100}"
        )
    return _checked(name, stated)


def network_digest(network: nn.Module) -> bytes:
    """Return what tells one set of weights from another: their SHA-256."""
    if isinstance(network, OnnxNetwork):
        return network.digest
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.digest()


@contextmanager
def wrap_errors(name: str) -> Iterator[None]:
    """Turn whatever these libraries raise into one line that names the encoder."""
    try:
        yield
    except BackboneError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise BackboneError(f"encoder: {name}: {type(error).__name__}: {first}") from error


def _needs(kind: str, packages: str, error: Exception) -> BackboneError:
    extra = "export" if kind == "onnx" else "encoders"
    return BackboneError(
        f"encoder: {kind}: needs {packages} ({error}): "
        f'pip install "variational-semantic-memory[{extra}]"'
    )


def _checked(name: str, wanted: Mapping[str, Any]) -> Preprocessing:
    try:
        return Preprocessing.from_dict({"channels": 3, "ink": False, **PLAIN, **wanted})
    except (TypeError, ValueError) as error:
        raise BackboneError(
            f"encoder: {name} asks for images that cannot be made ({error}); see its configuration"
        ) from error


# Hugging Face


def _hugging_face_network(source: str) -> nn.Module:
    try:
        from transformers import AutoModel  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _needs("hf", "transformers", error) from error
    name, _, revision = source.partition("@")
    with _quiet_transformers():
        model, found = AutoModel.from_pretrained(
            name,
            revision=revision or "main",
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    missing = sorted(found["missing_keys"])
    without_pooler = [key for key in missing if not key.startswith("pooler.")]
    if without_pooler:
        raise BackboneError(
            f"encoder: hf:{source} lacks the weights {', '.join(without_pooler[:3])}; it holds "
            f"another network than its config.json says"
        )
    return HuggingFaceNetwork(model.float(), use_pooler=not missing)


class HuggingFaceNetwork(nn.Module):
    """The image features of a model of ``transformers``.

    Those are what the model calls image features (CLIP, SigLIP), else its pooled output, else its
    first token, or the mean over places of a convolutional network. A pooler whose weights were
    not published is left out.
    """

    def __init__(self, model: nn.Module, use_pooler: bool) -> None:
        super().__init__()
        self.model, self.use_pooler = model, use_pooler

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, D]``."""
        features = getattr(self.model, "get_image_features", self.model)
        found = features(pixel_values=images)
        if isinstance(found, Tensor):
            return found.flatten(1)
        pooled: Tensor | None = found.get("image_embeds")
        if pooled is None and self.use_pooler:
            pooled = found.get("pooler_output")
        if pooled is not None:
            return pooled.flatten(1)
        hidden: Tensor = found["last_hidden_state"]
        return hidden[:, 0] if hidden.ndim == 3 else hidden.flatten(2).mean(-1)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep bars and reports of ``transformers`` off the screen; what fails is raised."""
    from transformers.utils import logging  # noqa: PLC0415 - an extra

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _hugging_face_preprocessing(source: str) -> dict[str, Any]:
    name, _, revision = source.partition("@")
    try:
        from transformers.utils import cached_file  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _needs("hf", "transformers", error) from error
    found: dict[str, Any] = {}
    for file in (CONFIGURATION, "processor_config.json", "config.json"):
        path = cached_file(
            name,
            file,
            revision=revision or "main",
            _raise_exceptions_for_missing_entries=False,
        )
        found[file] = {} if path is None else _read_json(Path(path))
    processor = found[CONFIGURATION] or found["processor_config.json"].get("image_processor")
    if not processor:
        raise BackboneError(
            f"encoder: hf:{source} has no {CONFIGURATION}, which says how it wants images; add one"
        )
    config = found["config.json"]
    return parse_image_processor(processor, {**config, **config.get("vision_config", {})})


def _read_json(path: Path) -> dict[str, Any]:
    read = json.loads(path.read_bytes())
    if not isinstance(read, dict):
        raise BackboneError(f"encoder: {path} holds no object")
    return read


def parse_image_processor(
    processor: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Translate the configuration of an image processor of ``transformers``.

    Cutting comes first and scaling after, which is scaling and cutting but for rounding.

    Args:
        processor: what ``preprocessor_config.json`` holds.
        config: of the model, which may name the size of its images.
    """
    cropped = _side(processor.get("crop_size"), "crop_size")
    size = processor.get("size")
    shortest = isinstance(size, int) and bool(processor.get("do_center_crop"))
    edge = size if isinstance(size, int) else (size or {}).get("shortest_edge")
    wanted: dict[str, Any] = {}
    if processor.get("do_center_crop") and cropped is not None:
        scaled = edge if shortest or edge is not None else _side(size, "size")
        wanted = {"side": cropped, "crop": min(1.0, cropped / (scaled or cropped))}
    elif "crop_pct" in processor and edge is not None:  # ConvNeXT
        wanted = {"side": edge, "crop": float(processor["crop_pct"])}
    elif isinstance(size, Mapping) and edge is not None:  # not square: its middle is
        wanted = {"side": edge, "crop": 1.0}
    elif size is not None and processor.get("do_resize", True):
        wanted = {"side": _side(size, "size")}
    else:
        wanted = {"side": config.get("image_size")}
    resample = processor.get("resample")
    if isinstance(resample, int) and 0 <= resample < len(RESAMPLING):
        wanted["resampling"] = RESAMPLING[resample]
    # x·f for bytes x, then (x·f − mean) / std; here x / 255 comes first.
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    scale = 255 * factor
    mean, std = PLAIN["mean"], PLAIN["std"]
    if processor.get("do_normalize", True) and "image_mean" in processor:
        mean, std = processor["image_mean"], processor["image_std"]
    return {
        **wanted,
        "mean": tuple(float(value) / scale for value in mean),
        "std": tuple(float(value) / scale for value in std),
    }


def _side(size: Any, name: str) -> int | None:
    """Return height and width, which must be one number."""
    if size is None or isinstance(size, int):
        return size
    if size.get("height") is None or size.get("height") != size.get("width"):
        raise BackboneError(
            f"encoder: {name} is {dict(size)}, but only squares are supported; use another encoder"
        )
    return int(size["height"])


# timm


def _timm() -> Any:
    try:
        import timm  # noqa: PLC0415 - an extra
        import timm.data  # noqa: PLC0415
    except Exception as error:  # torchvision of another build raises RuntimeError
        first = str(error).partition("\n")[0]
        raise BackboneError(
            f"encoder: timm cannot be imported ({type(error).__name__}: {first}); it needs timm, "
            "and torchvision in the very build that belongs to your torch; or take an encoder of "
            "transformers, hf:NAME, which needs neither"
        ) from error
    return timm


def _timm_network(source: str) -> nn.Module:
    network: nn.Module = _timm().create_model(source, pretrained=True, num_classes=0)
    return network.float()


def _timm_preprocessing(network: nn.Module) -> dict[str, Any]:
    found = _timm().data.resolve_model_data_config(network)
    channels, height, width = found["input_size"]
    wanted = {
        "channels": channels,
        "side": _side({"height": height, "width": width}, "input_size"),
        "mean": tuple(found["mean"]),
        "std": tuple(found["std"]),
    }
    if found.get("interpolation") in RESAMPLING:
        wanted["resampling"] = found["interpolation"]
    if found.get("crop_mode", "center") != "squash":
        wanted["crop"] = float(found["crop_pct"])
    return wanted


# ONNX


class OnnxNetwork(nn.Module):
    """A graph that ONNX Runtime runs: one input of images, features out.

    Attributes:
        digest: SHA-256 of the file.
        input: name and shape of the input.
        metadata: what the file says of itself, texts by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import onnxruntime  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise _needs("onnx", "onnxruntime", error) from error
        content = path.read_bytes()
        self.digest = hashlib.sha256(content).digest()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised as well
        options.intra_op_num_threads = torch.get_num_threads()
        there = onnxruntime.get_available_providers()
        kept = [one for one in ("CUDAExecutionProvider", "CPUExecutionProvider") if one in there]
        self._session = onnxruntime.InferenceSession(str(path), options, kept)
        images = [one for one in self._session.get_inputs() if len(one.shape) == 4]
        if len(images) != 1 or len(self._session.get_inputs()) != 1:
            names = ", ".join(one.name for one in self._session.get_inputs())
            raise BackboneError(
                f"encoder: onnx:{path} has the inputs {names}; expected one, of images "
                "[B, C, H, W]: export the image encoder alone"
            )
        self.input: tuple[str, list[int | str | None]] = images[0].name, images[0].shape
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        self._output = _feature_output([one.name for one in self._session.get_outputs()])

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, C, H, W]`` to features ``[B, D]``."""
        name, (batch, *_) = self.input
        size = batch if isinstance(batch, int) else len(images)
        given = images.detach().float().cpu().contiguous().numpy()
        parts = []
        for start in range(0, len(given), size):
            part = given[start : start + size]
            filled = np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
            parts.append(self._session.run([self._output], {name: filled})[0][: len(part)])
        features = torch.from_numpy(np.concatenate(parts)).to(images.device)
        return features[:, 0] if features.ndim == 3 else features.flatten(1)


def _feature_output(names: list[str]) -> str:
    return next((name for name in FEATURE_OUTPUTS if name in names), names[0])


def _onnx_network(source: str) -> OnnxNetwork:
    path = Path(source).expanduser()
    if not path.is_file():
        raise BackboneError(f"encoder: there is no file {path}; give onnx:FILE")
    return OnnxNetwork(path)


def _onnx_preprocessing(source: str, network: nn.Module) -> dict[str, Any]:
    """Read it from a graph that vsm exported, or from the configuration file beside the graph."""
    assert isinstance(network, OnnxNetwork)
    if network.metadata.get("kind") == "vsm encoder":
        channels, side, _ = json.loads(network.metadata["input_shape"])
        plain = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
        wanted = {"channels": channels, "side": side, **plain}
        if "input_crop" in network.metadata:
            wanted["crop"] = float(network.metadata["input_crop"])
        return {**wanted, "ink": network.metadata.get("input_ink") == "high"}
    path = Path(source).expanduser().with_name(CONFIGURATION)
    if not path.is_file():
        raise BackboneError(
            f"encoder: onnx:{source} does not say how it wants images; put its {CONFIGURATION} "
            'beside it: {"size": {"height": 224, "width": 224}, "image_mean": [0.485, 0.456, '
            '0.406], "image_std": [0.229, 0.224, 0.225]}'
        )
    side = network.input[1][2]
    return parse_image_processor(_read_json(path), {"image_size": side})
