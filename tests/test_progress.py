"""Progress: bars that people see, and functions that report to whatever they are given."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classify_helpers import write_run
from run_helpers import train_run
from tiny import RecordedProgress
from vsm.cli.output import ProgressBar, progress_bar
from vsm.data import ImageDataset
from vsm.runs.loading import load
from vsm.settings import RunSettings
from vsm.system.progress import Progress


def counted(text: str, title: str) -> tuple[int, str]:
    """Return what a bar counted and its total, as it was left on the screen."""
    [(done, total)] = re.findall(rf"^{title} .* (\d+)/(\d+|\?) ", text, re.M)
    return int(done), total


def test_a_bar_per_stage_is_left_with_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar.start("first", 4)
        bar.advance()
        bar.advance(3, "loss 0.5")
        bar.start("second", None)
        bar.advance(2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert counted(shown.err, "first") == (4, "4")
    assert counted(shown.err, "second") == (2, "?")
    assert "loss 0.5" in shown.err


def test_a_stage_that_is_begun_again_counts_from_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar.start("download", 10)
        bar.advance(9)
        bar.start("download", 20)
        bar.advance(5)
    assert counted(capsys.readouterr().err, "download") == (5, "20")


def test_messages_are_lines_with_the_title_of_their_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar("vsm", 1, quiet=False) as bar:
        bar.message("step 3: [bold] as it is")
        bar.advance()
    assert "vsm step 3: [bold] as it is\n" in capsys.readouterr().err


def test_a_quiet_bar_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("vsm", 3, quiet=True) as bar:
        bar.advance(3)
        bar.message("done")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


@pytest.mark.parametrize("moved", [True, False])
def test_a_bar_that_never_moved_disappears_with_the_error(
    moved: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        with progress_bar("vsm", 3, quiet=False) as bar:
            if moved:
                bar.advance()
            raise OSError("power cut")

    with pytest.raises(OSError, match="power cut"):
        work()
    assert ("vsm" in capsys.readouterr().err) == moved


@pytest.mark.parametrize("make", [Progress, RecordedProgress, ProgressBar])
def test_training_reports_to_whatever_it_is_given(
    make: Callable[[], Progress],
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)
    progress = make()
    if isinstance(progress, ProgressBar):
        with progress:
            train_run(tiny_settings, tmp_path / "run", progress=progress)
        shown = capsys.readouterr().err
        assert counted(shown, "vsm") == (6, "6")
        assert re.search(r"^vsm step 3: validation .* \(best so far\)$", shown, re.M)
        return
    train_run(tiny_settings, tmp_path / "run", progress=progress)
    assert capsys.readouterr().err == ""
    if isinstance(progress, RecordedProgress):
        assert progress.shown[-1] == ("vsm", 6, 6)


def test_embedding_reports_every_image(tiny_dataset: ImageDataset, tmp_path: Path) -> None:
    trained = load(write_run(tmp_path / "run"))
    progress = RecordedProgress()
    progress.start("embed", 300)
    trained.embed(list(tiny_dataset.images[np.arange(300)]), progress)
    assert progress.shown[-1] == ("embed", 300, 300)
