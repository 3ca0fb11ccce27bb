"""``vsm pretrain``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse

from vsm.cli.launch import add_run_arguments, parse_run, require_trusted_backbone
from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.runs.configuration import PRETRAINING_PRESETS, preset_names
from vsm.settings import PretrainSettings, own_code


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the pre-training's settings and where it goes."""
    names = preset_names(PRETRAINING_PRESETS)
    parser.add_argument("--preset", type=str, help=f"Shipped settings by name: {names}.")
    add_placement_arguments(parser)
    add_run_arguments(parser, PretrainSettings)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Pre-train a backbone."""
    presets = PRETRAINING_PRESETS
    parsed, settings = parse_run(parser, arguments, PretrainSettings, "pretrain", presets)
    require_trusted_backbone(own_code(settings.backbone), arguments, "--backbone")

    from vsm.pretraining.loop import pretrain

    placement = prepare_placement(parsed)
    with ProgressBar(quiet=parsed.json) as bar:
        finished = pretrain(settings, parsed.output, parsed.resume, bar, placement)
    validations = finished.read_validations()
    best = max(validations, key=lambda row: row["validation"]["mean_accuracy"])
    if parsed.json:
        files = {"run": str(parsed.output), "backbone": str(finished.backbone)}
        print_json({**files, "best_epoch": best["epoch"], **best["validation"]})
        return
    _print_validations(settings, validations, best["epoch"])
    say(
        f"{finished.backbone} holds the backbone of epoch {best['epoch']}; go on with: "
        f"{_training_command(settings, parsed.output)}"
    )


def _training_command(settings: PretrainSettings, output: Path) -> str:
    """Return the command that begins with the backbone in ``output``, for a shell."""
    usual = PretrainSettings()
    words = ["vsm", "train", "--data", settings.data, "--init", str(output), "--freeze-backbone"]
    for name in ("backbone", "channels"):  # a run must agree on them with its backbone
        if getattr(settings, name) != getattr(usual, name):
            words += [f"--model.{name}", str(getattr(settings, name))]
    return shlex.join([*words, "--output", f"{output}-few-shot"])


def _print_validations(
    settings: PretrainSettings, validations: Sequence[dict[str, Any]], best_epoch: int
) -> None:
    last = validations[-1]["validation"]
    print_table(
        f"{settings.data}, validation classes, {last['way']}-way, nearest prototype by cosine, "
        f"{last['episodes']} episodes of {last['queries']} queries per class",
        ["epoch", *(f"{shot}-shot" for shot in last["shots"]), ""],
        [
            [
                str(row["epoch"]),
                *(
                    f"{score['accuracy']:.2%} ± {score['ci95']:.2%}"
                    for score in row["validation"]["shots"].values()
                ),
                "kept" if row["epoch"] == best_epoch else "",
            ]
            for row in validations
        ],
    )
