"""Training as a job of SLURM, or in this machine's background, through submitit.

Each process of a job runs the command that was typed, with the environment by which
:func:`vsm.system.distributed.join_processes` finds the others. Shortly before its time is up the
job saves, goes back into the queue and is resumed.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsm.cli.main import main
from vsm.errors import SettingsError
from vsm.settings import SlurmSettings

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission


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
