"""A memory over embeddings of any encoder: learned in one call, then a few examples are enough.

    python examples/embedding_memory.py

The encoder here is that of `stored_features.py`, a few lines of numpy; embeddings of a foundation
model take their place. Alphabets that the memory never saw are classified with and without it.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stored_features import encode
from vsm import FewShotClassifier, ImageDataset
from vsm.data import open_images

WAY, QUERIES = 5, 10


def embeddings(
    images: ImageDataset, class_ids: npt.NDArray[np.int64], each: int
) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Embed the first pictures of some classes: features ``[n, D]`` and their labels."""
    chosen = np.concatenate([images.image_ids(class_id)[:each] for class_id in class_ids])
    labels = [images.class_names[class_id] for class_id in class_ids for _ in range(each)]
    return encode(images.images[chosen]), labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn from the training alphabets; measure one example per class of the test alphabets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--classes", type=int, default=400, help="How many to remember.")
    parser.add_argument("--tasks", type=int, default=200, help="How many to measure.")
    options = parser.parse_args(arguments)

    images = open_images("glyphs")
    old = images.classes("train")[: options.classes]
    classifier = FewShotClassifier().learn_memory(
        *embeddings(images, old, each=20), encoder_name="oriented-gradients"
    )
    forgetful = FewShotClassifier()

    random = np.random.default_rng(0)
    scores: dict[str, list[float]] = {"without memory": [], "with memory": []}
    for _ in range(options.tasks):
        chosen = random.choice(images.classes("test"), WAY, replace=False)
        features, labels = embeddings(images, chosen, each=1 + QUERIES)
        names = np.asarray(labels)
        support = np.arange(len(names)) % (1 + QUERIES) == 0  # the first of each class
        for name, one in (("without memory", forgetful), ("with memory", classifier)):
            one.fit(features[support], names[support])
            scores[name].append(one.score(features[~support], names[~support]))
    for name, found in scores.items():
        print(f"{name}: {np.mean(found):.1%} of {WAY} new characters, one example each")


if __name__ == "__main__":
    main()
