"""A memory for features that were made once and stored, by whatever encoder.

    python examples/stored_features.py --output runs/features

The encoder here is a few lines of numpy: oriented gradients, pooled over a grid. A foundation
model takes its place by writing its own embeddings as `features.npy`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import vsm
from vsm.data import open_images
from vsm.settings import ModelSettings, RunSettings, SamplingSettings, ValidationSettings

CELLS, DIRECTIONS = 4, 8


def encode(pictures: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Map gray pictures ``[n, H, W, 1]`` to features ``[n, 128]`` of length √128.

    That length gives every feature a size near one, which is what the networks expect.
    """
    down, right = np.gradient(pictures[..., 0] / np.float32(255), axis=(1, 2))
    strength = np.hypot(down, right)
    direction = np.arctan2(down, right) % np.pi * DIRECTIONS / np.pi  # [n, H, W] in [0, 8)
    chosen = direction.astype(np.int8)[..., None] == np.arange(DIRECTIONS)
    maps = strength[..., None] * chosen  # [n, H, W, 8]
    num_pictures, height, width, _ = maps.shape
    grid = (num_pictures, CELLS, height // CELLS, CELLS, width // CELLS, DIRECTIONS)
    cells = np.sqrt(maps.reshape(grid).mean((2, 4))).reshape(num_pictures, -1)
    lengths = np.linalg.norm(cells, axis=1, keepdims=True)
    features: npt.NDArray[np.float32] = cells / lengths * np.float32(cells.shape[1] ** 0.5)
    return features


def store(images: vsm.ImageDataset, folder: Path) -> None:
    """Write features, labels, class names and splits of ``images`` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = range(len(images.class_names))
    features = [encode(images.images[images.image_ids(c)]) for c in classes]
    np.save(folder / "features.npy", np.concatenate(features))
    np.save(folder / "labels.npy", np.repeat(classes, images.class_sizes))
    (folder / "class_names.json").write_text(json.dumps(images.class_names))
    split_of = {images.class_names[c]: split for split, ids in images.splits.items() for c in ids}
    (folder / "splits.json").write_text(json.dumps(split_of))


def main(arguments: Sequence[str] | None = None) -> None:
    """Store, train, and measure plain prototypes beside the trained memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--episodes", type=int, default=1000)
    options = parser.parse_args(arguments)

    store(open_images("glyphs"), options.output / "embeddings")
    settings = RunSettings(
        data=f"features:{options.output / 'embeddings'}",
        method="vsm",
        steps=options.steps,
        model=ModelSettings(adapter="linear", temperature=10.0, learn_temperature=True),
        sampling=SamplingSettings(train_prototypes=20, evaluation_prototypes=50),  # to be quick
        validation=ValidationSettings(every=options.steps),
    )
    vsm.train(settings, options.output / "run")

    dataset = vsm.open_dataset(settings.data)
    trained = vsm.load(options.output / "run")
    plain = vsm.FewShotModel(RunSettings(method="protonet"), dataset.input_shape)
    episodes = vsm.EpisodeSampler(dataset, "test", way=5, shot=1, queries=15)
    for name, model, memory in (
        ("prototypes of the features as they are", plain, None),
        ("memory and linear adapter, trained", trained.model, trained.state),
    ):
        accuracy = vsm.evaluate(model, memory, episodes, options.episodes, seed=0).accuracy
        print(f"{name}: {accuracy.mean:.1%} ± {accuracy.ci95:.1%}")


if __name__ == "__main__":
    main()
