"""Any model on any images: embedded as the model wants them, and never twice."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vsm
from vsm.cli import main
from vsm.data.folder import list_classes
from vsm.encoders import Encoder
from vsm.encoders.encoder import EmbeddingCache, cache_of, encode_files, open_data
from vsm.errors import DataError, RunError
from vsm.runs.trained_model import TrainedModel

CLASSES, EACH = 6, 4


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of other sizes than any model's: colored noise, a color for each class."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir()
        color = random.integers(60, 196, 3)
        for place in range(EACH):
            noise = random.integers(-60, 60, (48, 40 + place, 3))
            image = Image.fromarray((color + noise).clip(0, 255).astype(np.uint8))
            image.save(folder / f"class{number}" / f"{place}.png")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    return vsm.load("cifar-fs-vsm")


class Counting:
    """Counts the images that pass a backbone."""

    def __init__(self, trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        encode = Encoder.encode

        def counted(model: Encoder, inputs: Tensor, *rest: Any) -> Tensor:
            self.count += len(inputs)
            return encode(model, inputs, *rest)

        monkeypatch.setattr(Encoder, "encode", counted)


def test_features_are_those_of_each_file_and_are_computed_once(
    image_folder: Path, trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(trained, monkeypatch)
    first = open_data(trained.encoder, f"folder:{image_folder}")
    assert counting.count == CLASSES * EACH
    again = open_data(trained.encoder, f"folder:{image_folder}")
    assert counting.count == CLASSES * EACH
    assert isinstance(first, vsm.FeatureDataset)
    assert isinstance(again, vsm.FeatureDataset)
    assert np.array_equal(first.features, again.features)
    assert first.class_names == again.class_names
    files = [file for found in list_classes(image_folder)[1].values() for file in found]
    adapted = trained.encoder.adapt(torch.from_numpy(first.features))
    torch.testing.assert_close(adapted, trained.embed(files), rtol=1e-4, atol=1e-5)


def test_a_changed_image_and_another_way_of_preparing_are_embedded_anew(
    image_folder: Path, trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.png"
    file.write_bytes((image_folder / "class0" / "0.png").read_bytes())
    before = encode_files(trained.encoder, [file])
    counting = Counting(trained, monkeypatch)
    file.write_bytes((image_folder / "class1" / "0.png").read_bytes())
    assert not np.array_equal(encode_files(trained.encoder, [file]), before)
    assert counting.count == 1
    assert trained.preprocessing is not None
    other = trained.encoder.variant(trained.encoder.settings)
    other.preprocessing = replace(trained.preprocessing, crop=0.5)
    encode_files(other, [file])
    assert counting.count == 2


def test_a_cache_that_is_damaged_or_cannot_be_written_is_done_without(
    image_folder: Path, trained: TrainedModel, tmp_path: Path
) -> None:
    files = sorted((image_folder / "class0").iterdir())
    expected = encode_files(trained.encoder, files)
    path = cache_of(trained.encoder)
    for damage in (b"no database at all" * 100, b""):
        path.path.write_bytes(damage)
        assert np.array_equal(encode_files(trained.encoder, files), expected)
    cache = EmbeddingCache(tmp_path / "file" / "cache.sqlite")
    (tmp_path / "file").write_text("in the way")
    cache.put({b"key": np.ones(3, np.float32)})
    assert cache.get([b"key"]) == {}
    assert cache.problem is not None


def test_a_cache_on_a_full_disk_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = EmbeddingCache._connect

    def without_room(cache: EmbeddingCache) -> sqlite3.Connection:
        database = connect(cache)
        database.execute("PRAGMA max_page_count = 4")  # SQLite says that the disk is full
        return database

    cache = EmbeddingCache(tmp_path / "cache.sqlite")
    cache.put({b"kept": np.ones(3, np.float32)})
    monkeypatch.setattr(EmbeddingCache, "_connect", without_room)
    cache.put({bytes([n]): np.zeros(1280, np.float32) for n in range(50)})
    assert cache.problem is not None
    assert "full" in cache.problem
    monkeypatch.undo()
    again = EmbeddingCache(tmp_path / "cache.sqlite")
    assert list(again.get([b"kept", bytes([0])])) == [b"kept"]  # all of a part or nothing


def test_an_image_that_vanishes_while_its_folder_is_read_is_named(
    trained: TrainedModel, image_folder: Path, tmp_path: Path
) -> None:
    files = [tmp_path / "there.png", tmp_path / "gone.png"]
    files[0].write_bytes((image_folder / "class0" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"gone\.png: cannot be read"):
        encode_files(trained.encoder, files)


def test_a_feature_whose_bits_changed_in_the_cache_is_not_believed(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path / "cache.sqlite")
    cache.put({b"a": np.ones(3, np.float32), b"b": np.zeros(3, np.float32)})
    assert cache.get([b"a", b"b", b"c"]).keys() == {b"a", b"b"}
    with closing(sqlite3.connect(cache.path)) as database, database:
        database.execute("UPDATE features SET feature = zeroblob(12) WHERE key = ?", (b"a",))
    assert cache.get([b"a", b"b"]).keys() == {b"b"}


def test_an_encoder_that_gives_nan_and_an_image_that_cannot_be_read_are_named(
    image_folder: Path, trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png: unreadable"):
        encode_files(trained.encoder, [bad])
    monkeypatch.setattr(
        Encoder, "encode", lambda model, inputs: torch.full((len(inputs), 256), torch.nan)
    )
    with pytest.raises(RunError, match="encoder: it gives NaN"):
        encode_files(trained.encoder, sorted((image_folder / "class0").iterdir()))


def test_stored_images_of_another_size_are_scaled_to_the_models(
    trained: TrainedModel, tiny_dataset: vsm.ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm.encoders.encoder.open_dataset", lambda name: tiny_dataset)
    found = open_data(trained.encoder, "tiny")
    assert found.class_names == tiny_dataset.class_names
    assert found.input_shape == (256,)
    one = trained.embed([tiny_dataset.images[5]])
    mine = trained.encoder.adapt(torch.as_tensor(np.asarray(found.load(np.asarray([5])))))
    torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-5)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_any_model_is_measured_and_compared_on_any_folder(
    image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = ["--way", "3", "--shot", "1", "--queries", "2", "--episodes", "20", "--json"]
    data = ["--data", f"folder:{image_folder}", "--split", "all"]
    assert main(["evaluate", "cifar-fs-vsm", *data, *episodes]) == 0
    assert printed(capsys)["accuracy"] > 0.5
    words = ["--baselines", "cosine,simpleshot_l2n", *data, *episodes]
    assert main(["compare", "cifar-fs-vsm", *words]) == 0
    compared = printed(capsys)
    assert len(compared["differences"]) == 3
    assert compared["runs"][0]["data"] == f"folder:{image_folder}"
    assert main(["evaluate", "cifar-fs-vsm", "--memory-slots", "3", *data, *episodes]) == 2
    assert "exact_forgetting" in capsys.readouterr().err


def test_a_memory_of_all_classes_of_a_folder_is_learned_with_another_models_encoder(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    words = ["--data", f"folder:{image_folder}", "--encoder", "cifar-fs-vsm", "--output", run]
    assert main(["memory", "learn", *words, "--split", "all", "--json"]) == 0
    assert printed(capsys)["num_slots"] == CLASSES
    loaded = vsm.load(run)
    assert loaded.preprocessing == vsm.load("cifar-fs-vsm").preprocessing
    episodes = ["--way", "2", "--shot", "1", "--queries", "2", "--episodes", "5", "--json"]
    assert main(["evaluate", run, "--split", "all", *episodes]) == 0
    assert printed(capsys)["memory_slots"] == CLASSES


def test_a_folder_is_split_from_another_seed_by_name(image_folder: Path) -> None:
    splits = [list_classes(Path(f"{image_folder}{mark}"))[0] for mark in ("", "#0", "#1", "#2")]
    assert splits[0] == splits[1]
    assert splits[2] != splits[0] or splits[3] != splits[0]
    names = sorted(splits[0]["train"] + splits[0]["validation"] + splits[0]["test"])
    assert all(sorted(name for found in one.values() for name in found) == names for one in splits)
