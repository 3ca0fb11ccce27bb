"""What reaches a terminal, a table or a pipe: names never command, and every end is one line."""

import csv
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vsm.cli import main as command_line
from vsm.cli.main import main
from vsm.cli.output import ProgressBar, print_json, print_table, printable, say
from vsm.errors import RunError
from vsm.runs.directory import RunDirectory, StepLog, shipped_folder
from vsm.settings import RunSettings
from vsm.system.files import atomic_path, write_text

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e[bold]x[/bold]"
NOT_UTF8 = os.fsdecode(b"caf\xe9")


def assert_harmless(text: str) -> None:
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)
    assert not {"\x7f", "\x9b", "\u202e"} & set(text)


def test_names_are_shown_but_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    print_table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, HOSTILE]])
    with ProgressBar() as bar:
        bar.start(HOSTILE, 2)
        bar.message(HOSTILE)
        bar.advance(2, HOSTILE)
    printed = capsys.readouterr()
    assert_harmless(printed.out)
    assert_harmless(printed.err)
    assert "\\x1b[31mred" in printed.out
    assert "[bold]x[/bold]" in printed.out
    assert printable(NOT_UTF8) == "caf\\xe9"
    assert printable("a\nb", lines=False) == "a\\nb"


def test_json_keeps_every_name_and_commands_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    value = {HOSTILE: NOT_UTF8}
    print_json(value)
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert printed.encode("utf-8")
    assert json.loads(printed) == value


def test_json_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"a": [None, [1.5, None]], "b": {"c": None}}


def test_errors_are_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", f"runs/{HOSTILE}\nTraceback"]) == 2
    error = capsys.readouterr().err
    assert_harmless(error)
    assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["evaluate", "a", f"--{HOSTILE}"])
    assert_harmless(capsys.readouterr().err)


def test_images_and_classes_may_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, label in enumerate(("=1+1", f"{NOT_UTF8}", "\x1b[31m")):
        (tmp_path / "support" / label).mkdir(parents=True)
        Image.new("L", (28, 28), 90 * number).save(tmp_path / "support" / label / "a.png")
    (tmp_path / "query").mkdir()
    Image.new("L", (28, 28), 80).save(tmp_path / "query" / f"{NOT_UTF8}\x1b.png")
    words = ["classify", "--support", str(tmp_path / "support"), "--query", str(tmp_path / "query")]
    assert main(words) == 0
    assert_harmless(capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["classes"]) == {"=1+1", NOT_UTF8, "\x1b[31m"}
    assert Path(found["answers"][0]["image"]).is_file()
    assert main([*words, "--csv", str(tmp_path / "a.csv")]) == 0
    header, row = csv.reader((tmp_path / "a.csv").read_text("utf-8").splitlines())
    assert "'=1+1" in header
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in (*header, *row))
    memory = tmp_path / "m.safetensors"
    learn = ["--images", str(tmp_path / "support"), "--model", "glyphs-5w1s"]
    assert main(["memory", "add", str(memory), *learn]) == 0
    capsys.readouterr()
    assert main(["memory", "show", str(memory), "--json"]) == 0
    names = {slot["name"] for slot in json.loads(capsys.readouterr().out)["slots"]}
    assert {"=1+1", NOT_UTF8, "\x1b[31m"} <= names


def start(*words: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", "vsm", *words], text=True, **options)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start("models", "--json", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_output_may_be_closed_from_the_start() -> None:
    closing = (
        "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    words = ["-c", closing, "-m", "vsm", "models"]
    ended = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_folder_in_place_of_a_state_changes_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.open(RunSettings(), resume=False)
    run.metrics.write_text("kept")
    run.resume.mkdir()
    with pytest.raises(RunError, match="is not a regular file; remove it"):
        run.open(RunSettings(), resume=True)
    assert run.metrics.read_text() == "kept"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reading:
        write_text(pipe, "told")
        assert reading.communicate(timeout=60)[0] == b"told"
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="No space left on device") as full:
        write_text(Path("/dev/full"), "much")
    assert full.value.filename == "/dev/full"
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        process = start("models", "--json", stdout=full, stderr=subprocess.PIPE)
        error = process.communicate(timeout=300)[1]
    assert (process.returncode, error.count("\n")) == (1, 1)
    assert "No space left on device" in error


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_interruption_while_importing_is_one_line(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if wrapped:
                raise ImportError("a library explains it otherwise") from error
            raise

    monkeypatch.setattr(sys.modules["vsm.cli.main"], "open_command", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "vsm train: interrupted\n"
    assert callable(command_line)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 9 bytes")])
def test_too_little_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["vsm.cli.main"], "open_command", fail)
    assert main(["train"]) == 1
    assert "not enough memory" in capsys.readouterr().err


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        script = (
            "from pathlib import Path; from vsm.runs.directory import RunDirectory\n"
            f"with RunDirectory(Path({str(run.path)!r})).locked(): pass"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "another process is writing the run in" in done.stderr
        with pytest.raises(RunError, match="another process is writing"), run.locked():
            pass
        (run.path / "config.yaml").touch()
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    with run.locked():
        pass
    with RunDirectory(tmp_path / "unused").locked():
        pass
    assert not (tmp_path / "unused").exists()


def test_a_disk_that_refuses_names_the_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"), atomic_path(target):
        full()
    with (
        pytest.raises(PermissionError, match=r"denied: '.*a\.txt'"),
        atomic_path(target) as temporary,
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(temporary))
    assert list(tmp_path.iterdir()) == []
    file = Path("/dev/full").open("w")  # noqa: SIM115 - closed where it can be written
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        StepLog(file).write({"step": 1})
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    file.close()


def test_an_unreadable_file_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shipped_folder("glyphs-5w1s"), tmp_path / "model")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for anybody but root
    assert main(["memory", "show", str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert error.endswith("memory.safetensors: Permission denied\n")
