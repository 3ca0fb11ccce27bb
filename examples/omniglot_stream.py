"""A memory that grows over a stream of tasks: alphabets arrive one after the other.

    vsm data prepare omniglot --download
    python examples/omniglot_stream.py --plot stream.png
    python examples/omniglot_stream.py --data glyphs --model glyphs-5w1s --plot stream.png

The characters of each alphabet, all unseen in training, are fitted from a few examples and
remembered. Every few alphabets, all characters so far are classified against each other from one
new example each. The control is the same model on the same images without the memory of the
stream. Intervals are over characters. The plot needs the extra `plots`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from vsm import FewShotClassifier, ImageDataset
from vsm.data import open_images
from vsm.evaluation.intervals import Estimate, estimate

EXAMPLES, QUERIES = 5, 5
Row = tuple[int, list[Estimate]]
"""Number of characters; accuracy with the memory, without it, and their difference."""


def test_alphabets(images: ImageDataset) -> list[list[int]]:
    """Return the upright characters of the test split by alphabet."""
    alphabets: dict[str, list[int]] = {}
    for class_id in images.classes("test").tolist():
        alphabet, character = images.class_names[class_id].split("/")
        if "@" not in character:  # rotated
            alphabets.setdefault(alphabet, []).append(class_id)
    return list(alphabets.values())


def labeled(
    images: ImageDataset, class_ids: Sequence[int], first: int, count: int
) -> tuple[list[np.ndarray], list[str]]:
    """Return ``count`` images of each character, beginning with the ``first``, and their labels."""
    chosen = [images.image_ids(class_id)[first : first + count] for class_id in class_ids]
    labels = [images.class_names[class_id] for class_id in class_ids for _ in range(count)]
    return list(images.images[np.concatenate(chosen)]), labels


def accuracies(
    classifier: FewShotClassifier, images: ImageDataset, class_ids: Sequence[int]
) -> torch.Tensor:
    """Fit one new example of each character; return the accuracy of each."""
    classifier.fit(*labeled(images, class_ids, EXAMPLES, 1))
    queries, labels = labeled(images, class_ids, EXAMPLES + 1, QUERIES)
    right = classifier.predict(queries) == np.asarray(labels)
    return torch.from_numpy(right.reshape(len(class_ids), QUERIES).mean(1))


def stream(images: ImageDataset, model: str, num_alphabets: int, every: int) -> list[Row]:
    """Remember one alphabet after another; measure and print every so often."""
    learner, control = (FewShotClassifier.from_pretrained(model) for _ in range(2))
    met: list[int] = []
    rows: list[Row] = []
    alphabets = test_alphabets(images)[:num_alphabets]
    for number, alphabet in enumerate(alphabets, start=1):
        learner.fit(*labeled(images, alphabet, 0, EXAMPLES)).remember()
        met += alphabet
        if number % every == 0 or number == len(alphabets):
            with_memory, without = (accuracies(one, images, met) for one in (learner, control))
            found = [estimate(one) for one in (with_memory, without, with_memory - without)]
            rows.append((len(met), found))
            print(f"{number:9}  {len(met):10}", *found, sep="  ", flush=True)
    return rows


def plot(rows: Sequence[Row], title: str) -> Figure:
    """Plot accuracy against the number of remembered characters."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    characters = [count for count, _ in rows]
    for place, label in enumerate(("remembering the stream", "not remembering it")):
        means = [100 * found[place].mean for _, found in rows]
        intervals = [100 * found[place].ci95 for _, found in rows]
        axes.errorbar(characters, means, intervals, fmt="o-", capsize=3, label=label)
    axes.set(xlabel="characters so far, each a class", ylabel="accuracy, one new example each (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stream, print the table, and plot it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="omniglot", help="omniglot, or glyphs")
    parser.add_argument("--model", default="omniglot-vsm", help="a shipped model, or a run")
    parser.add_argument("--alphabets", type=int, default=50, help="at most")
    parser.add_argument("--every", type=int, default=5, help="alphabets between measurements")
    parser.add_argument("--plot", type=Path, help="file of the plot")
    options = parser.parse_args(arguments)

    print("alphabets  characters   remembering   not remembering   difference")
    rows = stream(open_images(options.data), options.model, options.alphabets, options.every)
    if options.plot:
        title = f"{options.data}, {options.model}: {EXAMPLES} examples each when first met"
        plot(rows, title).savefig(options.plot, dpi=110)
        print(options.plot)


if __name__ == "__main__":
    main()
