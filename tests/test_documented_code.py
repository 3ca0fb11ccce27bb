"""Every code block of README and docs runs as its page says: see documented_code.py."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import vsm
from conversions import keep_conversions
from documented_code import (
    ROOT,
    Block,
    blocks_of,
    commands_of_ours,
    pages,
    require_known_program,
    without_numbers,
)
from tiny import variant
from vsm.cli import main
from vsm.cli.main import open_command
from vsm.data import ImageDataset, open_dataset
from vsm.runs.directory import CONFIG_NAME, find_run, shipped_folder
from vsm.settings import (
    FewShotValidationSettings,
    PretrainSettings,
    RunSettings,
    SamplingSettings,
    ValidationSettings,
)
from vsm_lab.study.definition import read_study

PAGES = pages()
FEW_EPISODES = ["--queries", "2", "--episodes", "4"]
SHRUNK = {
    "evaluate": FEW_EPISODES,
    "compare": FEW_EPISODES,
    "reproduce": ["--budget", "tiny", "--seeds", "1", "--data", "glyphs"],
    "train": [],
    "pretrain": [],
}
"""What is added to commands of shrunk blocks; trainings are shrunk by their settings."""
OBJECTS = ("anchor", "bow", "crown", "drum", "eel")
WITH_FOLDERS = ("README.md", "docs/classifier.md")
"""Pages that presume folders of images, `support` and `query`."""
WITH_ALL_GLYPHS = ("docs/tutorial-practitioners.md",)
TRAINED = {
    "README.md": {"runs/demo/vsm": "shipped"},
    "docs/classifier.md": {"runs/demo/vsm": "shipped"},
    "docs/baselines.md": {"runs/a": "small", "runs/b": "small"},
    "docs/models.md": {"runs/mine": "shipped"},
}
"""Runs that a page presumes: copies of the shipped model of glyphs, or trained for two steps."""


class Reached(Exception):  # noqa: N818 - nothing went wrong
    """All arguments were accepted, and the work itself would begin."""


@dataclass
class Reader:
    """Somebody who types what a page says, in the page's order, in a folder with images."""

    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]
    image_folder: str
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "documentation"})
    printed: str = ""

    def read(self, block: Block) -> None:
        """Do what a block says."""
        if block.mark == "file":
            self._write(Path(block.reason), block.code)
        elif block.mark == "output":
            assert without_numbers(block.code) == without_numbers(self.printed), block.place
        elif block.mark != "shown":
            self._run(block)
            self.printed = self.capture.readouterr().out

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _run(self, block: Block) -> None:
        with self.patch.context() as patch:
            if block.mark == "shrunk":
                shrink_trainings(patch, self.image_folder)
            if block.language == "python":
                exec(compile(block.code, block.place, "exec"), self.names)
                return
            for words in block.commands():
                if block.mark == "parsed":
                    check(words, block.place, patch)
                else:
                    assert words[0] == "vsm", f"{block.place}: mark {words[0]} as parsed"
                    few = SHRUNK[words[1]] if block.mark == "shrunk" else []
                    assert main([*words[1:], *few]) == 0, (
                        f"{block.place}: {' '.join(words)}: {self.capture.readouterr().err}"
                    )


def check(words: list[str], place: str, patch: pytest.MonkeyPatch) -> None:
    """Give a command to its parser, and build its settings."""
    ours = list(commands_of_ours(words))
    if not ours:
        require_known_program(words, place)
    for command, *arguments in ours:
        if command in ("train", "pretrain"):
            for work in (
                "vsm.training.train",
                "vsm.pretraining.pretrain",
                "vsm.cli.train.submit",
            ):
                patch.setattr(work, stop)
            with pytest.raises(Reached):
                raise SystemExit(f"{place}: exit code {main([command, *arguments])}")
        else:
            parsed = open_command(command)[1].parse_args(dashes_to_underscores(arguments))
            for path in parsed.studies if command == "study" else ():
                read_study(path)


def stop(*_: object, **__: object) -> None:
    raise Reached


def dashes_to_underscores(words: list[str]) -> list[str]:
    return [
        re.sub(r"^--[\w.-]+", lambda found: "--" + found[0][2:].replace("-", "_"), word)
        for word in words
    ]


def shrink_trainings(patch: pytest.MonkeyPatch, image_folder: str) -> None:
    """Let every training take seconds, from Python and from the command line."""
    train, pretrain = vsm.train, vsm.pretrain

    def train_briefly(settings: RunSettings, *rest: Any, **named: Any) -> vsm.TrainedModel:
        named["learn_memory"] = False
        return train(smaller(settings, image_folder), *rest[:5], **named)

    def pretrain_briefly(settings: PretrainSettings, *rest: Any, **named: Any) -> Any:
        few = FewShotValidationSettings(1, 4, 5, (1,), 2)
        small = replace(settings, data=image_folder, channels=4, epochs=1, validation=few)
        return pretrain(replace(small, batch_size=32), *rest, **named)

    patch.setattr("vsm.training.train", train_briefly)
    patch.setattr("vsm.pretraining.pretrain", pretrain_briefly)
    for name, brief in [("train", train_briefly), ("pretrain", pretrain_briefly)]:
        patch.setattr(vsm, name, brief, raising=False)


