"""``vsm train``."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonargparse

from vsm.cli.output import TrainingBar, print_json
from vsm.cli.processes import add_placement_arguments, is_first_process
from vsm.configuration import instantiate, preset_paths, settings_from_files, settings_to_dict
from vsm.errors import SettingsError
from vsm.settings import RunSettings, SlurmSettings

if TYPE_CHECKING:
    from vsm.runs import RunDirectory


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run's settings and where it goes."""
    parser.add_argument("--output", type=Path, required=True, help="The run directory to write.")
    parser.add_argument(
        "--config",
        action="config",
        help="YAML settings, may be repeated; whatever comes later on the line wins.",
    )
    parser.add_argument(
        "--preset", type=str, help="Shipped settings by name, e.g. paper-omniglot-5way-1shot."
    )
    parser.add_argument(
        "--resume", action="store_true", help="Go on from the last state in --output, if any."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace a run that --output already holds."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object when done, and no progress."
    )
    add_placement_arguments(parser)
    parser.add_argument(
        "--launcher",
        type=Literal["none", "local", "slurm"],
        default="none",
        help="Train here, or submit a job: to this machine's background, or to SLURM.",
    )
    parser.add_class_arguments(SlurmSettings, "slurm")
    parser.add_class_arguments(RunSettings)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Train."""
    parsed = parser.parse_args(_with_preset(arguments))
    if parsed.resume and parsed.overwrite:
        raise SettingsError("--resume and --overwrite contradict each other; give one of them")
    stored = parsed.output / "config.yaml"
    _check_output(parsed.output, parsed.resume)
    if parsed.resume and stored.is_file():
        parsed = parser.parse_args(["--config", str(stored), *_with_preset(arguments)])
    settings = instantiate(parsed)
    if settings.data.startswith("folder:"):  # the run must find it from anywhere
        folder = Path(settings.data.removeprefix("folder:")).expanduser().resolve()
        settings = replace(settings, data=f"folder:{folder}")
    if parsed.resume and stored.is_file():
        _refuse_changes(settings, stored)

    if parsed.launcher != "none":
        _submit(parsed, settings, arguments)
        return

    from vsm.devices import choose_placement
    from vsm.distributed import joined_processes
    from vsm.interruption import Interrupted
    from vsm.runs import RunDirectory
    from vsm.runtime import keep_allocations
    from vsm.training import train

    keep_allocations()
    placement = choose_placement(parsed.device, parsed.precision)
    with joined_processes(placement.device) as processes:
        if parsed.overwrite and processes.is_first:
            RunDirectory(parsed.output).config.unlink(missing_ok=True)
        quiet = parsed.json or not processes.is_first
        try:
            with TrainingBar(settings.method, settings.steps, quiet) as bar:
                finished = train(settings, parsed.output, parsed.resume, bar, processes, placement)
        except Interrupted as interruption:
            if processes.is_first:
                print(f"vsm train: {interruption}", file=sys.stderr)
            sys.exit(interruption.exit_code)
    if processes.is_first:
        _print_result(parsed, finished)


def _print_result(parsed: jsonargparse.Namespace, finished: "RunDirectory") -> None:
    """Say how good the best model is by validation."""
    validations = [row for row in finished.read_metrics() if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["accuracy"])
    if parsed.json:
        print_json({"run": str(parsed.output), "best_step": best["step"], **best["validation"]})
    else:
        score = best["validation"]
        print(
            f"{parsed.output}: best {score['way']}-way validation accuracy {score['accuracy']:.1%} "
            f"± {score['ci95']:.1%} at step {best['step']}; measure it on unseen classes with: "
            f"vsm evaluate {parsed.output}"
        )


def _submit(
    parsed: jsonargparse.Namespace, settings: RunSettings, arguments: Sequence[str]
) -> None:
    """Put the training into a queue and say where to look for it."""
    from vsm.launching import submit

    slurm = SlurmSettings(**parsed.slurm.as_dict())
    job = submit(parsed.launcher, slurm, settings.tasks, parsed.output, arguments)
    if parsed.json:
        print_json({"run": str(parsed.output), "job": job.id, "log": str(job.log)})
    else:
        print(f"{parsed.output}: submitted job {job.id} ({slurm.processes} processes)")
        print(f"its output: {job.log}; stop it with: {job.stop_command}")


def _check_output(output: Path, resume: bool) -> None:
    """Refuse places where a run would be lost or would bury something else."""
    if output == Path():
        raise SettingsError("output: give the run a folder of its own, got the current one")
    if not resume:
        return
    leftovers = ("resume.safetensors", "model.safetensors", "metrics.jsonl")
    has_run = any((output / name).exists() for name in leftovers)
    if has_run and not (output / "config.yaml").is_file():
        raise SettingsError(f"output: {output} has no config.yaml, so it cannot be resumed")
    if not (output / "resume.safetensors").is_file() and is_first_process():
        print(f"vsm train: nothing to resume in {output}, starting anew", file=sys.stderr)


def _with_preset(arguments: Sequence[str]) -> list[str]:
    """Put the file of ``--preset NAME`` where it is named, as a ``--config``."""
    words: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--preset":
            chosen = value if equals else next(remaining, "")
            words += [word for path in preset_paths(chosen) for word in ("--config", str(path))]
        else:
            words.append(word)
    return words


def _refuse_changes(settings: RunSettings, stored: Path) -> None:
    """A resumed run keeps its settings; steps may change where no schedule depends on them."""
    before = _flat(settings_to_dict(settings_from_files(stored)))
    for key, value in _flat(settings_to_dict(settings)).items():
        may_change = key == "steps" and settings.optimiser.schedule != "cosine"
        if value != before[key] and not may_change:
            raise SettingsError(
                f"{key}: the run in {stored.parent} was begun with {before[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
