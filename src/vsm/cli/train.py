"""``vsm train`` and ``vsm pretrain``: a run's settings, its output, and resuming."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jsonargparse import ArgumentParser

from vsm.cli.arguments import Options, PlacementOptions
from vsm.cli.main import is_first_process, main
from vsm.cli.output import ProgressBar, print_json, print_table, say
from vsm.errors import SettingsError
from vsm.runs.configuration import (
    PRESETS,
    PRETRAINING_PRESETS,
    AnySettings,
    flat_values,
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

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission


class RunOptions(PlacementOptions):
    """What ``train`` and ``pretrain`` share besides settings."""

    settings: ClassVar[type]
    output: Path
    """The run directory to write."""
    resume: bool = False
    """Go on from the last state in --output, if any."""
    overwrite: bool = False
    """Replace a run that --output already holds."""
    json: bool = False
    """Print one JSON object when done, and no progress."""

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--config",
            action="config",
            help="YAML settings, may be repeated; whatever comes later on the line wins.",
        )
        parser.add_class_arguments(cls.settings)
        settings = describe_conditions(cls.settings)
        for action in parser._actions:  # argparse offers no other way to its help
            if conditions := settings.get(action.dest):
                action.help = f"{action.help} [{conditions}]"
            if action.dest in settings and getattr(action, "_typehint", None) is bool:
                action.nargs, action.const = "?", True  # --augment stands for --augment true

    def make_way(self) -> None:
        """Let a new run begin in the output, if that was asked for."""
        stored = self.output / CONFIG_NAME
        if self.overwrite and is_first_process() and stored.exists():
            with Directory(self.output).locked():
                stored.unlink()


class LauncherOptions(Options):
    """Who starts processes, and what SLURM is asked for."""

    launcher: Literal["none", "local", "slurm"] = "none"
    """Work here, or submit jobs: to this machine's background, or to SLURM."""
    slurm: SlurmSettings = field(default_factory=SlurmSettings)


class Train(LauncherOptions, RunOptions):
    """``vsm train``."""

    settings = RunSettings
    preset: str | None = None
    """Shipped settings by name, e.g. paper-omniglot-5way-1shot."""
    backbone: str | None = None
    """Short for --model.backbone: conv4, resnet12, wrn28_10, or your own module:attribute."""
    learn_memory: bool = True
    """End by learning the Gaussian memory of the trained features, and use it if validation classes
    say that it is no worse (method vsm with conjugate inference)."""

    @classmethod
    def start(cls, parser: ArgumentParser, words: Sequence[str]) -> None:
        if _option_values(words, "--backbone") and _option_values(words, "--model.backbone"):
            raise SettingsError("--backbone and --model.backbone are one setting; give one of them")
        full = _replaced(words, "--backbone", lambda name: [f"--model.backbone={name}"])
        parsed, settings = parse_run(parser, full, RunSettings)
        self = cls.from_parsed(parsed)
        if self.backbone is not None:
            raise SettingsError(
                "backbone: in a settings file it belongs to model, as model.backbone"
            )
        _require_trusted_backbone(settings.model.own_backbone, full, "--model.backbone")
        if self.launcher == "none":
            self._train(settings)
        else:
            self._submit(settings, words)

    def _train(self, settings: RunSettings) -> None:
        from vsm import training
        from vsm.system.distributed import join_processes

        self.make_way()
        placement = self.prepare_placement()
        with (
            join_processes(placement.device) as processes,
            ProgressBar(self.json or not processes.is_first) as bar,
        ):
            training.train(
                settings, self.output, self.resume, bar, processes, placement, self.learn_memory
            )
        if not processes.is_first:
            return
        rows = RunDirectory(self.output).read_metrics()
        validations = [row for row in rows if "validation" in row]
        best = max(validations, key=lambda row: row["validation"]["accuracy"])
        score = best["validation"]
        learned = rows[-1].get("gaussian") if self.learn_memory else None
        if self.json:
            result = {"run": str(self.output), "best_step": best["step"], **score}
            print_json({**result, "gaussian": learned})
            return
        if learned is not None:
            accuracy, difference = learned["accuracy"], learned["difference"]
            say(
                f"{self.output}: Gaussian memory of its features: validation accuracy "
                f"{accuracy['mean']:.1%} ± {accuracy['ci95']:.1%}, {difference['mean']:+.2%} ± "
                f"{difference['ci95']:.2%}: "
                f"{'used from now on' if learned['used'] else 'worse, so it is not used'}"
            )
        say(
            f"{self.output}: best {score['way']}-way validation accuracy {score['accuracy']:.1%} "
            f"± {score['ci95']:.1%} at step {best['step']}; measure it on unseen classes with: "
            f"vsm evaluate {self.output}{training.backbone_option(settings)}"
        )

    def _submit(self, settings: RunSettings, words: Sequence[str]) -> None:
        """Put the training into a queue and say where to look for it."""
        from vsm.system.distributed import Processes

        Processes(0, self.slurm.processes).share(settings.tasks)  # raises if it cannot be even
        job = submit(self.launcher, self.slurm, self.output, words)
        job_id, log = job.job_id, job.paths.stdout
        if self.json:
            print_json({"run": str(self.output), "job": job_id, "log": str(log)})
        else:
            stop = "scancel" if self.launcher == "slurm" else "kill"
            say(f"{self.output}: submitted job {job_id} ({self.slurm.processes} processes)")
            say(f"its output: {log}; stop it with: {stop} {job_id}")


