"""Runs, images and features for the tests of classifiers and memory files."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memories import remember
from tiny import make_dataset, make_settings, variant
from vsm.data import ImageDataset
from vsm.data.images import Preprocessing
from vsm.model import FewShotModel
from vsm.runs.directory import RunDirectory
from vsm.runs.trained_model import save_best
from vsm.seeding import generator
from vsm.settings import Method

CLASSES = range(38, 43)
"""Test classes of the tiny dataset."""


def tiny_model(method: Method = "vsm", seed: int = 0) -> FewShotModel:
    settings = variant(make_settings(), method=method, seed=seed)
    return FewShotModel(settings, (1, 28, 28)).eval()


def write_run(path: Path, method: Method = "vsm", seed: int = 0, num_slots: int = 12) -> Path:
    """Write a run directory of an untrained model that remembers the first training classes."""
    return write_run_of(tiny_model(method, seed), path, num_slots)


def write_run_of(model: FewShotModel, path: Path, num_slots: int = 12) -> Path:
    """Write a run directory of ``model``, which remembers the first training classes."""
    dataset, run = make_dataset(), RunDirectory(path)
    model.encoder.preprocessing = Preprocessing.of(dataset)
    run.create(model.settings)
    with torch.no_grad():
        first = torch.from_numpy(dataset.class_starts[:num_slots])
        seen = model.embed(dataset.normalize(dataset.load(first)))
        save_best(run, model, remember(model.consolidation, seen), 5, dataset)
    return path


def examples(
    dataset: ImageDataset, shots: dict[int, int], first: int = 0
) -> tuple[list[npt.NDArray[np.uint8]], list[str]]:
    """Return so many images of each class, from the ``first`` on, and their class names."""
    images, labels = [], []
    for class_id, shot in shots.items():
        chosen = dataset.image_ids(class_id)[first : first + shot]
        images += list(dataset.images[chosen])
        labels += [dataset.class_names[class_id]] * shot
    return images, labels


def write_folders(root: Path, dataset: ImageDataset, shot: int, first: int = 0) -> Path:
    """Write images of the test classes, one folder per class."""
    images, labels = examples(dataset, dict.fromkeys(CLASSES, shot), first)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (root / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(root / label / f"{number:02}.png")
    return root


def clustered_features(
    num_classes: int, per_class: int, seed: int = 0, num_features: int = 24
) -> tuple[Tensor, Tensor, list[str]]:
    """Classes that lie about one of eight centers, so that old ones say something of new ones.

    Returns:
        Features ``[n, D]``, class ids ``[n]``, and the names of all classes.
    """
    random = generator(seed, "clustered")
    centers = 1.5 * torch.randn(8, num_features, generator=generator(0, "centers"))
    means = centers[torch.arange(num_classes) % 8]
    means = means + 0.5 * torch.randn(num_classes, num_features, generator=random)
    class_ids = torch.arange(num_classes).repeat_interleave(per_class)
    noise = torch.randn(len(class_ids), num_features, generator=random)
    names = [f"class{c:03d}" for c in range(num_classes)]
    return means[class_ids] + 3.0 * noise, class_ids, names
