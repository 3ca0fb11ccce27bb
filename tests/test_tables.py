"""Tables of images: what they list, what they refuse, and the commands that take them."""

import csv
import json
import os
from pathlib import Path

import pytest

from classify_helpers import write_folders, write_run
from vsm.cli import main
from vsm.data import ImageDataset, folder
from vsm.data.folder import images_below, labeled_images, read_table
from vsm.errors import DataError


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with three files in it."""
    (tmp_path / "more").mkdir()
    for name in ("a.png", "b.png", "more/c d,e.png"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", ["path", "file", "filename", "image", " Path "])
@pytest.mark.parametrize("label", ["label", "class", "LABEL"])
def test_columns_are_found_by_their_names_in_any_order_and_case(
    here: Path, name: str, label: str
) -> None:
    text = f'{label},note,{name}\r\n cat ,x,a.png\r\n\r\ndog,"y\nz","more/c d,e.png"\r\n'
    images, labels = read_table(written(here, text), "required")
    assert images == [here / "a.png", here / "more" / "c d,e.png"]
    assert labels == ["cat", "dog"]


def test_a_byte_order_mark_and_other_alphabets_are_text(here: Path) -> None:
    (here / "ä.png").write_bytes(b"")
    found = read_table(written(here, "\ufeffpath,label\nä.png,жук\u2028x\n"), "required")
    assert found == ([here / "ä.png"], ["жук\u2028x"])


def test_paths_are_relative_to_the_table_wherever_one_is(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = written(here / "more", f"path\n../a.png\n{here / 'b.png'}\n")
    monkeypatch.chdir(here.parent)
    found = images_below(Path(os.path.relpath(table)))
    assert [one.resolve() for one in found] == [here / "a.png", here / "b.png"]


def test_labels_are_read_as_asked_for(here: Path) -> None:
    with_labels = written(here, "path,label\na.png,cat\n")
    assert read_table(with_labels, "optional") == ([here / "a.png"], ["cat"])
    assert read_table(with_labels, "ignored") == ([here / "a.png"], None)
    some_empty = written(here, "path,label\na.png,cat\nb.png,\n")
    assert read_table(some_empty, "ignored")[0] == [here / "a.png", here / "b.png"]
    assert read_table(written(here, "path\na.png\n"), "optional")[1] is None


def test_a_line_that_is_repeated_counts_once(here: Path) -> None:
    text = "path,label\na.png,cat\nmore/../a.png,cat\nb.png,dog\n"
    assert labeled_images(written(here, text)) == ([here / "a.png", here / "b.png"], ["cat", "dog"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected a header with the column 'path', separated by commas, got nothing"),
        ("a.png,cat\n", "line 1: expected a header with the column 'path'.*got 'a.png,cat'"),
        ("path;label\na.png;cat\n", "line 1: .* got 'path;label'"),
        ("path,what\na.png,cat\n", "line 1: expected a header with the column 'label'"),
        ("\npath,what\na.png,cat\n", "line 2: expected a header with the column 'label'"),
        ("path,file,label\na.png,b.png,cat\n", "line 1: has the columns 'path' and 'file'; keep"),
        ("path,label\n", "has a header but no images"),
        ("path,label\na.png,cat\n,dog\n", "line 3: the path is empty"),
        ("path,label\na.png,cat\nb.png\n", "line 3: the label is empty"),
        ("path,label\na.png, \n", "line 2: the label is empty"),
        ("path,label\na.png,cat\nz.png,dog\n", "line 3: there is no file 'z.png'; paths are rel"),
        ("path,label\nmore,cat\n", "line 2: there is no file 'more'"),
        ("path,label\nhttp://x.org/a.png,cat\n", "line 2: there is no file 'http:"),
        ("path,label\n" + 5000 * "a" + ",cat\n", "line 2: there is no file 'aaa"),
        ("path,label\n" + 200_000 * "a" + ",cat\n", "line 2: is not CSV"),
        ("path,label\na.png,cat\na.png,dog\n", "line 3, but 'cat' in .*line 2; keep one"),
        ("path,label\na.png,cat,dog\n", "line 2: has 3 cells, but the header 2"),
        ('path,label\n"a.png"x,cat\n', "line 2: is not CSV"),
        ('path,label\n"a.png,cat\n', "is not CSV"),
        (b"path,label\na.png,k\xe4fer\n", "line 2: is not UTF-8 text"),
        ("path,label\na.png,cat\n".encode("utf-16"), "line 1: is not UTF-8 text"),
        (b"path,label\na.png,c\0t\n", "line 2: is not CSV"),
        (b"\x80\x04\x95pickle", "line 1: is not UTF-8 text"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_line(
    here: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=rf"table\.csv.*{message}") as raised:
        labeled_images(written(here, text))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_pipes_are_not_read(here: Path) -> None:
    os.mkfifo(here / "pipe.png")
    with pytest.raises(DataError, match=r"line 2: there is no file 'pipe\.png'"):
        images_below(written(here, "path\npipe.png\n"))


def test_tables_have_limits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = written(here, "path\na.png\nb.png\n")
    monkeypatch.setattr(folder, "MAX_TABLE_BYTES", 5)
    with pytest.raises(DataError, match="at most 5; replace"):
        images_below(table)


def test_an_image_of_two_sources_counts_once_and_has_one_label(here: Path) -> None:
    (here / "support" / "cat").mkdir(parents=True)
    (here / "a.png").rename(here / "support" / "cat" / "a.png")
    table = written(here, "path,label\nsupport/cat/a.png,cat\nb.png,dog\n")
    sources = [here / "support", table]
    expected = [here / "support" / "cat" / "a.png", here / "b.png"]
    assert labeled_images(*sources) == (expected, ["cat", "dog"])
    written(here, "path,label\nsupport/cat/a.png,dog\n")
    with pytest.raises(DataError, match=r"is 'dog' in .*table.csv, but 'cat' in .*support; keep"):
        labeled_images(*sources)


def as_table(path: Path, folder: Path, label: str = "label") -> Path:
    """Write a table of all images in class folders."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["path", label])
        rows.writerows([image, image.parent.name] for image in sorted(folder.glob("*/*.png")))
    return path