class Pretrain(RunOptions):
    """``vsm pretrain``."""

    settings = PretrainSettings
    preset: str | None = None
    """Shipped settings by name: cifar-fs-resnet12 or omniglot."""

    @classmethod
    def start(cls, parser: ArgumentParser, words: Sequence[str]) -> None:
        parsed, settings = parse_run(parser, words, PretrainSettings)
        _require_trusted_backbone(own_code(settings.backbone), words, "--backbone")
        cls.from_parsed(parsed)._pretrain(settings)

    def _pretrain(self, settings: PretrainSettings) -> None:
        from vsm import pretraining

        self.make_way()
        placement = self.prepare_placement()
        with ProgressBar(quiet=self.json) as bar:
            finished = pretraining.pretrain(settings, self.output, self.resume, bar, placement)
        validations = finished.read_validations()
        best = max(validations, key=lambda row: row["validation"]["mean_accuracy"])
        if self.json:
            files = {"run": str(self.output), "backbone": str(finished.backbone)}
            print_json({**files, "best_epoch": best["epoch"], **best["validation"]})
            return
        last = validations[-1]["validation"]
        rows = []
        for row in validations:
            scores = row["validation"]["shots"].values()
            cells = [f"{score['accuracy']:.2%} ± {score['ci95']:.2%}" for score in scores]
            rows.append([str(row["epoch"]), *cells, "kept" if row is best else ""])
        print_table(
            f"{settings.data}, validation classes, {last['way']}-way, nearest prototype by cosine, "
            f"{last['episodes']} episodes of {last['queries']} queries per class",
            ["epoch", *(f"{shot}-shot" for shot in last["shots"]), ""],
            rows,
        )
        say(
            f"{finished.backbone} holds the backbone of epoch {best['epoch']}; go on with: "
            f"{_training_command(settings, self.output)}"
        )


def _training_command(settings: PretrainSettings, output: Path) -> str:
    """Return the command that begins with the backbone in ``output``, for a shell."""
    usual = PretrainSettings()
    words = ["vsm", "train", "--data", settings.data, "--init", str(output), "--freeze-backbone"]
    for name in ("backbone", "channels"):  # a run must agree on them with its backbone
        if getattr(settings, name) != getattr(usual, name):
            words += [f"--model.{name}", str(getattr(settings, name))]
    return shlex.join([*words, "--output", f"{output}-few-shot"])


COMMANDS = {"train": Train, "pretrain": Pretrain}


def parse_run(
    parser: ArgumentParser, words: Sequence[str], kind: type[AnySettings]
) -> tuple[Any, AnySettings]:
    """Parse the arguments of a run, check its output, and return arguments and settings."""
    command, presets = "pretrain", PRETRAINING_PRESETS
    if kind is RunSettings:
        command, presets = "train", PRESETS

    def files(preset: str) -> list[str]:
        return [f"--config={path}" for path in preset_paths(preset, presets)]

    _check_files(words, kind)
    arguments: list[str] = _replaced(words, "--preset", files)
    parsed = parser.parse_args(arguments)
    without_preset = parser.parse_args(_replaced(words, "--preset", lambda _: []))
    own, usual = flat_values(kind, without_preset), default_values(kind)
    given = {name for name, value in own.items() if value != usual[name]}
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
    values = []
    for word, after in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            values.append(value if equals else after)
    return values


def _check_files(words: Sequence[str], kind: type[AnySettings]) -> None:
    """Refuse files of settings that would keep the parser busy, or make it open other files."""
    for path in map(Path, _option_values(words, "--config")):
        if path.exists():
            values = read_sections(kind, path, verify=False)
            if "config" in values or not isinstance(values.get("slurm", {}), dict):
                raise SettingsError(f"{path}: holds the name of another file; give it as --config")


def _replaced(
    words: Sequence[str], option: str, replacement: Callable[[str], list[str]]
) -> list[str]:
    """Return ``words`` with ``replacement(value)`` in place of an option and its value."""
    replaced: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == option:
            replaced += replacement(value if equals else next(remaining, ""))
        else:
            replaced.append(word)
    return replaced


