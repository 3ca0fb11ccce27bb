"""Classify many images of many classes together, and print what memory and time that took.

python tests/together_worker.py 1280 100000 1000  # features, images, classes
"""

import resource
import sys
import time

import torch

from vsm import FewShotClassifier
from vsm.classify.classifier import Embedded


def peak() -> float:
    """Return the largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(width: int, images: int, classes: int) -> None:
    """Print megabytes before and after fitting, seconds, and the accuracy."""
    random = torch.Generator().manual_seed(0)
    known = torch.randn(40, 1, width, generator=random) + torch.randn(
        40, 5, width, generator=random
    )
    names = torch.arange(40).repeat_interleave(5)
    classifier = FewShotClassifier().learn_memory(known.flatten(0, 1), names)
    centers = torch.randn(classes, width, generator=random)
    labels = torch.arange(classes)
    support = centers + torch.randn(classes, width, generator=random)
    members = torch.randint(classes, (images,), generator=random)
    queries = centers[members] + torch.randn(images, width, generator=random)
    before, start = peak(), time.monotonic()
    classifier.fit(Embedded(support), labels, unlabeled=Embedded(queries))
    after, seconds = peak(), time.monotonic() - start
    right = torch.from_numpy(classifier.predict(Embedded(queries))) == members
    print(f"{before:.0f} {after:.0f} {seconds:.1f} {right.double().mean():.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
