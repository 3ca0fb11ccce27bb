"""Classify a folder of your own pictures by a few examples of each class.

    python examples/classify_folder.py --model runs/demo/vsm --support support --query query

`support` has one folder of examples per class; classes may have different numbers of them, and one
is enough. `query` is a folder of pictures. `--memory` keeps what was learned in a file: the next
time the classes of `support` are remembered there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vsm import FewShotClassifier
from vsm.data.folder import images_below, labeled_images


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit to the examples, classify the queries, explain the least certain one, remember."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--support", type=Path, required=True)
    parser.add_argument("--query", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    options = parser.parse_args(arguments)

    kept = options.memory if options.memory and options.memory.exists() else None
    classifier = FewShotClassifier.from_pretrained(options.model, memory=kept)
    classifier.fit(*labeled_images(options.support))

    pictures = images_below(options.query)
    chances = classifier.predict_proba(pictures)
    for picture, row in zip(pictures, chances, strict=True):
        print(f"{picture}: {classifier.classes_[row.argmax()]} ({row.max():.0%})")

    doubtful = pictures[chances.max(1).argmin()]
    told = classifier.explain(doubtful)
    print(f"least certain: {doubtful}")
    for label, chance in told.probabilities.items():
        recalled = ", ".join(f"{name} {weight:.0%}" for name, weight in told.recalled[label][:3])
        print(f"  {label}: {chance:.0%} ± {told.std[label]:.0%}; recalled {recalled or 'nothing'}")
    removable = told.uncertainty.epistemic / max(told.uncertainty.total, 1e-9)
    print(f"  more examples could remove {removable:.0%} of the uncertainty")

    if options.memory:
        classifier.remember()
        assert classifier.memory is not None
        classifier.memory.write(options.memory)
        print(f"{options.memory}: {len(classifier.memory.names)} classes remembered")


if __name__ == "__main__":
    main()