def _findable(settings: AnySettings) -> AnySettings:
    """Make the paths of data, of ``init`` and of a teacher absolute, for later runs."""
    kind, _, path = settings.data.partition(":")
    if kind in ("folder", "features") and path:
        settings = replace(settings, data=f"{kind}:{_absolute(path)}")
    if isinstance(settings, RunSettings) and settings.init and not is_shipped(settings.init):
        settings = replace(settings, init=_absolute(settings.init))
    if isinstance(settings, PretrainSettings) and settings.distillation.teacher:
        taught = replace(settings.distillation, teacher=_absolute(settings.distillation.teacher))
        settings = replace(settings, distillation=taught)
    return settings


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _require_trusted_backbone(own: str | None, words: Sequence[str], option: str) -> None:
    """Let files choose among our backbones, but only the command line name other code to import."""
    if own is not None and own not in _option_values(words, option):
        raise SettingsError(
            f"{option[2:]}: a settings file names code that is not part of vsm, {own}; if you "
            f"trust it, add --backbone {own}"
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


def _refuse_changes(settings: AnySettings, before: AnySettings, output: Path) -> None:
    """Keep the settings of a resumed run, but for ``steps`` where no schedule depends on them."""
    stored = flatten(before)
    may_grow = isinstance(settings, RunSettings) and settings.optimizer.schedule != "cosine"
    for key, value in flatten(settings).items():
        if value != stored[key] and not (key == "steps" and may_grow):
            raise SettingsError(
                f"{key}: the run in {output} was begun with {stored[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )


# Jobs of SLURM, or in this machine's background, through submitit. Each process of a job runs the
# command that was typed, with the environment by which join_processes finds the others. Shortly
# before its time is up the job saves, goes back into the queue and is resumed.


@dataclass(frozen=True)
class TrainingJob:
    """What each process of a job does: ``vsm train`` with the ``arguments`` that were typed."""

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Train; if time is running out, ask for another turn."""
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        ask_again = signal.getsignal(signal.SIGUSR2)  # submitit's; training takes its place
        job = self.resumed() if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else self
        try:
            code: Any = main(["train", *job.arguments])
        except SystemExit as stop:
            code = stop.code
        if code == 128 + signal.SIGUSR2 and callable(ask_again):
            ask_again(signal.SIGUSR2, None)
        if code:
            sys.exit(code)

    def resumed(self) -> "TrainingJob":
        """Return the job that goes on with what this one has saved."""
        kept = [word for word in self.arguments if word not in ("--overwrite", "--resume")]
        return TrainingJob((*kept, "--resume"))

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit puts into the queue when time runs out."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self.resumed())


def submit(launcher: str, slurm: SlurmSettings, output: Path, arguments: Sequence[str]) -> Any:
    """Submit ``vsm train`` with ``arguments``; the job's files go to a folder beside ``output``."""
    folder = output.absolute().with_name(f"{output.name}-jobs")
    executor = open_executor(folder, launcher, slurm.restarts)
    try:
        executor.update_parameters(**scheduler_parameters(slurm, f"vsm-{output.name}"))
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"launcher: {error}") from error

    from submitit.helpers import clean_env

    with clean_env(), _output_not_inherited():
        return executor.submit(TrainingJob((*arguments, "--launcher", "none")))


def open_executor(folder: Path, launcher: str, restarts: int) -> Any:
    """Return submitit's executor with its files in ``folder``, or say why there is none."""
    try:
        import submitit
    except ImportError:
        raise SettingsError(
            f"launcher: {launcher} needs submitit: pip install 'variational-semantic-memory[slurm]'"
        ) from None
    try:
        return submitit.AutoExecutor(folder, launcher, **{f"{launcher}_max_num_timeout": restarts})
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"launcher: {error}") from error


@contextmanager
def _output_not_inherited() -> Iterator[None]:
    """Keep processes that start inside the block from holding our output open after we end."""
    ours = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in ours:
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, copy in ours.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)


def scheduler_parameters(slurm: SlurmSettings, name: str) -> dict[str, Any]:
    """Return what submitit calls the settings, without those that are unset."""
    parameters = {
        "name": name,
        "nodes": slurm.nodes,
        "tasks_per_node": slurm.processes_per_node,
        "gpus_per_node": slurm.gpus_per_node or None,
        "cpus_per_task": slurm.cpus_per_process,
        "mem_gb": slurm.memory_gb,
        "timeout_min": max(1, round(60 * slurm.hours)),
        "stderr_to_stdout": True,
        "slurm_signal_delay_s": slurm.warning_seconds,
        "slurm_partition": slurm.partition,
        "slurm_account": slurm.account,
        "slurm_qos": slurm.qos,
        "slurm_constraint": slurm.constraint,
    }
    return {key: value for key, value in parameters.items() if value is not None}
