"""``vsm review``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument
from vsm.cli.classify import default_model
from vsm.cli.output import print_json, print_table, progress_bar, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.classify.review import Review


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the pile and where the findings go."""
    parser.add_argument(
        "folder",
        type=Path,
        help="A folder with a folder of images per class, or a CSV file with the columns path "
        "and label.",
    )
    parser.add_argument(
        "--model",
        type=str | None,
        help="A run with a Gaussian memory, or a name that vsm models lists; unset: as classify.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("review.html"), help="The page to write."
    )
    parser.add_argument("--csv", type=Path | None, help="Also write a row for every image.")
    parser.add_argument("--number", type=int, default=60, help="Findings of each kind to show.")
    parser.add_argument(
        "--duplicate",
        type=float,
        default=0.98,
        help="Cosine from which images are near duplicates.",
    )
    add_backbone_argument(parser)
    add_placement_arguments(parser)
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Embed the images, leave out each in turn, and report what is odd."""
    parsed = parser.parse_args(arguments)
    if parsed.number < 1:
        raise SettingsError(f"number: must be at least 1, got {parsed.number}")
    if not 0 < parsed.duplicate <= 1:
        raise SettingsError(f"duplicate: expected a cosine up to 1, got {parsed.duplicate}")

    from vsm.classify.pages import review_csv, review_html
    from vsm.classify.review import review
    from vsm.data.folder import labeled_images
    from vsm.encoders.embedding import embed_files
    from vsm.runs.loading import load
    from vsm.system.files import write_text

    placement = prepare_placement(parsed)
    images, labels = labeled_images(parsed.folder)
    model = parsed.model or default_model()
    trained = load(model, backbone=parsed.backbone, placement=placement)
    with progress_bar("embed", len(images), quiet=parsed.json) as bar:
        features = embed_files(trained.encoder, images, bar)
    found = review(trained, features, labels, parsed.duplicate)
    root = parsed.folder if parsed.folder.is_dir() else parsed.folder.parent
    write_text(parsed.output, review_html(found, images, root, parsed.number))
    if parsed.csv is not None:
        write_text(parsed.csv, review_csv(found, images, root))
    if parsed.json:
        print_json(_as_dict(found, images, model, parsed.number))
        return
    _print(found, images, root, min(parsed.number, 10))
    say(f"{parsed.output}: the page, with thumbnails")


def _as_dict(found: "Review", images: Sequence[Path], model: str, number: int) -> dict[str, Any]:
    def of_images(rows: Sequence[Any]) -> list[dict[str, Any]]:
        values = [one._asdict() for one in rows[:number]]
        return [{"image": str(images[one.pop("image")]), **one} for one in values]

    duplicates = [
        {"first": str(images[first]), "second": str(images[second]), "cosine": cosine}
        for first, second, cosine in found.near_duplicates[:number]
    ]
    lists = {
        "label_issues": of_images(found.label_issues),
        "outliers": of_images(found.outliers),
        "near_duplicates": duplicates,
        "confusable": [one._asdict() for one in found.confusable[:number]],
    }
    counts = {
        "images": len(images),
        "classes": len(found.labels),
        "num_label_issues": len(found.label_issues),
    }
    return {"model": model, **counts, **lists}


def _print(found: "Review", images: Sequence[Path], root: Path, number: int) -> None:
    from vsm.classify.pages import name_below

    rows = [
        [
            name_below(images[one.image], root),
            str(one.suggestion),
            f"{one.probability:.1%}",
        ]
        for one in found.label_issues[:number]
    ]
    title = f"{len(found.label_issues):,} of {len(images):,} labels may be wrong"
    print_table(title, ["image", "rather", "chance of its label"], rows)
    say(f"{len(found.near_duplicates):,} pairs of near duplicates")
