"""``vsm train`` and ``vsm pretrain``: a run's settings, its output, and resuming."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from vsm.cli.arguments import (
    CommandEntry,
    PlacementOptions,
    add_options,
    from_parsed,
    prepare_placement,
)
from vsm.cli.main import is_first_process
from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.errors import SettingsError
from vsm.runs.configuration import (
    PRESETS,
    PRETRAINING_PRESETS,
    AnySettings,
    flat_values,
    preset_names,
    preset_paths,
    read_sections,
    read_settings,
)
from vsm.runs.directory import (
    CONFIG_NAME,
    METRICS_NAME,
    RESUME_NAME,
    Directory,
    RunDirectory,
    is_shipped,
    require_made_by,
)
from vsm.settings import (
    PretrainSettings,
    RunSettings,
    SlurmSettings,
    default_values,
    describe_conditions,
    effective_settings,
    flatten,
    own_code,
)

BACKBONE, BACKBONE_ALIAS = "--model.backbone", "--backbone"


@dataclass(kw_only=True)
class RunOptions(PlacementOptions):
    """What ``train`` and ``pretrain`` share besides settings."""

    output: Path
    """The run directory to write."""
    resume: bool = False
    """Go on from the last state in --output, if any."""
    overwrite: bool = False
    """Replace a run that --output already holds."""
    json: bool = False
    """Print one JSON object when done, and no progress."""


@dataclass(kw_only=True)
class LauncherOptions:
    """Who starts processes, and what SLURM is asked for."""

    launcher: Literal["none", "local", "slurm"] = "none"
    """Work here, or submit jobs: to this machine's background, or to SLURM."""
    slurm: SlurmSettings = field(default_factory=SlurmSettings)


@dataclass(kw_only=True)
class TrainOptions(LauncherOptions, RunOptions):
    """Arguments of ``vsm train`` besides settings."""

    preset: str | None = None
    """Shipped settings by name, e.g. paper-omniglot-5way-1shot."""
    backbone: str | None = None
    """Short for --model.backbone: conv4, resnet12, wrn28_10, or your own module:attribute."""
    learn_memory: bool = True
    """End by learning the Gaussian memory of the trained features, and use it if validation classes
    say that it is no worse (method vsm with conjugate inference)."""


def add_train_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vsm train``."""
    _add_arguments(parser, TrainOptions, RunSettings)


def add_pretrain_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vsm pretrain``."""
    names = preset_names(PRETRAINING_PRESETS)
    parser.add_argument("--preset", type=str, help=f"Shipped settings by name: {names}.")
    _add_arguments(parser, RunOptions, PretrainSettings)


def _add_arguments(parser: ArgumentParser, options: type[RunOptions], kind: type) -> None:
    add_options(parser, options)
    parser.add_argument(
        "--config",
        action="config",
        help="YAML settings, may be repeated; whatever comes later on the line wins.",
    )
    parser.add_class_arguments(kind)
    settings = describe_conditions(kind)
    for action in parser._actions:  # argparse offers no other way to its help
        if conditions := settings.get(action.dest):
            action.help = f"{action.help} [{conditions}]"
        if action.dest in settings and getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # --augment stands for --augment true


