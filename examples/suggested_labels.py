"""Measure whether labels that `vsm suggest` asks for are worth more than others.

The memory must not contain the classes: learn it from part of a folder, and label images of the
others, as suggested, at random, or where the prediction is least certain:

    vsm memory learn --encoder efficientnet-lite0 --data folder:photos#1 --output runs/part
    python examples/suggested_labels.py runs/part folder:photos#1
"""

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import vsm
from vsm.classify.classifier import Embedded
from vsm.data.dataset import SPLITS
from vsm.encoders.encoder import open_data
from vsm.evaluation.intervals import student_quantile

METHODS = ("random", "vsm suggest", "least certain")
Ids = npt.NDArray[np.int64]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print accuracies after labeling, with paired differences over draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", help="a run whose memory holds the training classes alone")
    parser.add_argument("data", help="the same data, like folder:photos#1")
    parser.add_argument("--split", choices=SPLITS, default="test", help="its classes are labeled")
    parser.add_argument("--classes", type=int, default=20, help="of a draw, at most")
    parser.add_argument("--images", type=int, default=60, help="of a class, at most")
    parser.add_argument("--held-out", type=int, default=10, help="of them to classify")
    parser.add_argument("--number", type=int, default=20, help="of new labels")
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args(arguments)
    trained = vsm.load(options.run)
    dataset = open_data(trained.encoder, options.data)
    ids = [dataset.image_ids(one) for one in dataset.classes(options.split)]
    features = trained.encoder.features(dataset, torch.from_numpy(np.concatenate(ids)))
    classes = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    print(f"{len(features):,} images of {len(ids)} classes unknown to the memory")
    for share, start in ((1.0, "one label of every class"), (0.5, "one label of half the classes")):
        measured = []
        for seed in range(options.draws):
            draw = random_draw(classes, share, seed, options)
            arguments_of = (vsm.FewShotClassifier(trained), features, classes, draw)
            measured.append([label_by(m, *arguments_of, options.number, seed) for m in METHODS])
        report(f"{start}, {options.number} new ones", 100 * np.array(measured))


def random_draw(classes: Ids, share: float, seed: int, options: argparse.Namespace) -> list[Ids]:
    """Return images that are labeled, that may be labeled, and that are classified, at random.

    A share of the classes gets one label each.
    """
    random = np.random.default_rng(seed)
    drawn = random.permutation(np.unique(classes))[: options.classes]
    parts: list[list[Ids]] = [[], [], []]
    for place, one in enumerate(drawn):
        ids = random.permutation(np.flatnonzero(classes == one))[: options.images]
        first = options.held_out + (place < share * len(drawn))
        parts[0].append(ids[options.held_out : first])
        parts[1].append(ids[first:])
        parts[2].append(ids[: options.held_out])
    return [np.concatenate(part) for part in parts]


def label_by(
    method: str,
    classifier: vsm.FewShotClassifier,
    features: torch.Tensor,
    classes: Ids,
    draw: list[Ids],
    number: int,
    seed: int,
) -> float:
    """Label ``number`` images of features ``[n, D]``; return the accuracy on those held out."""
    labeled, pool, held_out = draw
    unlabeled = Embedded(features[pool])
    classifier.fit(Embedded(features[labeled]), classes[labeled])
    if method == "random":
        chosen = np.random.default_rng(seed).permutation(len(pool))[:number]
    elif method == "vsm suggest":
        chosen = np.array([one.image for one in classifier.suggest(unlabeled, number)])
    else:
        best = np.sort(classifier.predict_proba(unlabeled), 1)
        chosen = np.argsort(best[:, -1] - best[:, -2], kind="stable")[:number]
    labeled = np.append(labeled, pool[chosen])
    classifier.fit(Embedded(features[labeled]), classes[labeled])
    return classifier.score(Embedded(features[held_out]), classes[held_out])


def report(title: str, measured: npt.NDArray[np.float64]) -> None:
    """Print percent by method, and minus the first, from ``[draws, methods]``."""
    draws = len(measured)
    print(f"{title}, held-out accuracy in percent ({draws} draws):")
    apart = measured - measured[:, :1]
    errors = student_quantile(draws - 1) * apart.std(0, ddof=1) / draws**0.5
    for name, mean, gain, error in zip(
        METHODS, measured.mean(0), apart.mean(0), errors, strict=True
    ):
        print(f"  {name}: {mean:.1f}, minus random {gain:+.1f} ± {error:.1f}")


if __name__ == "__main__":
    main()
