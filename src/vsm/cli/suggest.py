"""``vsm suggest``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import (
    add_backbone_argument,
    add_json_argument,
    add_memory_argument,
    add_support_argument,
)
from vsm.cli.classify import default_model
from vsm.cli.output import print_json, print_table, progress_bar, say
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.classify import Suggestion


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare examples, the pile, and where the suggestions go."""
    add_support_argument(parser)
    parser.add_argument(
        "--unlabeled",
        "--unlabelled",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="Images to choose from, folders, or CSV files with a column path; what --support "
        "has is left out.",
    )
    parser.add_argument("--number", type=int, default=20, help="Images to choose.")
    parser.add_argument(
        "--model",
        type=str | None,
        help="A run with a Gaussian memory, or a name that vsm models lists; unset: as classify.",
    )
    add_memory_argument(parser)
    add_backbone_argument(parser)
    parser.add_argument(
        "--csv", type=Path | None, help="Write a table whose column label is to be filled in."
    )
    parser.add_argument("--output", type=Path | None, help="Write a page with thumbnails.")
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of the images that a large pile is judged by."
    )
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps or auto.")
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Fit to the support, embed the pile, choose, tell."""
    parsed = parser.parse_args(arguments)
    if parsed.number < 1:
        raise SettingsError(f"number: must be at least 1, got {parsed.number}")

    from vsm.classify import FewShotClassifier
    from vsm.classify.classifier import Embedded
    from vsm.classify.pages import suggestions_csv, suggestions_html
    from vsm.data.folder import labeled_images
    from vsm.encoders.embedding import embed_files
    from vsm.system.files import write_text

    examples, labels = labeled_images(*parsed.support)
    images = _pile(parsed.unlabeled, examples)
    model = parsed.model or default_model()
    classifier = FewShotClassifier.from_pretrained(
        model,
        memory=parsed.memory,
        backbone=parsed.backbone,
        device=parsed.device,
        seed=parsed.seed,
    )
    trained = classifier.encoder
    assert trained is not None
    with progress_bar("embed", len(examples) + len(images), quiet=parsed.json) as bar:
        features = embed_files(trained.encoder, [*examples, *images], bar)
    classifier.fit(Embedded(features[: len(examples)]), labels)
    found = classifier.suggest(Embedded(features[len(examples) :]), parsed.number)
    if parsed.csv is not None:
        write_text(parsed.csv, suggestions_csv(found, images, parsed.csv.parent))
    if parsed.output is not None:
        write_text(parsed.output, suggestions_html(found, images, _root(parsed.unlabeled)))
    if parsed.json:
        print_json(_as_dict(found, images, model, classifier.classes_.tolist()))
        return
    _print(found, images, _root(parsed.unlabeled))
    if parsed.csv is not None:
        say(f"{parsed.csv}: a table to fill in; then give it as --support too")
    if parsed.output is not None:
        say(f"{parsed.output}: the page, with thumbnails")


def _pile(given: Sequence[Path], examples: Sequence[Path]) -> list[Path]:
    """Return the images to choose from, each once, without those that have a label."""
    from vsm.data.folder import images_below
    from vsm.errors import DataError

    found = {image.resolve(): image for source in given for image in images_below(source)}
    if not found:
        raise DataError(f"unlabeled: there are no images in {given[0]}; give files or folders")
    labeled = {image.resolve() for image in examples}
    images = [image for path, image in found.items() if path not in labeled]
    if not images:
        raise DataError(
            f"unlabeled: all images in {given[0]} are in --support already; give others"
        )
    return images


def _root(given: Sequence[Path]) -> Path:
    """Return the folder that names of images are shown below."""
    if len(given) > 1:
        return Path()
    return given[0] if given[0].is_dir() else given[0].parent


def _as_dict(
    found: Sequence["Suggestion"], images: Sequence[Path], model: str, classes: Sequence[str]
) -> dict[str, Any]:
    listed = [
        {
            "image": str(images[one.image]),
            "probabilities": dict(zip(one.classes, one.probabilities, strict=True)),
            "novelty": one.novelty,
            "stands_for": one.stands_for,
            "gain": one.gain,
            "reason": one.reason,
        }
        for one in found
    ]
    counts = {"unlabeled": len(images), "looked_at": found[0].images}
    return {"model": model, "classes": list(classes), **counts, "suggestions": listed}


def _print(found: Sequence["Suggestion"], images: Sequence[Path], root: Path) -> None:
    from vsm.classify.pages import name_below

    rows = [[name_below(images[one.image], root), one.reason] for one in found]
    title = f"{len(found):,} of {len(images):,} images to label next, the most useful first"
    print_table(title, ["image", "why"], rows, words=True)