def test_images_are_classified_by_tables_as_by_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_dataset: ImageDataset
) -> None:
    support = write_folders(tmp_path / "support", tiny_dataset, 2)
    query = write_folders(tmp_path / "query", tiny_dataset, 3, first=5)
    model = ["--model", str(write_run(tmp_path / "run"))]
    folders = ["classify", "--support", str(support), "--query", str(query), *model]
    assert main([*folders, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    examples = str(as_table(tmp_path / "examples.csv", support))
    asked = as_table(tmp_path / "asked.csv", query)
    command = ["classify", "--support", examples, "--query", str(asked), *model]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answers"] == expected["answers"]
    assert "accuracy" not in expected
    right = [Path(one["image"]).parent.name == one["prediction"] for one in told["answers"]]
    assert told["labels"] == 15
    assert told["accuracy"] == pytest.approx(sum(right) / 15)
    assert main(command) == 0
    assert f"accuracy: {sum(right) / 15:.1%} of 15 labels" in capsys.readouterr().out
    assert main([*command, "--csv", str(tmp_path / "out.csv")]) == 0
    assert f"accuracy: {sum(right) / 15:.1%} of 15 labels" in capsys.readouterr().out
    as_table(asked, query, label="remark")
    assert main([*command, "--json"]) == 0
    assert "accuracy" not in json.loads(capsys.readouterr().out)
    asked.write_text("path\nnowhere.png\n")
    assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "asked.csv, line 2: there is no file 'nowhere.png'" in line


def test_none_of_these_is_right_of_a_class_without_examples(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    support = write_folders(tmp_path / "support", tiny_dataset, 2)
    query = write_folders(tmp_path / "query", tiny_dataset, 1, first=5)
    table = as_table(tmp_path / "asked.csv", query)
    known = sorted(support.iterdir())[1:]
    examples = [f"{image},{image.parent.name}" for one in known for image in one.glob("*.png")]
    few = tmp_path / "few.csv"
    few.write_text("\n".join(["file,class", *examples]))
    monkeypatch.setattr(
        "vsm.classify.fitted.FittedClasses.accepted", lambda _self, rows, _: [False] * len(rows)
    )
    words = ["--model", str(write_run(tmp_path / "run")), "--reject", "0.9", "--json"]
    assert main(["classify", "--support", str(few), "--query", str(table), *words]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(1 / 5)


def test_a_table_can_be_reviewed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    folder = write_folders(tmp_path / "pile", tiny_dataset, 3)
    table = as_table(tmp_path / "pile.csv", folder)
    words = ["--model", "glyphs-5w1s", "--output", str(tmp_path / "page.html")]
    assert main(["review", str(folder), *words, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main(["review", str(table), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["review", str(table), *words]) == 0
    assert "labels may be wrong" in capsys.readouterr().out
