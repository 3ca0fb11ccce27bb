"""YAML and JSON that somebody else may have written: bounded, unchanged, and quoted briefly."""

import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from vsm.cli import main
from vsm.errors import DocumentError, RunError, SettingsError
from vsm.runs.configuration import check_settings, read_settings, settings_to_yaml
from vsm.runs.directory import RunDirectory
from vsm.settings import RunSettings
from vsm.system.files import (
    read_json,
    read_mapping,
    read_object,
    read_yaml,
    shortened,
    with_digest,
    with_digest_line,
    write_json,
)

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
OPENED: list[str] = []
WATCHED: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and str(arguments[0]).endswith(tuple(WATCHED)):
        OPENED.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextmanager
def opened(name: str) -> Iterator[list[str]]:
    """Collect every attempt to open a file of that name, by whatever library."""
    OPENED.clear()
    WATCHED.append(name)
    try:
        yield OPENED
    finally:
        WATCHED.clear()


@contextmanager
def at_once() -> Iterator[None]:
    """Fail if the block waits, as for the other end of a pipe."""

    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "has an alias for a list or mapping; write it out"),
        ("a: &a [*a]\n", "has an alias for a list"),
        ("a: &a {x: *a}\n", "has an alias for a list"),
        ("[" * 200_000, "is nested deeper than 300 levels"),
        (
            "x:\n" + "".join(" " * n + "- \n" for n in range(1, 400)),
            "is nested deeper than 300 levels",
        ),
        ("a: [1", "is not YAML: "),
        ("x: !!python/object/apply:os.system [true]", "is not YAML: could not determine"),
        ("x: " + "y" * 2**20, "has 1,048,579 bytes, but at most 1,048,576"),
    ],
)
def test_yaml_that_is_too_much_is_refused_before_it_is_built(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert str(caught.value).count("\n") == 0
    assert len(caught.value.reason) < 400


def test_yaml_is_read_as_the_settings_parser_reads_it(tmp_path: Path) -> None:
    text = (
        "rate: 1e-3\nminus: -2.5E+4\nhalf: .5\nall: .inf\nnone: null\nyes: true\nwhen: 2020-01-01\n"
        "version: 1.2.3\nname: e5\nshared: &s 2\nagain: *s\n"
    )
    (tmp_path / "a.yaml").write_text(text)
    expected = {
        "rate": 1e-3, "minus": -2.5e4, "half": 0.5, "all": float("inf"), "none": None,
        True: True, "when": "2020-01-01", "version": "1.2.3", "name": "e5", "shared": 2,
        "again": 2,
    }  # fmt: skip
    assert read_yaml(tmp_path / "a.yaml") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "is nested deeper than 300 levels"),
        (b'{"a":' * 100_000, "is nested deeper than 300 levels"),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        (b"{", "is not JSON: "),
        (b"1" * 5000, "is not JSON: Exceeds the limit"),
        (b"", "is not JSON: "),
    ],
)
def test_json_that_is_too_much_or_none_is_refused(text: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(DocumentError) as caught:
        read_json(tmp_path / "a.json")
    assert caught.value.reason.startswith(reason)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_brackets_in_texts_are_no_levels(tmp_path: Path) -> None:
    value = {"a": "[" * 1000 + '\\" {' * 500, "b": [[1]] * 500}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null"])
def test_what_is_no_object_or_mapping_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(DocumentError, match="expected a JSON object, got "):
        read_object(tmp_path / "a")
    with pytest.raises(DocumentError, match="expected a mapping, as in 'way: 5', got "):
        read_mapping(tmp_path / "a")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
    with at_once(), pytest.raises(DocumentError, match=r"is not a regular file"):
        read_yaml(path)
    if kind == "socket":
        listening.close()


def test_every_change_of_a_written_document_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"a": [1.5, None, "ü\udcff"], "b": {"1": True}}
    write_json(path, value, indent=1)
    assert read_json(path) == value
    content = path.read_bytes()
    noticed = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        try:
            assert read_json(path).keys() & value.keys() == value.keys()
        except DocumentError:
            noticed += 1
        else:  # blanks, or the word "digest" itself, without which nothing is promised
            shown = flipped.decode()
            assert {k: v for k, v in json.loads(shown).items() if k in value} == value
    assert noticed > len(content) // 2


