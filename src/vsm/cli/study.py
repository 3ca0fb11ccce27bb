"""``vsm study``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import add_backbones_argument, add_json_argument
from vsm.cli.output import console, counting, print_json, print_table
from vsm.cli.processes import add_placement_arguments
from vsm.study.page import difference_table, score_table, write_page
from vsm.study.plan import Condition, Study, read_study

if TYPE_CHECKING:
    from vsm.system.devices import Placement


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the studies, and what to do with them."""
    parser.add_argument(
        "studies", type=Path, nargs="+", help="YAML files; results go into a folder beside each."
    )
    parser.add_argument(
        "--render",
        type=Path | None,
        help="Write this Markdown page from the result files, in this order; measure nothing.",
    )
    add_backbones_argument(parser)
    add_placement_arguments(parser)
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure studies, or render their results."""
    parsed = parser.parse_args(arguments)
    studies = [read_study(path) for path in parsed.studies]
    if parsed.render is not None:
        write_page(studies, parsed.render)
        if parsed.json:
            print_json({"page": str(parsed.render)})
        else:
            print(parsed.render)
        return

    from vsm.system.allocator import keep_allocations
    from vsm.system.devices import choose_placement

    keep_allocations()
    placement = choose_placement(parsed.device, parsed.precision)
    done = [_measure(study, placement, parsed.backbone, parsed.json) for study in studies]
    if parsed.json:
        print_json({"studies": done})


def _measure(
    study: Study, placement: "Placement", backbones: Sequence[str], quiet: bool
) -> dict[str, Any]:
    """Measure one study, write its result file, pictures and page, and print what came out."""
    from vsm.study.measuring import Measurer

    measurer = Measurer(
        study, placement, lambda title, total: counting(title, total, quiet), backbones
    )
    results = measurer.write_results()
    pictures = _draw(study, results, quiet) if study.settings.pictures else 0
    page = study.folder / "page.md"
    write_page([study], page)
    parts = measurer.parts
    if not quiet:
        for found in results["conditions"]:
            title = str(Condition(found["way"], found["shot"], found["batch_norm"]))
            scores, differences = score_table(found), difference_table(found)
            print_table(f"{study.settings.title}: {title}", scores.columns, scores.rows)
            if differences.rows:
                heading = f"{study.settings.reference} minus each other, in points"
                print_table(heading, differences.columns, differences.rows)
        made = f"{parts.measured} measurements made and {parts.kept} kept"
        console().print(f"{made}; {study.results}, {page}", highlight=False, soft_wrap=True)
    return {
        "study": str(study.path),
        "results": str(study.results),
        "page": str(page),
        "pictures": pictures,
        "measured": parts.measured,
        "kept": parts.kept,
    }


def _draw(study: Study, results: dict[str, Any], quiet: bool) -> int:
    """Draw pictures where there are images and matplotlib, or say why there are none."""
    from vsm.data import ImageDataset, open_dataset

    dataset = open_dataset(study.settings.data)
    if not isinstance(dataset, ImageDataset):
        return 0
    try:
        from vsm.study.pictures import draw_pictures
    except ImportError:
        if not quiet:
            hint = (
                "no pictures without matplotlib: pip install 'variational-semantic-memory[plots]'"
            )
            console().print(hint, highlight=False, soft_wrap=True)
        return 0
    return draw_pictures(study, results, dataset)
