"""Folders, images and arrays that no honest program leaves: each is named, or listed once."""

import io
import os
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vsm.data import features, prepared
from vsm.data.archives import open_tree
from vsm.data.dataset import PixelNormalization
from vsm.data.folder import images_below
from vsm.data.images import ImageFormat, decode_files
from vsm.data.prepared import Preparation, open_array
from vsm.errors import DataError
from vsm.system.files import read_object, write_json

FORM = ImageFormat(8, 1)


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 7).save(path)
    return path


def test_links_that_lead_back_list_every_image_once(tmp_path: Path) -> None:
    first, second = image(tmp_path / "a" / "1.png"), image(tmp_path / "a" / "b" / "2.png")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "itself").symlink_to(tmp_path / "a" / "itself")
    (tmp_path / "z").symlink_to(tmp_path / "a")
    assert images_below(tmp_path) == [first, second]
    with open_tree(tmp_path) as tree:
        assert tree.names == ["a/1.png", "a/b/2.png"]


def test_folders_may_be_nested_deeply(tmp_path: Path) -> None:
    folders = [tmp_path]
    for _ in range(1200):
        folders.append(folders[-1] / "d")
        folders[-1].mkdir()
    found = image(folders[-1] / "1.png")
    try:
        assert images_below(tmp_path) == [found]
        with open_tree(tmp_path) as tree:
            assert tree.names == [found.relative_to(tmp_path).as_posix()]
    finally:  # by hand, since rmtree calls itself for every level
        found.unlink()
        for folder in reversed(folders[1:]):
            folder.rmdir()


def test_oversized_files_and_pipes_are_not_read(tmp_path: Path) -> None:
    sparse, pipe = tmp_path / "a.png", tmp_path / "b.png"
    sparse.write_bytes(b"\x89PNG\r\n\x1a\n")
    os.truncate(sparse, 6 * 2**30)
    os.mkfifo(pipe)
    for path, reason in ((sparse, "has 6,442"), (pipe, "not a regular file")):
        with pytest.raises(DataError, match=reason):
            list(decode_files([path], FORM))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_files_of_every_format_are_decoded(kind: str, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 200).save(tmp_path / "a", kind)
    [[pixels]] = decode_files([tmp_path / "a"], FORM)
    assert abs(int(pixels[3, 3, 0]) - 200) < 8


def test_an_array_whose_header_was_changed_is_named(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.arange(24, dtype=np.float32).reshape(4, 6))
    whole, path = content.getvalue(), tmp_path / "a.npy"
    draw = random.Random(3)
    changed = [whole[:n] for n in range(0, 128, 9)]
    for place in range(128):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        changed.append(bytes(flipped))
    for shape in (
        b"(-4, 6)",
        b"(True, 6)",
        b"(10**9, 6)",
        b"(9999999999999999, 6)",
        b"(4, '')",
    ):
        changed.append(whole.replace(b"(4, 6)" + b" " * (len(shape) - 6), shape))
    for one in changed:
        path.write_bytes(one)
        try:
            array = open_array(path)
        except ValueError as error:
            line = str(error)
        else:
            line = "" if array.nbytes <= len(one) else "larger than the file"
        assert "\n" not in line
        assert len(line) < 400
        assert line != "larger than the file"
        (tmp_path / "f").mkdir(exist_ok=True)
        (tmp_path / "f" / "features.npy").write_bytes(one)
        np.save(tmp_path / "f" / "labels.npy", np.arange(4))
        try:
            features.read(tmp_path / "f")
        except DataError as error:
            line = str(error)
        assert "\n" not in line


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    names = [f"c{n}" for n in range(6)]
    images = np.random.default_rng(0).integers(0, 256, (30, 20, 20, 1), dtype=np.uint8)
    preparation = Preparation(
        image_shape=(20, 20, 1),
        class_lists={"train": names[:3], "validation": names[3:5], "test": names[5:]},
        class_sizes=dict.fromkeys(names, 5),
        batches=iter([images]),
        origin="drawn",
    )
    return prepared.write("little", preparation, PixelNormalization((0.5,), (0.2,)))


def test_every_change_of_prepared_images_is_noticed(little: Path) -> None:
    assert prepared.read("little").images.shape == (30, 20, 20, 1)
    path = little / "images.npy"
    content, draw = path.read_bytes(), random.Random(5)
    for _ in range(60):  # so small a file is checked as a whole
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"the prepared little in .* is damaged"):
            prepared.read("little")
    for cut in (content[:-1], content + b"\0", content[:100], b""):
        path.write_bytes(cut)
        with pytest.raises(DataError, match="is damaged"):
            prepared.read("little")


@pytest.mark.parametrize("key", ["class_sizes", "splits", "normalization", "origin", "sha256",
                                 "format", "sampled"])  # fmt: skip
def test_an_index_of_any_other_kind_is_named(key: str, little: Path) -> None:
    index = read_object(little / "index.json")
    wrong = [None, 7, "x", [], [1], {"a": 1}, {"c0": 0}, {"train": ["c9"]},
             {"train": ["c0"], "test": ["c0"]}, {"mean": [0.5], "std": [0.0]},
             {"mean": [float("nan")], "std": [1.0]}]  # fmt: skip
    for value in wrong:
        write_json(little / "index.json", index | {key: value})
        if (key == "origin" and value == "x") or (key == "sha256" and value == "x"):
            prepared.read("little")
            continue
        with pytest.raises(DataError, match=r"the prepared little in .* is damaged") as caught:
            prepared.read("little")
        assert "\n" not in str(caught.value)
    for key_left_out in index:
        rest = {k: v for k, v in index.items() if k != key_left_out}
        write_json(little / "index.json", rest)
        with pytest.raises(DataError, match="is damaged"):
            prepared.read("little")
