"""The command line as a user meets it: in processes of its own, with real signals."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forked import ForkedPython
from launching_helpers import finish, wait_for
from run_helpers import edit_config
from vsm.cli import main
from vsm.cli.main import open_command
from vsm.runs.configuration import preset_paths

SMALL = [
    *("--way", "5", "--queries", "2", "--tasks", "1", "--checkpoint-every", "5"),
    *("--model.channels", "4", "--validation.every", "10", "--validation.episodes", "5"),
    *("--learn-memory", "false"),
]
TINY = [
    *SMALL,
    *("--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
]


def start(*arguments: str | Path) -> ForkedPython:
    return ForkedPython({}, "-m", "vsm", *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs, a and b."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in (("a", "protonet"), ("b", "vsm")):
        arguments = ["train", "--method", method, "--steps", "10", "--output", str(folder / name)]
        words = SMALL if method == "protonet" else TINY
        assert main([*arguments, *words, "--json"]) == 0
    return folder


def one_json_object(text: str) -> dict[str, Any]:
    [line] = text.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def test_evaluate_prints_one_json_object_with_the_promised_keys(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs / "b"), "--episodes", "30", "--seed", "3", "--json"]) == 0
    printed = one_json_object(capsys.readouterr().out)
    assert {
        *("method", "data", "split", "way", "shot", "queries", "episodes", "seed"),
        *("accuracy", "ci95", "nll", "ece"),
    } <= set(printed)
    assert printed["method"] == "vsm"
    assert printed["split"] == "test"
    assert (printed["way"], printed["shot"], printed["queries"]) == (5, 1, 15)
    assert (printed["episodes"], printed["seed"]) == (30, 3)
    assert 0.2 <= printed["accuracy"] <= 1
    assert 0 < printed["ci95"] < 0.2


def test_the_memory_can_be_cut_for_an_evaluation_and_stays_complete_on_disk(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (runs / "b" / "memory.safetensors").read_bytes()
    slots = []
    for cut in ([], ["--memory-slots", "4"], ["--memory-slots", "0"]):
        assert main(["evaluate", str(runs / "b"), "--episodes", "5", "--json", *cut]) == 0
        slots.append(one_json_object(capsys.readouterr().out)["memory_slots"])
    assert slots[0] > 4
    assert slots[1:] == [4, 0]
    assert (runs / "b" / "memory.safetensors").read_bytes() == before
    assert main(["evaluate", str(runs / "b"), "--memory-slots", "-1"]) == 2
    assert "memory_slots: must not be negative, got -1" in capsys.readouterr().err


def test_compare_prints_runs_and_paired_differences(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = str(runs / "a"), str(runs / "b")
    assert main(["compare", a, b, "--episodes", "40", "--json"]) == 0
    printed = one_json_object(capsys.readouterr().out)
    assert [run["run"] for run in printed["runs"]] == [a, b]
    [difference] = printed["differences"]
    assert (difference["a"], difference["b"]) == (b, a)
    gap = printed["runs"][1]["accuracy"] - printed["runs"][0]["accuracy"]
    assert difference["difference"] == pytest.approx(gap)
    unpaired = sum(run["ci95"] ** 2 for run in printed["runs"]) ** 0.5
    assert 0 < difference["ci95"] < 1.5 * unpaired


def test_the_same_command_prints_the_same_numbers(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for _ in range(2):
        main(["evaluate", str(runs / "b"), "--episodes", "20", "--json"])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_tables_are_for_people(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", str(runs / "a"), str(runs / "b"), "--episodes", "20"])
    printed = capsys.readouterr().out
    assert "glyphs, test classes, 5-way 1-shot" in printed
    assert "±" in printed
    assert "paired differences" in printed


def test_help_needs_neither_torch_nor_time() -> None:
    script = (
        "import sys; from vsm.cli import main; main(['--help'])\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--memory.retention" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "unknown command 'trian'"),
        (["train"], "output"),
        (["train", "--output", "x", "--stpes", "3"], "--stpes"),
        (["train", "--output", "x", "--method", "maml"], "method"),
        (["train", "--output", "x", "--way", "many"], "way"),
        (["train", "--output", "x", "--preset", "papr"], "unknown preset 'papr'"),
        (["train", "--output", "x", "--memory.retention", "2"], "retention: must lie in"),
        (["train", "--output", "x", "--data", "cats"], "unknown dataset 'cats'"),
        (["train", "--output", "x", "--shot", "19"], "shot + queries: 19 + 15 = 34"),
        (["evaluate", "nowhere"], "nowhere is not a run directory"),
    ],
)
def test_mistakes_are_named_with_exit_code_2(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert named in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_commands_for_one_process_refuse_to_be_many(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", "vsm evaluate: works in one process, but WORLD_SIZE"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["evaluate", str(runs / "a")]) == 2
        assert capsys.readouterr().err.startswith(said)


def test_infeasible_evaluations_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(runs / "a"), "--way", "900"]) == 2
    assert "way: 900 classes asked for, but the test split of glyphs has" in capsys.readouterr().err
    assert main(["evaluate", str(runs / "a"), "--episodes", "0"]) == 2
    assert "episodes: an interval needs at least 2, got 0" in capsys.readouterr().err


def test_a_second_run_in_the_same_place_needs_a_decision(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(runs / "a")
    assert main(["train", "--output", place, *TINY]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_run_that_diverges_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = ["--optimizer.learning-rate", "1e30", "--steps", "20"]
    assert main(["train", "--output", str(tmp_path / "run"), *TINY, *rate]) == 2
    assert "training diverged: the loss is" in capsys.readouterr().err


def test_resuming_where_nothing_is_says_so_and_never_over_foreign_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    arguments = ["train", "--output", str(place), "--resume", "--steps", "2", *TINY]
    assert main(arguments) == 0
    assert "nothing to resume" in capsys.readouterr().err
    (place / "config.yaml").unlink()
    assert main(arguments) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    assert main(["train", "--output", "", *TINY]) == 2
    assert "output: give the run a folder of its own" in capsys.readouterr().err


def test_weights_that_do_not_fit_the_settings_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs / "b", copy)
    edit_config(copy, "channels: 4", "channels: 8")
    assert main(["evaluate", str(copy), "--episodes", "5"]) == 2
    assert "do not fit its settings" in capsys.readouterr().err
    (copy / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["evaluate", str(copy), "--episodes", "5"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_output_that_cannot_be_a_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in ("file", "file/run"):
        assert main(["train", "--output", str(tmp_path / place), *TINY]) == 2
        assert "output: cannot make the folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_is_one_line_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "resume.safetensors")

    monkeypatch.setattr("vsm.training.save_resume", full)
    assert main(["train", "--output", str(tmp_path / "run"), "--steps", "2", *TINY]) == 1
    errors = capsys.readouterr().err
    assert "vsm train: resume.safetensors: No space left on device" in errors
    assert "Traceback" not in errors


def test_settings_cannot_change_on_resume_except_for_more_steps(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(runs / "a")
    assert main(["train", "--output", place, "--resume", "--queries", "3"]) == 2
    assert "queries: the run in" in capsys.readouterr().err
    assert main(["train", "--output", place, "--resume", "--steps", "20"]) == 2
    assert "steps: the run in" in capsys.readouterr().err  # the cosine schedule depends on them
    assert main(["train", "--output", place, "--resume", "--overwrite"]) == 2
    assert "contradict each other" in capsys.readouterr().err
    words = ["--resume", "--learn-memory", "false", "--json"]
    assert main(["train", "--output", place, *words]) == 0
    assert one_json_object(capsys.readouterr().out)["run"] == place


def test_a_bare_switch_means_true() -> None:
    words = ["--augment", "--model.residual", "false", "--steps", "3", "--freeze_backbone"]
    _, parser = open_command("train")
    parsed = parser.parse_args(["--output", "run", *words])
    assert (parsed.augment, parsed.freeze_backbone, parsed.steps) == (True, True, 3)
    assert parsed.model.residual is False


def test_yaml_files_stack_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("method: protonet\nsteps: 3\nway: 4\n")
    (tmp_path / "b.yaml").write_text("way: 6\n")
    out = tmp_path / "run"
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert main(["train", *files, "--output", str(out), *SMALL[2:], "--steps", "2", "--json"]) == 0
    config = (out / "config.yaml").read_text()
    assert "method: protonet\nway: 6\n" in config
    assert "steps: 2\n" in config


def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    arguments = ["train", "--method", "vsm", "--steps", "40", *TINY]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted, process = (start(*arguments, "--output", out) for out in (whole, killed))
    wait_for(killed / "resume.safetensors", [process])
    process.kill()
    resumed = start("train", "--output", killed, "--resume", "--learn-memory", "false")
    assert [code for code, _ in finish([uninterrupted, process, resumed])] == [0, -9, 0]
    for name in (
        "model.safetensors",
        "memory.safetensors",
        "calibration.json",
        "resume.safetensors",
    ):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


def test_ctrl_c_saves_and_exits_130(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", "--steps", "100000", "--output", run, *TINY)
    wait_for(run / "resume.safetensors", [process])
    process.send_signal(signal.SIGINT)
    [(code, errors)] = finish([process])
    assert code == 130
    assert "stopped and saved at step" in errors
    assert "Traceback" not in errors
    assert "--resume" in errors


@pytest.mark.usefixtures("few_read_settings")
def test_the_demo_writes_a_report_with_every_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text("model: {channels: 8}\nvalidation: {episodes: 4}\n")
    monkeypatch.setattr("vsm_lab.cli.demo.preset_paths", lambda name: [*preset_paths(name), narrow])
    monkeypatch.setattr("vsm_lab.episode_plots.SIZES_SHOWN", (0, 4))
    # A machine so busy that placing any legend takes ten seconds must not warn of it.
    monkeypatch.setattr(
        "matplotlib.legend.time", SimpleNamespace(perf_counter=count(0, 10).__next__)
    )
    out = tmp_path / "demo"
    assert main(["demo", "--output", str(out), "--steps", "3", "--episodes", "4", "--json"]) == 0
    printed = one_json_object(capsys.readouterr().out)
    assert [run["method"] for run in printed["runs"]] == ["protonet", "vpn", "vsm", "vsm"]
    found = [run["inference"] for run in printed["runs"]]
    assert found == [None, "conjugate", "conjugate", "gaussian"]
    page = (out / "report.html").read_text()
    headings = "Episodes, Recalled classes, What the memory has learned, Prototype, Training"
    for heading in (*headings.split(", "), "Calibration"):
        assert f"<h2>{heading}" in page
    assert page.count("data:image/png;base64,") == 9
    assert main(["demo", "--output", str(out), "--steps", "3"]) == 2
    assert "already holds a demo" in capsys.readouterr().err
    (out / "precious.txt").write_text("mine")
    assert main(["demo", "--output", str(out), "--overwrite"]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (out / "precious.txt").exists()


@pytest.fixture(scope="module")
def baseline_memories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Trained runs of memories by other authors."""
    folder = tmp_path_factory.mktemp("baseline-memories")
    paths = [folder / method for method in ("mann", "kanerva")]
    small_memories = (["--mann.slots", "16", "--mann.width", "4"], ["--kanerva.slots", "8"])
    for path, small in zip(paths, small_memories, strict=True):
        arguments = ["train", "--method", path.name, "--steps", "4", "--output", str(path)]
        assert main([*arguments, *TINY, *small, "--json"]) == 0
    return paths


