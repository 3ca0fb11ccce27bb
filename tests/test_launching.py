"""Jobs: submitted to this machine's background for real, to SLURM as far as its commands."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forked import ForkedPython
from launching_helpers import TINY
from vsm.cli import main
from vsm.cli.train import TrainingJob, submit
from vsm.errors import SettingsError
from vsm.runs.directory import RunDirectory
from vsm.settings import SlurmSettings


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


def is_running(process: int) -> bool:
    """Whether it runs; one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1]
    except OSError:
        return False
    return state.split()[0] != "Z"


@pytest.fixture
def background() -> Iterator[Callable[..., tuple[int, Path]]]:
    """A function that submits a job to the background; what is left of the jobs is ended."""
    jobs: list[int] = []

    def submitted(output: Path, *words: str) -> tuple[int, Path]:
        asked: list[str | Path] = [
            "train",
            "--output",
            output,
            "--launcher",
            "local",
            "--json",
            *TINY,
            *words,
        ]
        process = ForkedPython({"OMP_NUM_THREADS": "1"}, "-m", "vsm", *asked)
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
        told: dict[str, Any] = json.loads(printed)
        jobs.append(int(told["job"]))
        return jobs[-1], Path(told["log"])

    yield submitted
    for job in filter(is_running, jobs):
        os.kill(job, signal.SIGTERM)
        until(lambda job=job: not is_running(job), Path())  # type: ignore[misc]


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8")
    return [int(one) for one in listed.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_of_two_processes_trains_in_the_background(
    tmp_path: Path, background: Callable[..., tuple[int, Path]]
) -> None:
    output = tmp_path / "run"
    job, log = background(output, "--steps", "10", "--slurm.processes-per-node", "2")
    until(lambda: not is_running(job), log)
    assert log.parent == tmp_path / "run-jobs"
    assert [row["step"] for row in RunDirectory(output).read_metrics()] == [1, 10, 10]
    assert "global_rank=0(2)" in log.read_text()
    assert "Job completed successfully" in log.read_text()
    assert sorted(path.name for path in output.iterdir()) == [
        "calibration.json",
        "config.yaml",
        "memory.safetensors",
        "metrics.jsonl",
        "model.safetensors",
        "resume.safetensors",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_whose_time_runs_out_saves_and_is_resumed(
    tmp_path: Path, background: Callable[..., tuple[int, Path]]
) -> None:
    output = tmp_path / "run"
    job, log = background(output, "--steps", "100000", "--overwrite")
    until((output / "resume.safetensors").exists, log)
    [worker] = children(job)
    os.kill(worker, signal.SIGUSR2)  # as a scheduler warns shortly before the limit
    until(lambda: "stopped and saved at step" in log.read_text(), log)
    saved = (output / "resume.safetensors").read_bytes()
    until(lambda: (output / "resume.safetensors").read_bytes() != saved, log)
    steps = [row["step"] for row in RunDirectory(output).read_metrics() if "loss" in row]
    assert steps == [1, *range(10, 10 * len(steps), 10)]  # it went on and did not begin again
    os.kill(job, signal.SIGTERM)
    until(lambda: not is_running(job), log)
    assert log.read_text().count("stopped and saved at step") == 2


def fake_slurm(folder: Path) -> str:
    """Commands of SLURM that take a job and do nothing; return the PATH on which they are."""
    for name, says in (("srun", ""), ("sbatch", "Submitted batch job 1234")):
        (folder / name).write_text(f'#!/bin/sh\necho "{says}"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_slurm_is_asked_for_what_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", fake_slurm(tmp_path))
    asked = {"nodes": 2, "processes-per-node": 4, "gpus-per-node": 4, "cpus-per-process": 6}
    asked |= {"hours": 2, "memory-gb": 64, "warning-seconds": 300}
    words = [f"--slurm.{name}={value}" for name, value in asked.items()]
    words += ["--slurm.partition=gpu", "--slurm.account=us", "--tasks=16"]
    output = str(tmp_path / "run")
    assert main(["train", "--output", output, "--launcher", "slurm", *words]) == 0
    printed = capsys.readouterr().out
    assert "submitted job 1234 (8 processes)" in printed
    assert f"{tmp_path}/run-jobs/1234_0_log.out; stop it with: scancel 1234" in printed
    [script] = (tmp_path / "run-jobs").glob("*submission.sh")
    lines = script.read_text(encoding="utf-8").splitlines()
    for option in (
        *("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6", "time=120"),
        *("mem=64GB", "signal=USR2@300", "partition=gpu", "account=us", "job-name=vsm-run"),
    ):
        assert f"#SBATCH --{option}" in lines
    assert not any("qos" in line for line in lines)


def test_a_process_of_a_slurm_job_finds_the_others_and_resumes_when_it_was_requeued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_PROCID": "3"}
    job |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "of an outer job")
    monkeypatch.delenv("MASTER_PORT")
    seen: list[list[str]] = []

    def train(words: Sequence[str]) -> int:
        names = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        assert [os.environ[name] for name in names] == ["node3", "3", "4", "1"]
        seen.append(list(words))
        return 0

    monkeypatch.setattr("vsm.cli.train.main", train)
    for restarts in ("0", "1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        TrainingJob(("--output", "a", "--overwrite"))()
    words = ["train", "--output", "a"]
    assert seen == [[*words, "--overwrite"], [*words, "--resume"]]


def test_a_checkpointed_job_goes_on_instead_of_replacing_what_it_saved() -> None:
    job = TrainingJob(("--output", "a", "--overwrite", "--launcher", "none"))
    later = job.checkpoint()
    assert later.function == TrainingJob(("--output", "a", "--launcher", "none", "--resume"))
    assert later.function.resumed() == later.function


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--launcher", "slurm"], 'launcher: Could not detect "srun"'),
        (["--launcher", "local", "--slurm.nodes", "0"], "nodes: must be greater than 0, got 0"),
        (["--launcher", "local", "--slurm.processes-per-node", "3"], "tasks: 8 tasks of a step"),
        (["--launcher", "local", "--slurm.nodes", "2"], "LocalExecutor can use only one node"),
        (
            ["--launcher=slurm", "--slurm.processes-per-node=4", "--slurm.gpus-per-node=2"],
            "gpus_per_node: 4 processes of a machine need as many GPUs, got 2",
        ),
        (["--launcher", "loacl"], "launcher"),
    ],
)
def test_mistakes_are_named_before_anything_is_submitted(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        code: object = main(["train", "--output", str(tmp_path / "run"), *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_a_run_to_be_replaced_is_left_alone_until_its_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    old = tmp_path / "run" / "config.yaml"
    old.parent.mkdir()
    old.write_text("method: vsm\n", encoding="utf-8")
    words = ["--output", str(old.parent), "--overwrite", "--launcher", "slurm"]
    assert main(["train", *words]) == 2
    assert "srun" in capsys.readouterr().err
    assert old.exists()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SettingsError, match=r"needs submitit: pip install '.*\[slurm\]'"):
        submit("slurm", SlurmSettings(), tmp_path / "run", [])
