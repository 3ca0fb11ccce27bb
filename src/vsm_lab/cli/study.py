"""``vsm study``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import (
    BackbonesOption,
    JsonOption,
    PlacementOptions,
)
from vsm.cli.output import print_json, require_extra, say
from vsm.errors import RunError, SettingsError, VsmError
from vsm.system.files import shortened
from vsm_lab.cli.running import (
    add_output_argument,
    add_running_arguments,
    chosen_launcher,
    require_success,
    run_jobs,
    show_plan,
)
from vsm_lab.study.definition import Study, read_study

if TYPE_CHECKING:
    from vsm_lab.job_files import JobStore
    from vsm_lab.study.pretraining import PretrainingPlan
    from vsm_lab.study.runs import StudyPlan
    from vsm_lab.study.transductive import TransductivePlan
    from vsm_lab.study.uncertainty import UncertaintyPlan

    Plan = StudyPlan | UncertaintyPlan | PretrainingPlan | TransductivePlan

OUTPUT = Path("runs/study")


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the studies, and what to do with them."""
    parser.add_argument(
        "studies", type=Path, nargs="+", help="YAML files; results go into a folder beside each."
    )
    parser.add_argument(
        "--render",
        type=str | None,
        nargs="?",
        const="",
        help="Write the page from the result file again and measure nothing: to this Markdown "
        "file, or beside each study if none is named.",
    )
    add_output_argument(parser, OUTPUT)
    add_running_arguments(parser)
    BackbonesOption.add_arguments(parser)
    PlacementOptions.add_arguments(parser)
    JsonOption.add_arguments(parser)


def start(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure studies, or render their results."""
    parsed = parser.parse_args(arguments)
    studies = [read_study(path) for path in parsed.studies]
    require_extra("the page of a study", "plots")
    if parsed.render is not None:
        _render(studies, parsed)
        return

    from vsm_lab.job_files import JobStore
    from vsm_lab.jobs import in_order

    PlacementOptions.from_parsed(parsed).prepare_placement()  # says if there is no such device
    plans = [_plan(study, parsed) for study in studies]
    store, launcher = JobStore(parsed.output), chosen_launcher(parsed)
    jobs = in_order(job for plan in plans for job in plan.jobs)
    if parsed.dry_run:
        show_plan(jobs, store, {}, parsed.json)
        return
    outcome = run_jobs("study", jobs, launcher, parsed.output, parsed.json)
    require_success(outcome)
    made = {job.key for job in outcome.done}
    try:
        done = [_write(plan, store, made, parsed.json) for plan in plans]
    except VsmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{parsed.output}: holds results that do not belong there ({shortened(error)}); "
            "measure again with another --output"
        ) from error
    if parsed.json:
        print_json({"studies": done})


def _render(studies: Sequence[Study], parsed: jsonargparse.Namespace) -> None:
    """Write the pages of studies, or that of a single one to the file that was named."""
    from vsm_lab.study.page import write_page

    if parsed.render and len(studies) > 1:
        raise SettingsError(f"render: {parsed.render} is one page; name one study, or no page")
    named = Path(parsed.render) if parsed.render else None
    pages = [str(write_page(study, named)) for study in studies]
    if parsed.json:
        print_json({"pages": pages})
    for page in () if parsed.json else pages:
        say(page)


def _plan(study: Study, parsed: jsonargparse.Namespace) -> "Plan":
    from vsm_lab.study.pretraining import PretrainingPlan
    from vsm_lab.study.runs import StudyPlan
    from vsm_lab.study.transductive import TransductivePlan
    from vsm_lab.study.uncertainty import UncertaintyPlan

    kinds: dict[str, type[Plan]] = {
        "runs": StudyPlan,
        "uncertainty": UncertaintyPlan,
        "pretraining": PretrainingPlan,
        "transductive": TransductivePlan,
    }
    kind = kinds[study.settings.kind]
    return kind(study, parsed.backbone, device=parsed.device, precision=parsed.precision)


def _write(plan: "Plan", store: "JobStore", made: set[str], quiet: bool) -> dict[str, Any]:
    """Write the result file and the page of a study."""
    from vsm_lab.study.page import write_page

    study = plan.study
    plan.write_results(store)
    page = write_page(study)
    measured = sum(job.key in made for job in plan.jobs)
    kept = len(plan.jobs) - measured
    if not quiet:
        say(f"{measured} measurements made and {kept} kept; {study.results}, {page}")
    return {
        "study": str(study.path),
        "results": str(study.results),
        "page": str(page),
        "measured": measured,
        "kept": kept,
    }