def smaller(settings: RunSettings, image_folder: str) -> RunSettings:
    """Return settings of the same kind of run that takes seconds."""
    channels = 4
    if settings.init is not None:
        begun = yaml.safe_load((find_run(settings.init) / CONFIG_NAME).read_text())
        channels = begun.get("model", begun)["channels"]
    own = settings.data.startswith("features:")
    return variant(
        settings,
        data=settings.data if own else image_folder,
        queries=2,
        tasks=1,
        steps=2,
        model=replace(settings.model, channels=channels, hidden_units=8),
        sampling=SamplingSettings(train_prototypes=4, evaluation_prototypes=4),
        validation=ValidationSettings(every=2, episodes=4),
    )


@pytest.fixture(scope="module")
def glyphs() -> ImageDataset:
    dataset = open_dataset("glyphs")
    assert isinstance(dataset, ImageDataset)
    return dataset


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory, glyphs: ImageDataset) -> str:
    """Name a dataset of forty characters of eight drawings each."""
    folder = tmp_path_factory.mktemp("images")
    for class_id in range(40):
        draw(glyphs, class_id, range(8), folder / f"character{class_id:02}")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, image_folder: str) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    vsm.train(smaller(RunSettings(), image_folder), path)
    return path


def draw(dataset: ImageDataset, class_id: int, which: range, folder: Path) -> None:
    """Write some drawings of a character."""
    folder.mkdir(parents=True)
    for number in which:
        pixels = dataset.images[dataset.image_ids(class_id)[number]]
        Image.fromarray(pixels[..., 0]).save(folder / f"{number}.png")


@pytest.fixture
def start_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glyphs: ImageDataset, small_run: Path
) -> Iterator[Callable[[str], None]]:
    """Prepare what a page presumes: images of the reader's own, and runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    keep_conversions(monkeypatch)
    modules = set(sys.modules)

    def start(page: str) -> None:
        if page in WITH_FOLDERS:
            for name, class_id in zip(OBJECTS, glyphs.classes("test").tolist(), strict=False):
                draw(glyphs, class_id, range(2), Path("support") / name)
                draw(glyphs, class_id, range(2, 4), Path("query") / name)
        for path, kind in TRAINED.get(page, {}).items():
            source = small_run if kind == "small" else shipped_folder("glyphs-5w1s")
            shutil.copytree(source, path)
        shutil.copytree(ROOT / "studies", "studies", ignore=shutil.ignore_patterns("figures"))

    yield start
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


@pytest.mark.usefixtures("few_read_settings")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(
    page: Path,
    start_of: Callable[[str], None],
    image_folder: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = str(page.relative_to(ROOT))
    if name in WITH_ALL_GLYPHS:
        request.getfixturevalue("all_glyphs")
    blocks = blocks_of(page.read_text(encoding="utf-8"), name)
    if blocks:
        start_of(name)
    reader = Reader(monkeypatch, capsys, image_folder)
    for block in blocks:
        reader.read(block)


def test_the_readmes_example_is_five_lines() -> None:
    page = ROOT / "README.md"
    blocks = blocks_of(page.read_text(encoding="utf-8"), page.name)
    [block] = [block for block in blocks if block.language == "python"]
    assert len(block.code.split("\n\n", 1)[1].splitlines()) <= 5  # and the imports


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```ruby\nputs 1\n```", r"page:1: nothing runs a block of 'ruby'"),
        ("words\n\n    indented = 1\n", r"page:3: indented code is not run"),
        ("```{code-block} python\n1\n```", r"nothing runs a block of '\{code-block\} python'"),
        (
            "```text\nlayout\n```",
            r"a block of text needs one of the marks output, shown, file, got",
        ),
        ("```yaml\na: 1\n```", r"a block of yaml needs one of the marks file, got \(none\)"),
        ("<!-- block: shown: why -->\n```python\n1\n```", r"marks \(none\), shrunk, file, got sh"),
        ("<!-- block: parsed -->\n```\nvsm demo\n```", r"the mark 'parsed' lacks its reason"),
        (
            "<!-- block: file: a.py -->\nwords\n```yaml\na: 1\n```",
            r"of yaml needs one of the marks",
        ),
    ],
)
def test_a_block_that_nothing_would_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_of(text, "page")


@pytest.mark.parametrize(
    "code",
    [
        "```\nvsm evaluate nowhere\n```",
        "```\nls\n```",
        "```python\nassert False\n```",
        "<!-- block: parsed: long -->\n```\nvsm train --stepps 3 --output a\n```",
        "<!-- block: parsed: long -->\n```\nvsm train --way 0 --output a\n```",
        "<!-- block: parsed: long -->\n```\nvsm evaluate a --shots 3\n```",
        "<!-- block: parsed: long -->\n```\nmake nothing\n```",
        "<!-- block: parsed: long -->\n```\npip install 'vsm[nothing]'\n```",
        "```python\nprint('one word')\n```\n\n<!-- block: output -->\n```text\nanother word\n```",
    ],
)
def test_a_block_that_does_not_do_what_it_says_is_found(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(monkeypatch, capsys, "glyphs")
    *before, last = blocks_of(code, "page")
    for block in before:
        reader.read(block)
    with pytest.raises((AssertionError, SystemExit)):
        reader.read(last)
