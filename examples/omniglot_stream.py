"""A memory that grows over a stream of tasks: alphabets arrive one after the other.

    vsm data prepare omniglot --download
    python examples/omniglot_stream.py --picture stream.png
    python examples/omniglot_stream.py --data glyphs --model glyphs-5w1s --picture stream.png

Each alphabet's characters, none of them seen in training, are fitted from a few examples and
remembered. Every so often all characters met so far are met again, with one new example each, and
told apart, all against all. The control is the same model on the same pictures, which remembers
nothing of the stream. Intervals are over characters. The picture needs the extra `plots`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from vsm import FewShotClassifier, ImageDataset
from vsm.data import open_images
from vsm.evaluation.statistics import Estimate, estimate

EXAMPLES, QUERIES = 5, 5


class Meeting(NamedTuple):
    """How well all characters met so far were told apart, with one new example each.

    Attributes:
        alphabets: met so far.
        characters: remembered so far.
        remembering: accuracy with the memory of the stream.
        control: accuracy without it.
        difference: between the two, character by character.
    """

    alphabets: int
    characters: int
    remembering: Estimate
    control: Estimate
    difference: Estimate


def test_alphabets(images: ImageDataset) -> dict[str, list[int]]:
    """Return the upright characters of the test split by alphabet."""
    alphabets: dict[str, list[int]] = {}
    for class_id in images.classes("test").tolist():
        alphabet, character = images.class_names[class_id].split("/")
        if "@" not in character:  # which marks what was turned
            alphabets.setdefault(alphabet, []).append(class_id)
    return alphabets


def pictures_of(
    images: ImageDataset, class_ids: Sequence[int], first: int, count: int
) -> tuple[list[np.ndarray], list[str]]:
    """Return so many pictures of each character, from the ``first`` on, and their labels."""
    chosen = [images.image_ids(class_id)[first : first + count] for class_id in class_ids]
    labels = [images.class_names[class_id] for class_id in class_ids for _ in range(count)]
    return list(images.images[np.concatenate(chosen)]), labels


def accuracies(
    classifier: FewShotClassifier, images: ImageDataset, class_ids: Sequence[int]
) -> torch.Tensor:
    """Fit one new example of each character; return how well each is told from all others."""
    classifier.fit(*pictures_of(images, class_ids, EXAMPLES, 1))
    asked, labels = pictures_of(images, class_ids, EXAMPLES + 1, QUERIES)
    right = classifier.predict(asked) == np.asarray(labels)
    return torch.from_numpy(right.reshape(len(class_ids), QUERIES).mean(1))


def stream(images: ImageDataset, model: str, num_alphabets: int, every: int) -> list[Meeting]:
    """Let alphabets arrive, remember each, and meet all again every so often."""
    learner = FewShotClassifier.from_pretrained(model)
    control = FewShotClassifier.from_pretrained(model)
    met: list[int] = []
    meetings = []
    alphabets = list(test_alphabets(images).values())[:num_alphabets]
    for number, alphabet in enumerate(alphabets, start=1):
        learner.fit(*pictures_of(images, alphabet, 0, EXAMPLES)).remember()
        met += alphabet
        if number % every == 0 or number == len(alphabets):
            with_memory, without = (accuracies(one, images, met) for one in (learner, control))
            found = (estimate(values) for values in (with_memory, without, with_memory - without))
            meetings.append(Meeting(number, len(met), *found))
            print(row(meetings[-1]), flush=True)
    return meetings


def row(meeting: Meeting) -> str:
    """Return one line of the table."""
    cells = [f"{meeting.alphabets:9}", f"{meeting.characters:10}"]
    for value, sign in zip(meeting[2:], ("", "", "+"), strict=True):
        assert isinstance(value, Estimate)
        cells.append(f"{100 * value.mean:{sign}7.1f} ± {100 * value.ci95:3.1f}")
    return "  ".join(cells)


def draw(meetings: Sequence[Meeting], title: str) -> Figure:
    """Draw accuracy against the number of characters that are remembered."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    characters = [meeting.characters for meeting in meetings]
    lines = {
        "remembering the stream": [meeting.remembering for meeting in meetings],
        "not remembering it": [meeting.control for meeting in meetings],
    }
    for label, found in lines.items():
        means = np.asarray([100 * one.mean for one in found])
        widths = np.asarray([100 * one.ci95 for one in found])
        [line] = axes.plot(characters, means, "o-", label=label)
        axes.fill_between(
            characters, means - widths, means + widths, alpha=0.2, color=line.get_color()
        )
    axes.set_xlabel("characters met so far, all told apart")
    axes.set_ylabel("accuracy, one new example each (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stream, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="omniglot", help="omniglot, or glyphs")
    parser.add_argument("--model", default="omniglot-vsm", help="a shipped model, or a run")
    parser.add_argument("--alphabets", type=int, default=50, help="how many arrive, at most")
    parser.add_argument("--every", type=int, default=5, help="alphabets between two meetings")
    parser.add_argument("--picture", type=Path, help="where to draw the table")
    options = parser.parse_args(arguments)

    print("alphabets  characters   remembering   not remembering   difference")
    meetings = stream(open_images(options.data), options.model, options.alphabets, options.every)
    if options.picture:
        title = f"{options.data}, {options.model}: {EXAMPLES} examples each when first met"
        draw(meetings, title).savefig(options.picture, dpi=110)
        print(options.picture)


if __name__ == "__main__":
    main()
