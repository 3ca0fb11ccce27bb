"""``vsm demo``."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from vsm.cli.arguments import JsonOption
from vsm.cli.output import ProgressBar, print_json, progress_bar, require_extra, say
from vsm.errors import RunError
from vsm.runs.configuration import preset_paths, read_settings
from vsm.settings import GaussianSettings, Method, RunSettings
from vsm_lab.jobs import with_changes

METHODS_SHOWN: tuple[Method, ...] = ("protonet", "vpn", "vsm")
LEARNED = "gaussian"  # the memory that is learned of the features of the last method


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare where the demo goes and how long it takes."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="Folder for runs and report.html."
    )
    parser.add_argument("--steps", type=int | None, help="Training steps; unset: the preset's.")
    parser.add_argument("--episodes", type=int, default=2000, help="Test episodes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of training and episodes.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an earlier demo.")
    JsonOption.add_arguments(parser)


def start(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Train three methods, learn a memory, compare all on unseen alphabets, write a report."""
    parsed = parser.parse_args(arguments)
    require_extra("the report", "plots")

    from vsm.cli.evaluate import print_comparison
    from vsm.data import open_images
    from vsm.evaluation.evaluator import EpisodeProtocol
    from vsm.learning import learn_memory
    from vsm.runs.loading import load
    from vsm.runs.trained_model import Comparison, made_in_memory
    from vsm.system.allocator import keep_allocations
    from vsm.training import train
    from vsm_lab.demo_report import write_report

    keep_allocations()
    if parsed.output.exists() and not parsed.output.is_dir():
        raise RunError(f"output: {parsed.output} is a file; choose another --output")
    if parsed.output.exists():
        _clear(parsed.output, parsed.overwrite)
    base = with_changes(read_settings(RunSettings, *preset_paths("demo")), {"seed": parsed.seed})
    base = base if parsed.steps is None else with_changes(base, {"steps": parsed.steps})
    paths = [parsed.output / method for method in METHODS_SHOWN]
    for method, path in zip(METHODS_SHOWN, paths, strict=True):
        with ProgressBar(quiet=parsed.json) as bar:
            last = train(
                with_changes(base, {"method": method}), path, progress=bar, learn_memory=False
            )
    paths.append(parsed.output / LEARNED)
    dataset = open_images(base.data)
    last.encoder.source = str(paths[-2])
    made_in_memory(*learn_memory(last.encoder, dataset, GaussianSettings())).write(paths[-1])
    protocol = EpisodeProtocol(
        base.data, "test", way=5, shot=1, queries=15, episodes=parsed.episodes, seed=parsed.seed
    )
    measured = []
    for path in paths:
        with progress_bar(f"test {path.name}", parsed.episodes, quiet=parsed.json) as bar:
            measured.append(load(path).on(protocol).measure(protocol, bar))
    comparison = Comparison(measured)
    report = write_report(measured, dataset, parsed.output / "report.html")
    if parsed.json:
        print_json({**comparison.as_dict(), "report": str(report)})
        return
    print_comparison(comparison)
    say(f"Report: {report}", file=sys.stderr)


def _clear(output: Path, overwrite: bool) -> None:
    """Make way for a new demo, but never remove a folder that is not a demo's."""
    is_demo = all(
        child.name == "report.html"
        or (child.name in (*METHODS_SHOWN, LEARNED) and (child / "config.yaml").is_file())
        for child in output.iterdir()
    )
    if not is_demo:
        raise RunError(f"output: {output} holds something else; choose another --output")
    if not overwrite and any(output.iterdir()):
        raise RunError(f"output: {output} already holds a demo; replace it with --overwrite")
    shutil.rmtree(output)
