"""Memories of more rows than fit, in parts and by several processes, are those of all at once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vsm
from launching_helpers import finish, start
from vsm import learning
from vsm.cli import main
from vsm.data.dataset import FeatureDataset
from vsm.encoders import Encoder
from vsm.encoders import encoder as encoding
from vsm.errors import DataError, MemoryFileError
from vsm.learning import ClassRows, learn_memory
from vsm.memory import ClassStatistics, GaussianMemory, ReadSettings
from vsm.settings import GaussianSettings, ModelSettings
from vsm.system.distributed import Processes

WORKER = Path(__file__).with_name("learning_worker.py")
WIDTH, CLASSES, EACH = 6, 8, 30
FIXED = GaussianSettings(
    normalization="cl2n", epsilon=3.0, beta=1.0, rho=0.5, addressing_scale=10.0
)


def rows(seed: int = 0, offset: float = 3.0) -> tuple[Tensor, Tensor]:
    """Features far from zero, and their classes, in any order."""
    random = torch.Generator().manual_seed(seed)
    members = torch.randint(CLASSES, (CLASSES * EACH,), generator=random)
    means = torch.randn(CLASSES, WIDTH, generator=random)
    noise = torch.randn(len(members), WIDTH, generator=random)
    return (offset + means[members] + 0.3 * noise).double(), members


def by_definition(features: Tensor, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, means and scatter by plain loops."""
    counts, means = torch.zeros(CLASSES, dtype=torch.int64), torch.zeros(CLASSES, WIDTH).double()
    scatter = torch.zeros(WIDTH, WIDTH).double()
    for one in range(CLASSES):
        own = features[members == one]
        counts[one], means[one] = len(own), own.mean(0)
        for row in own:
            scatter += torch.outer(row - means[one], row - means[one])
    return counts, means, scatter


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_statistics_in_parts_are_those_of_all(size: int) -> None:
    features, members = rows()
    found = ClassStatistics.empty(CLASSES, WIDTH)
    for part, whose in zip(features.split(size), members.split(size), strict=True):
        found = found.add(part, whose)
    for ours, expected in zip(found, by_definition(features, members), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_statistics_of_several_processes_add_up() -> None:
    features, members = rows()
    parts = [
        ClassStatistics.empty(CLASSES, WIDTH).add(features[some], members[some])
        for some in (slice(0, 50), slice(50, 51), slice(51, None))
    ]
    sent: list[Tensor] = [torch.zeros(0)] * len(parts)
    turn = Barrier(len(parts))

    def summed(rank: int) -> ClassStatistics:
        def all_reduce(values: Tensor) -> Tensor:
            sent[rank] = values
            turn.wait()
            total = torch.stack(sent).sum(0)
            turn.wait()
            return total

        return parts[rank].summed(all_reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        for found in pool.map(summed, range(len(parts))):
            for ours, expected in zip(found, by_definition(features, members), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def dataset() -> FeatureDataset:
    """Classes of unequal size, of which the last is not for training."""
    features, members = rows()
    order = members.argsort(stable=True)
    sizes = members.bincount(minlength=CLASSES).numpy()
    return FeatureDataset(
        name="features:made",
        class_names=tuple(f"class{one}" for one in range(CLASSES)),
        class_starts=np.cumsum([0, *sizes]),
        splits={"train": np.asarray([5, 0, 1, 2, 3, 4, 6]), "test": np.asarray([7])},
        origin="",
        features=features[order].float().numpy(),
    )


def encoder() -> Encoder:
    return Encoder(ModelSettings(), (WIDTH,), "features:made")


def test_what_does_not_fit_is_learned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learn_memory(encoder(), dataset(), FIXED).memory
    monkeypatch.setattr(learning, "NUMBERS_AT_ONCE", 40 * WIDTH)
    monkeypatch.setattr(learning, "LEAST_ROWS", 5)
    asked: list[int] = []

    features = Encoder.features

    def counted(one: Encoder, data: Any, ids: Tensor, *more: Any, **named: Any) -> Tensor:
        asked.append(len(ids))
        return features(one, data, ids, *more, **named)

    monkeypatch.setattr(Encoder, "features", counted)
    monkeypatch.setattr("vsm.encoders.encoder.LARGEST_BATCH", 16)
    found = learn_memory(encoder(), dataset(), FIXED).memory
    assert max(asked) <= 40
    assert whole is not None
    assert found is not None
    center = found.memory.tensors()["center"]
    expected = GaussianMemory.fit(
        torch.from_numpy(dataset().features[dataset().split_ids("train")]),
        torch.from_numpy(dataset().classes("train")).repeat_interleave(
            torch.from_numpy(dataset().class_sizes[dataset().classes("train")])
        ),
        center,
        ReadSettings("cl2n"),
    )
    places = [expected.slot_classes.index(one) for one in found.memory.slot_classes]
    assert [found.names[n] for n in np.argsort(places)] == list(whole.names)
    tensors = found.memory.tensors()
    torch.testing.assert_close(tensors["content"], expected.content[places])
    torch.testing.assert_close(tensors["counts"], expected.counts[places])
    torch.testing.assert_close(tensors["shared_scatter"], expected.shared_scatter)
    assert found.provenance[-1]["images"] == len(dataset().split_ids("train"))


def test_what_is_drawn_is_of_every_class_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = dataset().classes("train")
    monkeypatch.setattr(learning, "NUMBERS_AT_ONCE", 70 * WIDTH)
    monkeypatch.setattr(learning, "LEAST_ROWS", 10)
    drawn = [ClassRows(encoder(), dataset(), classes).drawn(seed) for seed in (0, 0, 1)]
    assert drawn[0].sizes == [10] * 7
    assert torch.equal(drawn[0].features, drawn[1].features)
    assert not torch.equal(drawn[0].features, drawn[2].features)
    for one, part in zip(classes, drawn[0].features.split(10), strict=True):
        own = torch.from_numpy(dataset().features[dataset().image_ids(one)])
        assert all((own == row).all(-1).any() for row in part)
        assert len(part.unique(dim=0)) == 10
    monkeypatch.setattr(learning, "LEAST_ROWS", 35)
    fewer = ClassRows(encoder(), dataset(), classes).drawn(0)
    assert len(fewer.sizes) == 2  # rather than less of every class


def test_exact_forgetting_needs_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "NUMBERS_AT_ONCE", 40 * WIDTH)
    with pytest.raises(MemoryFileError, match="exact_forgetting"):
        learn_memory(encoder(), dataset(), GaussianSettings(exact_forgetting=True))


def test_every_row_has_one_owner() -> None:
    for count in (1, 2, 3, 7):
        owners = [Processes(rank, count).owned(torch.arange(20), 20) for rank in range(count)]
        assert torch.stack(owners).sum(0).eq(1).all()
        assert max(o.sum() for o in owners) - min(o.sum() for o in owners) <= 1


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight classes of colored noise, and a cache of our own."""
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "data"))
    folder, random = tmp_path / "images", np.random.default_rng(0)
    for number in range(8):
        (folder / f"class{number}").mkdir(parents=True)
        color = random.integers(120, 136, 3)
        for place in range(7):
            noise = random.integers(-60, 60, (40, 40, 3))
            image = Image.fromarray((color + noise).clip(0, 255).astype(np.uint8))
            image.save(folder / f"class{number}" / f"{place}.png")
    return folder


def held(run: Path) -> tuple[dict[str, Tensor], Any]:
    memory = vsm.load(run).memory
    assert memory is not None
    return memory.memory.tensors(), memory.describe(neighbors=0)["choice"]


@pytest.mark.parametrize("numbers", [1 << 26, 30 * 256])
def test_two_processes_learn_the_memory_of_one(
    numbers: int, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, with room for all features and for about half of them."""
    learn = ["memory", "learn", "--encoder", "cifar-fs-vsm", "--data", f"folder:{images}"]
    learn += ["--split", "all", "--json", "--output"]
    for module, name in ((learning, "NUMBERS_AT_ONCE"), (encoding, "NUMBERS_IN_MEMORY")):
        monkeypatch.setattr(module, name, numbers)
    assert main([*learn, str(tmp_path / "one")]) == 0
    monkeypatch.setenv("VSM_DATA", str(tmp_path / "other-cache"))
    for code, said in finish(start(2, WORKER, str(numbers), *learn, str(tmp_path / "two"))):
        assert code == 0, said
    alone, together = held(tmp_path / "one"), held(tmp_path / "two")
    for name, values in alone[0].items():
        torch.testing.assert_close(together[0][name], values, rtol=1e-9, atol=1e-9)
    assert alone[1] == together[1]


def test_many_features_are_kept_in_a_file(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = vsm.load("cifar-fs-vsm")
    files = sorted(images.rglob("*.png"))
    small = encoding.encode_files(trained.encoder, files)
    monkeypatch.setattr(encoding, "NUMBERS_IN_MEMORY", 100)
    large = encoding.encode_files(trained.encoder, files)
    assert isinstance(large, np.memmap)
    np.testing.assert_array_equal(small, large)
    assert not list((tmp_path / "data").glob("features-*"))  # it vanishes with the process

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot write .* free some space"):
        encoding.encode_files(trained.encoder, files)


def test_a_killed_embedding_goes_on_where_it_was(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second part: what the first part embedded is not embedded again."""
    monkeypatch.setattr("vsm.encoders.encoder.LARGEST_BATCH", 8)
    encoded: list[int] = []
    encode = Encoder.encode

    def counted(model: Encoder, inputs: Tensor, *more: Any) -> Tensor:
        if len(encoded) == 2:
            encoded.append(0)
            raise KeyboardInterrupt
        encoded.append(len(inputs))
        return encode(model, inputs, *more)

    trained = vsm.load("cifar-fs-vsm")
    monkeypatch.setattr(Encoder, "encode", counted)
    files = sorted(images.rglob("*.png"))
    with pytest.raises(KeyboardInterrupt):
        encoding.encode_files(trained.encoder, files)
    encoding.encode_files(trained.encoder, files)
    assert sum(encoded) == len(files)


def test_the_answer_is_written_by_the_first_process_alone(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = ["memory", "learn", "--encoder", "cifar-fs-vsm", "--data", f"folder:{images}"]
    assert main([*learn, "--output", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_slots"] > 0
