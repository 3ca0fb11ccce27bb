"""``vsm train``."""

from collections.abc import Sequence
from typing import Any

import jsonargparse

from vsm.cli.launch import (
    add_launcher_arguments,
    add_run_arguments,
    parse_run,
    require_trusted_backbone,
)
from vsm.cli.output import ProgressBar, print_json, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError
from vsm.runs.directory import RunDirectory
from vsm.settings import RunSettings, SlurmSettings

BACKBONE, BACKBONE_ALIAS = "--model.backbone", "--backbone"


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run's settings and where it goes."""
    parser.add_argument(
        "--preset", type=str, help="Shipped settings by name, e.g. paper-omniglot-5way-1shot."
    )
    parser.add_argument(
        "--backbone",
        type=str | None,
        help="Short for --model.backbone: conv4, resnet12, wrn28_10, or your own module:attribute.",
    )
    parser.add_argument(
        "--learn_memory",
        type=bool,
        default=True,
        help="End by learning the Gaussian memory of the trained features, and use it if "
        "validation classes say that it is no worse (method vsm with conjugate inference).",
    )
    add_placement_arguments(parser)
    add_launcher_arguments(
        parser, "Train here, or submit a job: to this machine's background, or to SLURM."
    )
    add_run_arguments(parser, RunSettings)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Train."""
    words = _with_full_names(arguments)
    parsed, settings = parse_run(parser, words, RunSettings, "train")
    if parsed.backbone is not None:
        raise SettingsError("backbone: in a settings file it belongs to model, as model.backbone")
    require_trusted_backbone(settings.model.own_backbone, words, BACKBONE)

    if parsed.launcher != "none":
        _submit(parsed, settings, arguments)
        return

    from vsm.system.distributed import join_processes
    from vsm.training import backbone_option, train

    placement = prepare_placement(parsed)
    with join_processes(placement.device) as processes:
        quiet = parsed.json or not processes.is_first
        with ProgressBar(quiet) as bar:
            train(
                settings,
                parsed.output,
                parsed.resume,
                bar,
                processes,
                placement,
                parsed.learn_memory,
            )
    if not processes.is_first:
        return
    rows = RunDirectory(parsed.output).read_metrics()
    validations = [row for row in rows if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["accuracy"])
    score = best["validation"]
    learned = rows[-1].get("gaussian") if parsed.learn_memory else None
    if parsed.json:
        result = {"run": str(parsed.output), "best_step": best["step"], **score}
        print_json({**result, "gaussian": learned})
        return
    if learned is not None:
        say(f"{parsed.output}: {_described(learned)}")
    say(
        f"{parsed.output}: best {score['way']}-way validation accuracy {score['accuracy']:.1%} "
        f"± {score['ci95']:.1%} at step {best['step']}; measure it on unseen classes with: "
        f"vsm evaluate {parsed.output}{backbone_option(settings)}"
    )


def _described(learned: dict[str, Any]) -> str:
    """Describe the Gaussian memory that training ended with."""
    accuracy, difference = learned["accuracy"], learned["difference"]
    return (
        f"Gaussian memory of its features: validation accuracy {accuracy['mean']:.1%} ± "
        f"{accuracy['ci95']:.1%}, {difference['mean']:+.2%} ± {difference['ci95']:.2%}: "
        f"{'used from now on' if learned['used'] else 'worse, so it is not used'}"
    )


def _submit(
    parsed: jsonargparse.Namespace, settings: RunSettings, arguments: Sequence[str]
) -> None:
    """Put the training into a queue and say where to look for it."""
    from vsm.cli.main import main
    from vsm.system.launching import submit

    slurm = SlurmSettings(**parsed.slurm.as_dict())
    job = submit(parsed.launcher, slurm, settings.tasks, parsed.output, main, arguments)
    if parsed.json:
        print_json({"run": str(parsed.output), "job": job.id, "log": str(job.log)})
    else:
        say(f"{parsed.output}: submitted job {job.id} ({slurm.processes} processes)")
        say(f"its output: {job.log}; stop it with: {job.stop_command}")


def _with_full_names(arguments: Sequence[str]) -> list[str]:
    """Let ``--backbone`` stand for ``--model.backbone``."""
    names = {word.partition("=")[0] for word in arguments}
    if {BACKBONE_ALIAS, BACKBONE} <= names:
        raise SettingsError(f"{BACKBONE_ALIAS} and {BACKBONE} are one setting; give one of them")
    return [
        BACKBONE + word.removeprefix(BACKBONE_ALIAS)
        if word.partition("=")[0] == BACKBONE_ALIAS
        else word
        for word in arguments
    ]
