"""Measure how many planted label errors `vsm review` finds.

The memory must not contain the classes: learn it from part of a folder, and plant errors in the
others. Compared with confident learning on cross-validated logistic regression of the features:

    vsm memory learn --encoder efficientnet-lite0 --data folder:photos#1 --output runs/part
    python examples/planted_label_errors.py runs/part photos#1
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

import vsm
from vsm.classify.labeling import review
from vsm.data.folder import list_classes
from vsm.encoders.encoder import embed_files
from vsm.evaluation.intervals import student_quantile

Array = npt.NDArray[np.float64]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the precision at the number of planted errors, with intervals over draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", help="a run whose memory holds the training classes alone")
    parser.add_argument("folder", type=Path, help="the same folder of class folders")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2])
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args(arguments)
    trained = vsm.load(options.run)
    lists, files = list_classes(options.folder)
    names = [*lists["validation"], *lists["test"]]
    images = [file for name in names for file in files[name]]
    truth = np.array([name for name in names for _ in files[name]])
    features = embed_files(trained.encoder, images)
    rows = 10 * features.numpy() / np.linalg.norm(features.numpy(), axis=1, keepdims=True)
    print(f"{len(images):,} images of {len(names)} classes unknown to the memory")
    for share in options.shares:
        found = []
        for draw in range(options.draws):
            labels, wrong = planted(truth, share, draw)
            issues = review(trained, features, list(labels)).label_issues[: len(wrong)]
            ours = [one.image for one in issues]
            confident, odds = by_logistic_regression(rows, labels, len(wrong))
            found.append([np.isin(one, wrong).mean() for one in (ours, confident, odds)])
        print(f"{share:.0%} wrong, precision at their number ({options.draws} draws):")
        for name, values in zip(METHODS, np.array(found).T, strict=True):
            error = student_quantile(len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
            print(f"  {name}: {values.mean():.1%} ± {error:.1%}")


METHODS = ("vsm review", "confident learning", "log odds of logistic regression")


def planted(
    truth: npt.NDArray[np.str_], share: float, seed: int
) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.int64]]:
    """Give a share of the images another label; return all labels, and which are wrong."""
    random, labels = np.random.default_rng(seed), truth.copy()
    wrong = random.choice(len(truth), round(share * len(truth)), replace=False)
    names = np.unique(truth)
    for place in wrong:
        labels[place] = random.choice(names[names != truth[place]])
    return labels, wrong


def by_logistic_regression(
    rows: Array, labels: npt.NDArray[np.str_], number: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the ``number`` most likely label issues by confident learning, and by log odds.

    Confident learning (Northcutt et al. 2021): an image is suspicious if another class is at least
    as probable as that class is for its own members on average; sorted by the margin.
    """
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    classifier = LogisticRegression(C=1.0, max_iter=300)
    probabilities = cross_val_predict(classifier, rows, labels, cv=folds, method="predict_proba")
    own_class = np.unique(labels, return_inverse=True)[1]
    place = np.arange(len(labels))
    own = probabilities[place, own_class]
    others = probabilities.copy()
    others[place, own_class] = 0
    best = others.max(1)
    usual = np.array([own[own_class == one].mean() for one in range(probabilities.shape[1])])
    likely = probabilities >= usual
    chosen = np.where(likely, probabilities, -1).argmax(1)
    suspicious = likely.any(1) & (chosen != own_class)
    confident = np.lexsort((own - best, ~suspicious))[:number]
    return confident, np.argsort(np.log(own / best), kind="stable")[:number]


if __name__ == "__main__":
    main()
