"""Measure whether labels that `vsm suggest` asks for are worth more than others.

The memory must not contain the classes: learn it from part of a folder, and label images of the
others, a few at a time, as suggested, at random, or where the prediction is least certain:

    vsm memory learn --encoder efficientnet-lite0 --data folder:photos#1 --output runs/part
    python examples/suggested_labels.py runs/part folder:photos#1
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import vsm
from vsm.classify.classifier import Embedded
from vsm.data.dataset import SPLITS, Split
from vsm.encoders.embedding import open_data
from vsm.evaluation.statistics import student_quantile
from vsm.runs.trained_model import TrainedModel

METHODS = ("random", "vsm suggest", "least certain")
Ids = npt.NDArray[np.int64]


class Images(NamedTuple):
    """Features ``[n, D]`` and the true class of each ``[n]``."""

    features: torch.Tensor
    classes: Ids

    def rows(self, ids: Ids) -> Embedded:
        """Return features in place of images."""
        return Embedded(self.features[torch.from_numpy(ids)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print accuracies against the number of labels, with paired differences over draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", help="a run whose memory holds the training classes alone")
    parser.add_argument("data", help="the same data, like folder:photos#1")
    parser.add_argument("--split", choices=SPLITS, default="test", help="its classes are labeled")
    parser.add_argument("--classes", type=int, default=20, help="of a draw, at most")
    parser.add_argument("--images", type=int, default=60, help="of a class, at most")
    parser.add_argument("--held-out", type=int, default=10, help="of them to classify")
    parser.add_argument("--number", type=int, default=20, help="labels of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args(arguments)
    trained = vsm.load(options.run)
    images = embed(trained, options.data, options.split)
    for share, start in ((1.0, "one label of every class"), (0.5, "one label of half the classes")):
        measured, novel = [], []
        for seed in range(options.draws):
            draw = random_draw(images, share, seed, options)
            found = [
                label_by(method, trained, images, draw, options.number, options.rounds, seed)
                for method in METHODS
            ]
            measured.append([accuracies for accuracies, _ in found])
            novel.append(found[1][1])
        report(start, len(draw[0]), options.number, 100 * np.array(measured))
        counted = [f"{right} of {called}" for called, right in np.sum(novel, 0)]
        print(f"unlike all classes so far, and of a class without label: {', '.join(counted)}")


def embed(trained: TrainedModel, data: str, split: Split) -> Images:
    """Embed the images of a split."""
    dataset = open_data(trained.encoder, data)
    ids = [dataset.image_ids(one) for one in dataset.classes(split)]
    features = trained.encoder.features(dataset, torch.from_numpy(np.concatenate(ids)))
    print(f"{len(features):,} images of {len(ids)} classes unknown to the memory")
    return Images(features, np.repeat(np.arange(len(ids)), [len(one) for one in ids]))


def random_draw(images: Images, share: float, seed: int, options: argparse.Namespace) -> list[Ids]:
    """Return images that are labeled, that may be labeled, and that are classified, at random.

    A share of the classes gets one label each.
    """
    random = np.random.default_rng(seed)
    classes = random.permutation(np.unique(images.classes))[: options.classes]
    parts: list[list[Ids]] = [[], [], []]
    for place, one in enumerate(classes):
        ids = random.permutation(np.flatnonzero(images.classes == one))[: options.images]
        first = options.held_out + (place < share * len(classes))
        parts[0].append(ids[options.held_out : first])
        parts[1].append(ids[first:])
        parts[2].append(ids[: options.held_out])
    return [np.concatenate(part) for part in parts]


def label_by(
    method: str,
    trained: TrainedModel,
    images: Images,
    draw: list[Ids],
    number: int,
    rounds: int,
    seed: int,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Label ``number`` images per round; return the accuracy before and after every round.

    Also the number of suggestions per round that are called novel, and how many of these are of a
    class without label.
    """
    random = np.random.default_rng(seed)
    labeled, pool, held_out = draw
    found, novel_counts = [], []
    for left in range(rounds, -1, -1):
        known = images.classes[labeled]
        classifier = vsm.FewShotClassifier(trained).fit(images.rows(labeled), known)
        found.append(classifier.score(images.rows(held_out), images.classes[held_out]))
        if not left:
            break
        if method == "random":
            chosen = random.permutation(len(pool))[:number]
        elif method == "vsm suggest":
            suggested = classifier.suggest(images.rows(pool), number)
            chosen = np.array([one.image for one in suggested])
            novel = pool[[one.image for one in suggested if one.is_novel]]
            novel_counts.append((len(novel), int((~np.isin(images.classes[novel], known)).sum())))
        else:
            best = np.sort(classifier.predict_proba(images.rows(pool)), 1)
            chosen = np.argsort(best[:, -1] - best[:, -2], kind="stable")[:number]
        labeled, pool = np.append(labeled, pool[chosen]), np.delete(pool, chosen)
    return found, novel_counts


def report(start: str, labels: int, number: int, measured: npt.NDArray[np.float64]) -> None:
    """Print percent by round, from ``[draws, methods, rounds + 1]``."""
    draws = len(measured)
    print(f"start with {start}, held-out accuracy in percent ({draws} draws):")
    print("| labels | random | vsm suggest | − random | least certain | − random |")
    print("|---:|---:|---:|---:|---:|---:|")
    for place in range(measured.shape[-1]):
        values = measured[..., place]
        cells = [f"{values[:, 0].mean():.1f}"]
        for method in (1, 2):
            apart = values[:, method] - values[:, 0]
            error = student_quantile(draws - 1) * apart.std(ddof=1) / draws**0.5
            cells += [f"{values[:, method].mean():.1f}", f"{apart.mean():+.1f} ± {error:.1f}"]
        print(f"| {labels + place * number} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