def test_the_digest_of_a_document_is_that_of_its_values() -> None:
    first, second = {"a": 1, "b": {2: 0.1}}, {"b": {"2": 0.1}, "a": 1}
    assert with_digest(first)["digest"] == with_digest(second)["digest"]
    assert with_digest(first)["digest"] != with_digest({**second, "a": 2})["digest"]


def test_settings_that_were_changed_are_refused_until_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(settings_to_yaml(RunSettings(way=7)))
    assert read_settings(RunSettings, path).way == 7
    changed = path.read_text().replace("way: 7", "way: 8", 1)
    path.write_text(changed)
    with pytest.raises(SettingsError, match=r"was changed or damaged; .* remove its last line"):
        read_settings(RunSettings, path)
    assert read_mapping(path, verify=False)["way"] == 8
    path.write_text("\n".join(changed.splitlines()[:-1]))
    assert read_settings(RunSettings, path).way == 8
    with pytest.raises(RunError, match="is not a run directory"):
        RunDirectory(tmp_path / "absent").settings()
    assert yaml.safe_load(with_digest_line("a: 1\n")) == {"a": 1}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"memory": "secret.yaml"},
            "has settings of its own, as in 'memory: {…}', got 'sec",
        ),
        ({"model": ["secret.yaml"]}, "model has settings of its own"),
        ({"memory": None}, "memory has settings of its own"),
        ({"memory": {1: 2}}, "expected names of settings, got 1"),
        ({"config": "secret.yaml"}, "'config' is not accepted"),
        ({"__path__": "secret.yaml"}, "expected names of settings, got '__path__'"),
        ({"way": "secret.yaml"}, "Got value: secret.yaml"),
        ({"way": [1] * 100_000}, "Expected a <class 'int'>"),
        (["secret.yaml"], "expected a mapping of settings"),
        (None, "expected a mapping of settings"),
    ],
)
def test_sections_are_mappings_and_no_other_file_is_opened(
    values: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret.yaml").write_text("password: 1\n")
    with opened("secret.yaml") as found, pytest.raises(SettingsError) as caught:
        check_settings(RunSettings, values, Path("file"))
    assert named in str(caught.value)
    assert found == []
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    ["memory: secret.yaml", "config: secret.yaml", "slurm: secret.yaml", BOMB, "[" * 9000, "", "3",
     "way: x", "way: [1", "memory: {recall: wrong}", "unknown: 1", "way: [" + "1, " * 9000 + "]"],
)  # fmt: skip
@pytest.mark.parametrize("way", ["config", "run"])
def test_errors_of_settings_files_are_short_and_open_nothing_else(
    text: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret.yaml").write_text("password: 1\n")
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text)
    Path("run/resume.safetensors").touch()
    words = ["--config", "run/config.yaml", "--output", "o"]
    if way == "run":
        words = ["--output", "run", "--resume"]
    with opened("secret.yaml") as found:
        try:
            code = main(["train", *words])
        except SystemExit as exited:
            code = int(str(exited.code))
    printed = capsys.readouterr()
    assert (code, printed.out, found) == (2, "", [])
    assert printed.err.count("\n") <= 3
    assert len(printed.err) < 600
    assert not Path("o").exists()


def test_a_pipe_in_place_of_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with at_once():
        assert main(["train", "--config", str(tmp_path / "pipe"), "--output", "o"]) == 2
    assert "pipe: is not a regular file" in capsys.readouterr().err


def test_a_damaged_measurement_is_named_by_its_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.step_log(0) as log:
        log.write({"step": 1, "loss": 0.5})
        log.write({"step": 2, "loss": 0.25})
    whole = run.metrics.read_text()
    assert run.read_metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    run.metrics.write_text(whole + '{"step": 3, "lo')  # a kill
    assert len(run.read_metrics()) == 2
    for changed in (whole.replace("0.5", "0.6"), whole.replace("}\n{", "{"), "[1]\n" + whole):
        run.metrics.write_text(changed)
        with pytest.raises((DocumentError, RunError), match=r"metrics.jsonl, line 1: "):
            run.read_metrics()


def test_what_is_quoted_is_one_short_line() -> None:
    assert shortened("a\n  b\tc") == "a b c"
    long = shortened("x" * 500 + "\n" + "y" * 500)
    assert long == "x" * 150 + " … " + "y" * 150
