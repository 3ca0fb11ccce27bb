"""Shared fixtures: tiny data, tiny settings, and a cache that is not the user's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny import make_dataset, make_settings
from vsm.data import ImageDataset
from vsm.settings import RunSettings

PARALLEL = "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of prepared data for all tests, so that glyphs are drawn once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if PARALLEL else base) / "vsm-data"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSM_DATA", str(folder))
        yield folder


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def tiny_dataset() -> ImageDataset:
    return make_dataset()


@pytest.fixture
def tiny_settings() -> RunSettings:
    return make_settings()
