"""Shared fixtures: tiny data, tiny settings, and a cache that is not the user's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from store_helpers import new_database, running_postgres
from tiny import make_dataset, make_settings, prepare_few_glyphs
from vsm.data import ImageDataset, open_dataset
from vsm.evaluation import transduction_choice
from vsm.settings import RunSettings
from vsm.system.devices import avoid_unusable_amx

PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
avoid_unusable_amx()  # before any test computes


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of prepared data for all tests, with a fifth of the glyphs, drawn once."""
    with _prepared_data("vsm-data", tmp_path_factory) as folder:
        prepare_few_glyphs()
        yield folder


@pytest.fixture(scope="session")
def folder_of_all_glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with _prepared_data("all-glyphs", tmp_path_factory) as folder:
        open_dataset("glyphs")
    return folder


@pytest.fixture
def all_glyphs(folder_of_all_glyphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``glyphs`` be complete, for models that were trained on it."""
    monkeypatch.setenv("VSM_DATA", str(folder_of_all_glyphs))


@contextmanager
def _prepared_data(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepare data in a folder that the processes of the tests share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if PARALLEL else base) / name
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSM_DATA", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def few_tasks_without_labels() -> Iterator[None]:
    """Let every memory that is learned choose how to use unlabeled images on few tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transduction_choice, "EPISODES", 8)
        yield


@pytest.fixture
def few_read_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let learning a memory choose among four ways to read it, not among seventy."""
    for name, values in {
        "EPSILONS": (3.0,),
        "BETAS": (1.0,),
        "RHOS": (0.5,),
        "SCALES": (5.0,),
    }.items():
        monkeypatch.setattr(f"vsm.evaluation.memory_choice.{name}", values)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def tiny_dataset() -> ImageDataset:
    return make_dataset()


@pytest.fixture
def tiny_settings() -> RunSettings:
    return make_settings()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 30 classes of 20 small, noisy images, as ``--data`` takes it."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(30):
        pattern = random.integers(0, 200, (16, 16))
        (folder / f"class{number:02}").mkdir()
        for drawing in range(20):
            pixels = (pattern + random.integers(0, 55, (16, 16))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{number:02}" / f"{drawing}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL that these tests started, or the reason why there is none."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new store of each kind can be."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    server = request.getfixturevalue("postgres")
    if isinstance(server, str):
        pytest.skip(server)
    return new_database(server)