def train(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    """Train, or submit a training."""
    words = _with_full_names(arguments)
    parsed, settings = parse_run(parser, words, RunSettings, "train")
    options = from_parsed(TrainOptions, parsed)
    if options.backbone is not None:
        raise SettingsError("backbone: in a settings file it belongs to model, as model.backbone")
    _require_trusted_backbone(settings.model.own_backbone, words, BACKBONE)
    if options.launcher != "none":
        _submit(options, settings, arguments)
        return
    _make_way(options)

    from vsm import training
    from vsm.system.distributed import join_processes

    placement = prepare_placement(options)
    with (
        join_processes(placement.device) as processes,
        ProgressBar(options.json or not processes.is_first) as bar,
    ):
        output, resume, learn = options.output, options.resume, options.learn_memory
        training.train(settings, output, resume, bar, processes, placement, learn)
    if not processes.is_first:
        return
    rows = RunDirectory(options.output).read_metrics()
    validations = [row for row in rows if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["accuracy"])
    score = best["validation"]
    learned = rows[-1].get("gaussian") if options.learn_memory else None
    if options.json:
        result = {"run": str(options.output), "best_step": best["step"], **score}
        print_json({**result, "gaussian": learned})
        return
    if learned is not None:
        say(f"{options.output}: {_described(learned)}")
    say(
        f"{options.output}: best {score['way']}-way validation accuracy {score['accuracy']:.1%} "
        f"± {score['ci95']:.1%} at step {best['step']}; measure it on unseen classes with: "
        f"vsm evaluate {options.output}{training.backbone_option(settings)}"
    )


def _described(learned: dict[str, Any]) -> str:
    """Describe the Gaussian memory that training ended with."""
    accuracy, difference = learned["accuracy"], learned["difference"]
    return (
        f"Gaussian memory of its features: validation accuracy {accuracy['mean']:.1%} ± "
        f"{accuracy['ci95']:.1%}, {difference['mean']:+.2%} ± {difference['ci95']:.2%}: "
        f"{'used from now on' if learned['used'] else 'worse, so it is not used'}"
    )


def _submit(options: TrainOptions, settings: RunSettings, arguments: Sequence[str]) -> None:
    """Put the training into a queue and say where to look for it."""
    from vsm.cli.main import main
    from vsm.system.launching import submit

    job = submit(options.launcher, options.slurm, settings.tasks, options.output, main, arguments)
    if options.json:
        print_json({"run": str(options.output), "job": job.id, "log": str(job.log)})
    else:
        say(f"{options.output}: submitted job {job.id} ({options.slurm.processes} processes)")
        say(f"its output: {job.log}; stop it with: {job.stop_command}")


def pretrain(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    """Pre-train a backbone."""
    presets = PRETRAINING_PRESETS
    parsed, settings = parse_run(parser, arguments, PretrainSettings, "pretrain", presets)
    options = from_parsed(RunOptions, parsed)
    _require_trusted_backbone(own_code(settings.backbone), arguments, "--backbone")
    _make_way(options)

    from vsm.pretraining import loop

    placement = prepare_placement(options)
    with ProgressBar(quiet=options.json) as bar:
        finished = loop.pretrain(settings, options.output, options.resume, bar, placement)
    validations = finished.read_validations()
    best = max(validations, key=lambda row: row["validation"]["mean_accuracy"])
    if options.json:
        files = {"run": str(options.output), "backbone": str(finished.backbone)}
        print_json({**files, "best_epoch": best["epoch"], **best["validation"]})
        return
    last = validations[-1]["validation"]
    rows = [
        [
            str(row["epoch"]),
            *(f"{one['accuracy']:.2%} ± {one['ci95']:.2%}" for one in shots.values()),
            "kept" if row is best else "",
        ]
        for row in validations
        for shots in [row["validation"]["shots"]]
    ]
    print_table(
        f"{settings.data}, validation classes, {last['way']}-way, nearest prototype by cosine, "
        f"{last['episodes']} episodes of {last['queries']} queries per class",
        ["epoch", *(f"{shot}-shot" for shot in last["shots"]), ""],
        rows,
    )
    say(
        f"{finished.backbone} holds the backbone of epoch {best['epoch']}; go on with: "
        f"{_training_command(settings, options.output)}"
    )


def _training_command(settings: PretrainSettings, output: Path) -> str:
    """Return the command that begins with the backbone in ``output``, for a shell."""
    usual = PretrainSettings()
    words = ["vsm", "train", "--data", settings.data, "--init", str(output), "--freeze-backbone"]
    for name in ("backbone", "channels"):  # a run must agree on them with its backbone
        if getattr(settings, name) != getattr(usual, name):
            words += [f"--model.{name}", str(getattr(settings, name))]
    return shlex.join([*words, "--output", f"{output}-few-shot"])


COMMANDS = {
    "train": CommandEntry(add_train_arguments, train),
    "pretrain": CommandEntry(add_pretrain_arguments, pretrain),
}


def parse_run(
    parser: ArgumentParser,
    words: Sequence[str],
    kind: type[AnySettings],
    command: str,
    presets: Path = PRESETS,
) -> tuple[Any, AnySettings]:
    """Parse the words after ``command``, check the output, return arguments and settings."""
    _check_files(words, kind)
    arguments: list[str] = _with_preset(words, lambda name: preset_paths(name, presets))
    parsed = parser.parse_args(arguments)
    own, usual = parser.parse_args(_with_preset(words, lambda _: [])), default_values(kind)
    given = {name for name, value in flat_values(kind, own).items() if value != usual[name]}
    if parsed.resume and parsed.overwrite:
        raise SettingsError("--resume and --overwrite contradict each other; give one of them")
    stored = parsed.output / CONFIG_NAME
    _check_output(parsed.output, parsed.resume, command)
    resumed = parsed.resume and stored.is_file()
    if resumed:
        begun = read_settings(kind, stored)
        parsed = parser.parse_args(["--config", str(stored), *arguments])
    settings = _findable(effective_settings(kind, flat_values(kind, parsed), given))
    if resumed:
        _refuse_changes(settings, begun, parsed.output)
    return parsed, settings


def _option_values(words: Sequence[str], option: str) -> list[str]:
    """Return the values that ``words`` give an option, also in the form ``--option=value``."""
    return [
        value if equals else after
        for word, after in pairwise([*words, ""])
        for name, equals, value in [word.partition("=")]
        if name == option
    ]


def _check_files(words: Sequence[str], kind: type[AnySettings]) -> None:
    """Refuse files of settings that would keep the parser busy, or make it open other files."""
    for path in map(Path, _option_values(words, "--config")):
        if path.exists():
            values = read_sections(kind, path, verify=False)
            if "config" in values or not isinstance(values.get("slurm", {}), dict):
                raise SettingsError(f"{path}: holds the name of another file; give it as --config")


def _with_preset(words: Sequence[str], files: Callable[[str], list[Path]]) -> list[str]:
    """Replace ``--preset NAME`` by the ``files`` of that name, each as a ``--config``."""
    replaced: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--preset":
            chosen = value if equals else next(remaining, "")
            replaced += [f"--config={path}" for path in files(chosen)]
        else:
            replaced.append(word)
    return replaced


def _with_full_names(words: Sequence[str]) -> list[str]:
    """Let ``--backbone`` stand for ``--model.backbone``."""
    names = [word.partition("=")[0] for word in words]
    if {BACKBONE_ALIAS, BACKBONE} <= set(names):
        raise SettingsError(f"{BACKBONE_ALIAS} and {BACKBONE} are one setting; give one of them")
    return [
        BACKBONE + word.removeprefix(BACKBONE_ALIAS) if name == BACKBONE_ALIAS else word
        for name, word in zip(names, words, strict=True)
    ]


def _findable(settings: AnySettings) -> AnySettings:
    """Make the paths of data, of ``init`` and of a teacher absolute, for later runs."""
    kind, _, path = settings.data.partition(":")
    if kind in ("folder", "features") and path:
        settings = replace(settings, data=f"{kind}:{Path(path).expanduser().resolve()}")
    if isinstance(settings, RunSettings) and settings.init and not is_shipped(settings.init):
        settings = replace(settings, init=str(Path(settings.init).expanduser().resolve()))
    if isinstance(settings, PretrainSettings) and settings.distillation.teacher:
        teacher = str(Path(settings.distillation.teacher).expanduser().resolve())
        taught = replace(settings.distillation, teacher=teacher)
        settings = replace(settings, distillation=taught)
    return settings


def _require_trusted_backbone(own: str | None, words: Sequence[str], option: str) -> None:
    """Let files choose among our backbones, but only the command line name other code to import.

    ``own`` is the user's own backbone ``module:attribute`` in the settings, ``option`` the option
    by which ``words``, the arguments, must name it as well.
    """
    if own is not None and own not in _option_values(words, option):
        raise SettingsError(
            f"{option.lstrip('-')}: a settings file names code that is not part of vsm, {own}; if "
            f"you trust it, add --backbone {own}"
        )


def _check_output(output: Path, resume: bool, command: str) -> None:
    """Refuse places where a run would be lost or would bury something else."""
    if output == Path():
        raise SettingsError("output: give the run a folder of its own, got the current one")
    require_made_by(command, output)
    if not resume:
        return
    has_run = (output / METRICS_NAME).exists() or any(output.glob("*.safetensors"))
    if has_run and not (output / CONFIG_NAME).is_file():
        raise SettingsError(f"output: {output} has no {CONFIG_NAME}, so it cannot be resumed")
    if not (output / RESUME_NAME).is_file() and is_first_process():
        say(f"vsm {command}: nothing to resume in {output}, starting from scratch", file=sys.stderr)


def _make_way(options: RunOptions) -> None:
    """Let a new run begin in the output, if that was asked for."""
    stored = options.output / CONFIG_NAME
    if options.overwrite and is_first_process() and stored.exists():
        with Directory(options.output).locked():
            stored.unlink()


def _refuse_changes(settings: AnySettings, before: AnySettings, output: Path) -> None:
    """Keep the settings of a resumed run, but for ``steps`` where no schedule depends on them."""
    stored = flatten(before)
    for key, value in flatten(settings).items():
        may_change = (
            key == "steps"
            and isinstance(settings, RunSettings)
            and settings.optimizer.schedule != "cosine"
        )
        if value != stored[key] and not may_change:
            raise SettingsError(
                f"{key}: the run in {output} was begun with {stored[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )
