"""Features of a frozen backbone, computed once and cached beside it for all runs that have it."""

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from vsm.data import Dataset, FeatureDataset, Split
from vsm.errors import RunError
from vsm.evaluation.evaluator import encode_dataset, with_features
from vsm.model import FewShotModel
from vsm.system.tensor_files import load_tensors, save_tensors

KEY_LENGTH = 16


def cached_features(model: FewShotModel, dataset: Dataset, folder: Path) -> FeatureDataset:
    """Return the features of ``dataset``, read from ``folder`` if they are stored there.

    The file is named by a hash of the backbone's weights, the precision, and every training and
    validation sample, so it cannot be another's. Where it cannot be written or read, features are
    computed anew.
    """
    path = folder / f"features-{features_key(model, dataset)}.safetensors"
    try:
        # Of test classes, which are never looked at, there are no numbers.
        kept = load_tensors(path, must_be_finite=False)[0]["features"].numpy()
    except (RunError, KeyError):
        encoded = encode_dataset(model, dataset)
        if folder.is_dir():
            features = {"features": torch.from_numpy(encoded.features)}
            with suppress(OSError):  # somebody else's folder, or a full disk
                save_tensors(path, features, {"kind": "features"})
        return encoded
    return with_features(dataset, kept)


def features_key(model: FewShotModel, dataset: Dataset) -> str:
    """Return a hash of all that training and validation features depend on."""
    views = model.settings.model.views
    depends_on = (str(model.precision), views, dataset.class_starts.tolist())
    digest = hashlib.sha256(repr(depends_on).encode())
    for name, value in sorted(model.require_backbone().state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    splits: tuple[Split, ...] = ("train", "validation")
    for split in splits:
        for part in np.array_split(dataset.split_ids(split), 64):
            digest.update(dataset.normalize(dataset.load(part[:1])).numpy().tobytes())
            digest.update(dataset.load(part).contiguous().numpy().tobytes())
    return digest.hexdigest()[:KEY_LENGTH]
