"""``vsm train``."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonargparse

from vsm.cli.output import TrainingBar, print_json
from vsm.configuration import instantiate, preset_paths, settings_from_files, settings_to_dict
from vsm.errors import SettingsError
from vsm.settings import RunSettings

BACKBONE, BACKBONE_ALIAS = "--model.backbone", "--backbone"


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the run's settings and where it goes."""
    parser.add_argument("--output", type=Path, required=True, help="The run directory to write.")
    parser.add_argument(
        "--config",
        action="config",
        help="YAML settings, may be repeated; whatever comes later on the line wins.",
    )
    parser.add_argument(
        "--preset", type=str, help="Shipped settings by name, e.g. paper-omniglot-5way-1shot."
    )
    parser.add_argument(
        "--resume", action="store_true", help="Go on from the last state in --output, if any."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace a run that --output already holds."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object when done, and no progress."
    )
    parser.add_argument(
        "--backbone",
        type=str | None,
        help="Short for --model.backbone: conv4, resnet12, wrn28_10, or your own module:attribute.",
    )
    parser.add_class_arguments(RunSettings)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Train."""
    words = _with_preset(_with_full_names(arguments))
    parsed = parser.parse_args(words)
    if parsed.resume and parsed.overwrite:
        raise SettingsError("--resume and --overwrite contradict each other; give one of them")
    stored = parsed.output / "config.yaml"
    _check_output(parsed.output, parsed.resume)
    if parsed.resume and stored.is_file():
        parsed = parser.parse_args(["--config", str(stored), *words])
    if parsed.backbone is not None:
        raise SettingsError("backbone: in a settings file it belongs to model, as model.backbone")
    settings = instantiate(parsed)
    settings = replace(settings, data=_findable(settings.data))
    if parsed.resume and stored.is_file():
        _refuse_changes(settings, stored)
    _require_consent(settings, words)

    from vsm.interruption import Interrupted
    from vsm.runs import RunDirectory
    from vsm.runtime import keep_allocations
    from vsm.training import named_again, train

    keep_allocations()
    if parsed.overwrite:
        RunDirectory(parsed.output).config.unlink(missing_ok=True)
    try:
        with TrainingBar(settings.method, settings.steps, quiet=parsed.json) as bar:
            finished = train(settings, parsed.output, parsed.resume, bar)
    except Interrupted as interruption:
        print(f"vsm train: {interruption}", file=sys.stderr)
        sys.exit(interruption.exit_code)
    validations = [row for row in finished.read_metrics() if "validation" in row]
    best = max(validations, key=lambda row: row["validation"]["accuracy"])
    if parsed.json:
        print_json({"run": str(parsed.output), "best_step": best["step"], **best["validation"]})
    else:
        score = best["validation"]
        print(
            f"{parsed.output}: best {score['way']}-way validation accuracy {score['accuracy']:.1%} "
            f"± {score['ci95']:.1%} at step {best['step']}; measure it on unseen classes with: "
            f"vsm evaluate {parsed.output}{named_again(settings)}"
        )


def _check_output(output: Path, resume: bool) -> None:
    """Refuse places where a run would be lost or would bury something else."""
    if output == Path():
        raise SettingsError("output: give the run a folder of its own, got the current one")
    if not resume:
        return
    leftovers = ("resume.safetensors", "model.safetensors", "metrics.jsonl")
    has_run = any((output / name).exists() for name in leftovers)
    if has_run and not (output / "config.yaml").is_file():
        raise SettingsError(f"output: {output} has no config.yaml, so it cannot be resumed")
    if not (output / "resume.safetensors").is_file():
        print(f"vsm train: nothing to resume in {output}, starting anew", file=sys.stderr)


def _findable(data: str) -> str:
    """Make the path of ``folder:PATH`` or ``features:PATH`` absolute; it is read from anywhere."""
    kind, colon, path = data.partition(":")
    if kind in ("folder", "features") and path:
        return f"{kind}{colon}{Path(path).expanduser().resolve()}"
    return data


def _with_full_names(arguments: Sequence[str]) -> list[str]:
    """Let ``--backbone`` stand for ``--model.backbone``."""
    names = {word.partition("=")[0] for word in arguments}
    if {BACKBONE_ALIAS, BACKBONE} <= names:
        raise SettingsError(f"{BACKBONE_ALIAS} and {BACKBONE} are one setting; give one of them")
    return [
        BACKBONE + word.removeprefix(BACKBONE_ALIAS)
        if word.partition("=")[0] == BACKBONE_ALIAS
        else word
        for word in arguments
    ]


def _require_consent(settings: RunSettings, words: Sequence[str]) -> None:
    """Let files choose among our backbones, but only the command line name other code to import."""
    own = settings.model.own_backbone
    following = zip(words, [*words[1:], ""], strict=True)
    named = {after for word, after in following if word == BACKBONE}
    named |= {word.partition("=")[2] for word in words if word.startswith(f"{BACKBONE}=")}
    if own is not None and own not in named:
        raise SettingsError(
            f"model.backbone: a settings file names code that is not part of vsm, {own}; if you "
            f"trust it, add {BACKBONE_ALIAS} {own}"
        )


def _with_preset(arguments: Sequence[str]) -> list[str]:
    """Put the file of ``--preset NAME`` where it is named, as a ``--config``."""
    words: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--preset":
            chosen = value if equals else next(remaining, "")
            words += [word for path in preset_paths(chosen) for word in ("--config", str(path))]
        else:
            words.append(word)
    return words


def _refuse_changes(settings: RunSettings, stored: Path) -> None:
    """A resumed run keeps its settings; steps may change where no schedule depends on them."""
    before = _flat(settings_to_dict(settings_from_files(stored)))
    for key, value in _flat(settings_to_dict(settings)).items():
        may_change = key == "steps" and settings.optimiser.schedule != "cosine"
        if value != before[key] and not may_change:
            raise SettingsError(
                f"{key}: the run in {stored.parent} was begun with {before[key]!r}, got {value!r}; "
                "leave it out to resume, or choose another --output"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
