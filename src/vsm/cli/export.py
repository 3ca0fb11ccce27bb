"""``vsm export``."""

from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument, add_memory_argument
from vsm.cli.output import print_json, say


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the model and where it goes."""
    parser.add_argument("model", type=str, help="A run directory, or a name that vsm models lists.")
    parser.add_argument(
        "--onnx",
        type=Path,
        required=True,
        help="Folder that encoder.onnx and classifier.onnx go into.",
    )
    add_memory_argument(parser)
    add_backbone_argument(parser)
    parser.add_argument("--overwrite", action="store_true", help="Replace files that are there.")
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Convert, compare with PyTorch, write."""
    parsed = parser.parse_args(arguments)

    from vsm.export import export_onnx

    exported = export_onnx(
        parsed.model,
        parsed.onnx,
        memory=parsed.memory,
        backbone=parsed.backbone,
        overwrite=parsed.overwrite,
    )
    files = [exported.encoder, exported.classifier]
    if parsed.json:
        print_json({"files": list(map(str, files)), "differences": exported.differences})
        return
    for file in files:
        say(f"{file}: {file.stat().st_size / 1000:,.0f} kB")
    listed = ", ".join(f"{name} {value:.1e}" for name, value in exported.differences.items())
    say(f"largest differences from PyTorch: {listed.replace('_', ' ')}")