def test_baseline_memories_are_evaluated_and_compared(
    baseline_memories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = ["--episodes", "5", "--way", "3", "--shot", "2"]  # other than in training
    assert main(["compare", *map(str, baseline_memories), *episodes, "--json"]) == 0
    printed = one_json_object(capsys.readouterr().out)
    assert [run["method"] for run in printed["runs"]] == ["mann", "kanerva"]
    assert [run["memory_slots"] for run in printed["runs"]] == [None, 8]
    cut = ["evaluate", str(baseline_memories[1]), *episodes, "--json", "--memory-slots"]
    assert main([*cut, "0"]) == 0
    assert one_json_object(capsys.readouterr().out)["memory_slots"] == 0
    assert main([*cut, "3"]) == 2
    assert "spreads every class over all of its slots" in capsys.readouterr().err


def draw_folder(root: Path, num_classes: int) -> None:
    """Class folders of small gray images, each class a stripe of its own."""
    for c in range(num_classes):
        folder = root / f"class{c:02d}"
        folder.mkdir(parents=True)
        for i in range(6):
            pixels = np.zeros((28, 28), np.uint8)
            pixels[2 * c % 26 : 2 * c % 26 + 2 + i % 3] = 255
            Image.fromarray(pixels).save(folder / f"{i}.png")


def test_a_folder_of_images_trains_and_evaluates_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_folder(tmp_path / "images", 25)
    monkeypatch.chdir(tmp_path)
    episode = ["--way", "2", "--shot", "1", "--queries", "2"]
    arguments = ["train", "--data", "folder:images", "--output", "run", "--steps", "4"]
    assert main([*arguments, *TINY, *episode, "--json"]) == 0
    capsys.readouterr()
    monkeypatch.chdir("/")
    assert main(["evaluate", str(tmp_path / "run"), *episode, "--episodes", "5", "--json"]) == 0
    assert one_json_object(capsys.readouterr().out)["episodes"] == 5


def test_data_is_listed_prepared_and_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_folder(tmp_path / "images", 10)
    assert main(["data", "prepare", "folder", "--from", str(tmp_path / "images"), "--json"]) == 0
    prepared = one_json_object(capsys.readouterr().out)
    assert prepared["classes"] == 10
    assert prepared["image_shape"] == [1, 28, 28]
    assert main(["data", "list", "--json"]) == 0
    rows = one_json_object(capsys.readouterr().out)["datasets"]
    assert {"glyphs", "omniglot", "cifar-fs", "mini-imagenet", prepared["name"]} <= {
        row["name"] for row in rows
    }
    assert main(["data", "info", "glyphs", "--json"]) == 0
    info = one_json_object(capsys.readouterr().out)
    assert {"name", "classes", "images", "image_shape", "splits"} <= set(info)
    assert set(info["splits"]) == {"train", "validation", "test"}
    assert main(["data", "list"]) == 0
    assert main(["data", "info", prepared["name"], "--verify"]) == 0
    captured = capsys.readouterr()
    assert "CIFAR-FS" in captured.out
    assert "every pixel is as it was prepared" in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prepare", "omniglot"], "prepare omniglot needs --from PATH"),
        (["prepare", "mini-imagenet", "--download"], "has no public download"),
        (["prepare", "cats"], "unknown dataset 'cats'; known: glyphs, omniglot"),
        (["prepare", "omniglot", "--from", "nowhere"], "nowhere does not exist; check the path"),
        (["info", "cifar-fs"], "vsm data prepare cifar-fs --from PATH | --download"),
        (["info", "folder:nowhere"], "nowhere"),
        (["fix"], "fix"),
    ],
)
def test_mistakes_with_data_are_named_with_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["data", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_a_bar_that_never_moved_is_not_left_beside_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "ship", str(tmp_path / "absent"), "--name", "mine"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("absent is not a run directory: it has no config.yaml")
