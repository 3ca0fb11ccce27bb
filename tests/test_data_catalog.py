"""What the command line asks of the catalog, and that nothing half-written ever stays."""

import json
import os
import time
from pathlib import Path

import pytest

from data_layouts import color_image, encoded, leftovers, write_zip
from forked import ForkedPython
from launching_helpers import finish
from tiny import RecordedProgress
from vsm.data import catalog, open_dataset, open_images, prepared
from vsm.data.catalog import describe, list_datasets, prepare
from vsm.data.published import CATALOG, PublicFile
from vsm.errors import DataError
from vsm.system.progress import Progress

CLASSES = ("skyscraper", "otter", "baby")  # one of each split of CIFAR-FS


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    return tmp_path / "prepared"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {
        f"cifar100/data/{name}/{number:04}.png": encoded(color_image(number, 32))
        for name in CLASSES
        for number in range(2)
    }
    return write_zip(tmp_path / "cifar100.zip", files)


def test_preparing_twice_does_nothing_the_second_time(source: Path) -> None:
    first = prepare("cifar-fs", source, allow_missing=True)
    written = (first / "images.npy").stat().st_mtime_ns
    source.unlink()  # not even needed
    assert prepare("cifar-fs", source) == first
    assert prepare("cifar-fs") == first
    assert (first / "images.npy").stat().st_mtime_ns == written


def test_a_description_says_everything_and_is_json(source: Path, root: Path) -> None:
    prepare("cifar-fs", source, allow_missing=True)
    described = json.loads(json.dumps(describe("cifar-fs")))
    assert described["name"] == "cifar-fs"
    assert described["classes"] == 3
    assert described["images"] == 6
    assert described["image_shape"] == [3, 32, 32]
    assert described["splits"] == {"train": 1, "validation": 1, "test": 1}
    assert described["class_sizes"] == {"smallest": 2, "largest": 2}
    assert described["bytes"] == 6 * 32 * 32 * 3
    assert described["location"] == str(root / "cifar-fs")
    assert str(source) in described["origin"]
    assert len(described["sha256"]) == 64


def test_the_list_shows_what_is_prepared(source: Path, root: Path) -> None:
    known = ["glyphs", *CATALOG]
    assert [row["name"] for row in list_datasets()] == known
    assert not any(row["prepared"] for row in list_datasets())
    prepare("cifar-fs", source, allow_missing=True)
    rows = {row["name"]: row for row in json.loads(json.dumps(list_datasets()))}
    assert rows["cifar-fs"]["prepared"]
    assert rows["cifar-fs"]["location"] == str(root / "cifar-fs")
    assert rows["cifar-fs"]["bytes"] > 6 * 32 * 32 * 3
    assert not rows["mini-imagenet"]["prepared"]
    assert rows["omniglot"]["download"]
    assert not rows["mini-imagenet"]["download"]


@pytest.mark.parametrize("name", list(CATALOG))
def test_opening_what_is_not_prepared_says_what_to_run(name: str) -> None:
    with pytest.raises(DataError, match=f"run `vsm data prepare {name} --from PATH") as caught:
        open_dataset(name)
    assert ("--download" in str(caught.value)) == bool(CATALOG[name].downloads)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"unknown dataset 'imagenet'; known: glyphs, omniglot, .*"):
        open_dataset("imagenet")
    with pytest.raises(DataError, match="unknown dataset"):
        prepare("imagenet")


def test_preparing_without_a_source_says_what_is_needed() -> None:
    with pytest.raises(DataError, match=r"prepare omniglot needs --from PATH, .*, or --download"):
        prepare("omniglot")
    with pytest.raises(DataError, match="mini-imagenet has no public download"):
        prepare("mini-imagenet", download=True)
    with pytest.raises(DataError, match="--from and --download exclude each other"):
        prepare("omniglot", Path("here"), download=True)


def test_downloads_are_fetched_and_prepared(
    source: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(file: PublicFile, folder: Path, progress: Progress) -> Path:
        assert folder == root / "downloads"
        progress.start(f"downloading {file.name}", 1)
        progress.advance(1)
        return source

    monkeypatch.setattr(catalog, "fetch", pretend)
    progress = RecordedProgress()
    prepare("cifar-fs", download=True, allow_missing=True, progress=progress)
    assert progress.shown[0] == ("downloading cifar-100-python.tar.gz", 1, 1)
    assert progress.shown[-1] == ("preparing cifar-fs", 6, 6)
    assert len(open_images("cifar-fs").images) == 6


def test_an_interrupted_preparation_leaves_nothing(source: Path, root: Path) -> None:
    class Interrupting(Progress):
        def advance(self, count: int = 1, note: str = "") -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("cifar-fs", source, allow_missing=True, progress=Interrupting())
    assert leftovers(root) == []
    assert not prepared.is_prepared("cifar-fs")


FULL_DISK = """
import resource, sys
from pathlib import Path
from vsm.data.catalog import prepare
from vsm.errors import DataError

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    prepare("cifar-fs", Path(sys.argv[1]), allow_missing=True)
except DataError as error:
    sys.exit(str(error))
"""


def test_what_a_killed_preparation_left_is_swept_away_a_day_later(source: Path, root: Path) -> None:
    for name, age_days in ((".cifar-fs.old", 2), (".cifar-fs.running", 0), (".omniglot.old", 2)):
        (root / name).mkdir(parents=True)
        then = time.time() - age_days * 86_400
        os.utime(root / name, (then, then))
    prepare("cifar-fs", source, allow_missing=True)
    left = sorted(Path(path).name for path in leftovers(root))
    assert left == [".cifar-fs.running", ".omniglot.old"]


def test_a_full_disk_is_reported_and_leaves_nothing(
    source: Path, root: Path, tmp_path: Path
) -> None:
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    [(code, told)] = finish([ForkedPython({}, script, source)])
    assert code == 1
    assert told.startswith(f"data: cannot write {root / 'cifar-fs'}: ")
    assert "free some space or point VSM_DATA at a folder" in told
    assert told.count("\n") == 1
    assert leftovers(root) == []


def test_damage_is_found_by_the_checksum(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "NUM_BLOCKS", 1)  # of few images, all would be among the blocks
    monkeypatch.setattr(prepared, "BLOCK_BYTES", 128)
    folder = prepare("cifar-fs", source, allow_missing=True)
    prepared.verify("cifar-fs")
    with (folder / "images.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    with pytest.raises(DataError, match=r"the checksum does not match.*prepare it again"):
        prepared.verify("cifar-fs")


def test_a_damaged_preparation_is_not_taken_for_a_good_one(source: Path) -> None:
    folder = prepare("cifar-fs", source, allow_missing=True)
    (folder / "images.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"is damaged .*delete that folder and prepare it again"):
        prepare("cifar-fs", source)


def test_the_documentation_names_every_dataset() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    for name in ("glyphs", *CATALOG):
        assert f"`{name}`" in page
