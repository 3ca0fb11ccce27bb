"""Folders, zips and tars read alike; what an untrusted archive could do is refused."""

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from data_layouts import write_tree, write_zip
from vsm.data.archives import open_tree
from vsm.data.catalog import prepare
from vsm.errors import DataError

FILES = {"a/x.png": b"first", "a/y.png": b"second", "b/c/z.txt": b"third"}


def write_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message), open_tree(path):
        pass


def test_folders_zips_and_tars_hold_the_same_files(tmp_path: Path) -> None:
    members = [(tarfile.TarInfo(name), data) for name, data in FILES.items()]
    sources = [
        write_tree(tmp_path / "tree", FILES),
        write_zip(tmp_path / "tree.zip", FILES),
        write_tar(tmp_path / "tree.tar.gz", members),
    ]
    before = sorted(tmp_path.rglob("*"))
    for source in sources:
        with open_tree(source) as tree:
            assert {name: tree.read(name) for name in tree.names} == FILES
            assert tree.names == sorted(FILES)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked


def test_images_in_a_tar_have_to_be_unpacked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "prepared"))
    path = write_tar(tmp_path / "images.tar.gz", [(tarfile.TarInfo("a/x.png"), b"")])
    with pytest.raises(DataError, match=r"images\.tar\.gz: .* unpack it"):
        prepare("cifar-fs", path)


def test_links_and_devices_in_a_tar_are_not_read(tmp_path: Path) -> None:
    members = []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        member = tarfile.TarInfo(f"odd{kind!r}")
        member.type, member.linkname = kind, "/etc/passwd"
        members.append((member, b""))
    path = write_tar(tmp_path / "odd.tar.gz", [*members, (tarfile.TarInfo("a"), b"x")])
    with open_tree(path) as tree:
        assert tree.names == ["a"]


def test_names_that_leave_an_archive_stay_in_it(tmp_path: Path) -> None:
    (tmp_path / "evil.png").write_bytes(b"outside")
    (tmp_path / "in").mkdir()
    path = write_zip(tmp_path / "in" / "bad.zip", {"../evil.png": b"inside"})
    with open_tree(path) as tree:
        assert tree.read("../evil.png") == b"inside"
    assert (tmp_path / "evil.png").read_bytes() == b"outside"


def test_a_zip_that_unpacks_to_far_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.png", bytes(30 << 20))
    with (
        pytest.raises(DataError, match=r"bomb\.zip: .*'zeros\.png': it unpacks to over"),
        open_tree(path),
    ):
        pass


def test_a_tar_that_unpacks_to_far_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("zeros.png")
    member.size = 1 << 40  # says so; the data is not even there
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(member.tobuf()))
    assert_refused(path, r"'zeros\.png': it unpacks to over")


@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.9])
def test_a_cut_off_archive_is_named(kept: float, tmp_path: Path) -> None:
    members = [(tarfile.TarInfo(name), data * 1000) for name, data in FILES.items()]
    for path in (
        write_zip(tmp_path / "cut.zip", FILES),
        write_tar(tmp_path / "cut.tar.gz", members),
    ):
        data = path.read_bytes()
        path.write_bytes(data[: int(kept * len(data))])
        assert_refused(path, f"{path.name}: cannot be read")


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "cut.zip", {"a.png": b"precious"})
    path.write_bytes(path.read_bytes().replace(b"precious", b"broken!!", 1))
    with (
        open_tree(path) as tree,
        pytest.raises(DataError, match=r"cannot read a\.png in .*cut\.zip"),
    ):
        tree.read("a.png")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="nowhere: no such file or folder"),
        open_tree(tmp_path / "nowhere"),
    ):
        pass
