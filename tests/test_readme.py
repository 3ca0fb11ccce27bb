"""The README's code runs as it stands, with fewer steps."""

import re
from pathlib import Path

import pytest

from vsm.cli.main import COMMANDS

README = Path(__file__).parents[1] / "README.md"


def test_the_api_in_ten_lines_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 11  # ten and the import
    assert "steps=300" in block
    assert "600, seed=0" in block
    monkeypatch.chdir(tmp_path)
    exec(block.replace("steps=300", "steps=2").replace("600, seed=0", "4, seed=0"), {})
    assert re.search(r"\d+\.\d% ± \d+\.\d%, \d+ classes remembered", capsys.readouterr().out)


def test_every_command_the_readme_names_exists() -> None:
    named = set(re.findall(r"^vsm (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)
