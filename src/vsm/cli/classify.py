"""``vsm classify``."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_json_argument, add_memory_argument
from vsm.cli.output import counting, print_json, print_table
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.classify import Explanation

DEFAULT_MODEL = "cifar-fs-vsm"  # photographs are what most people have


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare examples, questions and the model."""
    parser.add_argument(
        "--support", type=Path, required=True, help="A folder with a folder of examples a class."
    )
    parser.add_argument(
        "--query",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="Pictures to classify, or folders.",
    )
    parser.add_argument(
        "--model",
        type=str,
        default=DEFAULT_MODEL,
        help="A run directory, or a name that vsm models lists.",
    )
    add_memory_argument(parser)
    add_backbone_argument(parser)
    parser.add_argument(
        "--explain", action="store_true", help="Tell what every answer rests on as well."
    )
    parser.add_argument(
        "--reject",
        type=float | None,
        help="Answer 'none of these' where a picture is too far; this share of others is answered.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sampled prototypes.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps or auto.")
    parser.add_argument("--csv", type=Path | None, help="Write the answers to this file instead.")
    add_json_argument(parser)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Fit to the support, classify the queries, tell."""
    parsed = parser.parse_args(arguments)
    if parsed.json and parsed.csv is not None:
        raise SettingsError("csv: goes to a file and --json to the screen; give one of them")

    from vsm.classify import NONE_OF_THESE, FewShotClassifier
    from vsm.data.folder import images_below, labeled_images
    from vsm.errors import DataError
    from vsm.system.files import write_text

    examples, labels = labeled_images(parsed.support)
    queries = [image for given in parsed.query for image in images_below(given)]
    if not queries:
        raise DataError(f"query: there are no images in {parsed.query[0]}; give files or folders")
    classifier = FewShotClassifier.from_pretrained(
        parsed.model,
        memory=parsed.memory,
        backbone=parsed.backbone,
        device=parsed.device,
        seed=parsed.seed,
    )
    encoder = classifier.encoder
    assert encoder is not None
    if encoder.pictures is None:
        raise SettingsError(
            f"model: {parsed.model} was trained on features, not on pictures; use "
            "vsm.FewShotClassifier from Python"
        )
    if parsed.reject is not None and NONE_OF_THESE in labels:
        raise SettingsError(
            f"reject: {NONE_OF_THESE!r} means that a picture is none of the classes, but a folder "
            "has that name; give it another"
        )
    classifier.fit(examples, labels)
    with counting("classify", len(queries), quiet=parsed.json or len(queries) < 50) as advance:
        features = encoder.embed(queries, advance)
    answers = classifier.explain_features(features)
    if parsed.reject is not None:
        accepted = classifier.accepted(features, parsed.reject)
        answers = [
            answer if known else replace(answer, prediction=NONE_OF_THESE)
            for answer, known in zip(answers, accepted, strict=True)
        ]
    if parsed.csv is not None:
        write_text(parsed.csv, _as_csv(queries, answers))
        print(f"{parsed.csv}: {len(answers):,} answers")
    elif parsed.json:
        print_json(
            {
                "model": str(parsed.model),
                "classes": list(answers[0].probabilities),
                "answers": [
                    {"picture": str(query), **_plain(answer, parsed.explain)}
                    for query, answer in zip(queries, answers, strict=True)
                ],
            }
        )
    else:
        _print(_short_names(queries, parsed.query), answers, parsed.explain)


def _plain(answer: "Explanation", explain: bool) -> dict[str, Any]:
    """Return an answer for programs, with what it rests on if that was asked for."""
    facts = answer.as_dict()
    return facts if explain else {name: facts[name] for name in ("prediction", "probabilities")}


def _short_names(queries: Sequence[Path], given: Sequence[Path]) -> list[str]:
    """Name pictures as they lie in the folder that was given, if it is one alone."""
    if len(given) == 1 and given[0].is_dir():
        return [str(query.relative_to(given[0])) for query in queries]
    return [str(query) for query in queries]


def _ranked(answer: "Explanation") -> list[str]:
    """Return the answer, if it is none of the classes, and the classes by their probability."""
    none = [] if answer.prediction in answer.probabilities else [answer.prediction]
    return none + sorted(answer.probabilities, key=lambda label: -answer.probabilities[label])


def _print(names: Sequence[str], answers: "Sequence[Explanation]", explain: bool) -> None:
    rows = []
    for name, answer in zip(names, answers, strict=True):
        row = [name]
        for label in _ranked(answer)[:2]:
            chance = answer.probabilities.get(label)
            row += [label, "" if chance is None else f"{chance:.1%}"]
        row += [""] * (5 - len(row))
        rows.append(row)
    title = f"{_counted(len(names), 'picture')}, {_counted(len(answers[0].shots), 'class')}"
    print_table(title, ["picture", "answer", "chance", "or else", "chance"], rows)
    if explain:
        _print_reasons(names, answers)
        _print_recalled(answers[0])


def _counted(count: int, what: str) -> str:
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{ending}"


def _print_reasons(names: Sequence[str], answers: "Sequence[Explanation]") -> None:
    """Print how far each picture is from its answer's prototype, and how unsure that is."""
    rows = [
        [
            name,
            f"{answer.distances[best]:.3g}",
            f"± {answer.spread[best]:.1%}",
            *(f"{nats:.2f}" for nats in answer.uncertainty),
        ]
        for name, answer in zip(names, answers, strict=True)
        for best in [max(answer.probabilities, key=lambda label: answer.probabilities[label])]
    ]
    columns = ["picture", "distance", "spread", "unsure", "aleatoric", "epistemic"]
    print_table("distance and spread of the likeliest; uncertainty in nats", columns, rows)
    print("aleatoric: more examples would not remove it; epistemic: they could")


def _print_recalled(answer: "Explanation") -> None:
    """Print what each class was told by the memory, which is the same for all pictures."""
    rows = [
        [
            str(label),
            str(answer.shots[label]),
            ", ".join(f"{name} {weight:.0%}" for name, weight in recalled) or "–",
        ]
        for label, recalled in answer.recalled.items()
    ]
    print_table("what the memory recalled", ["class", "examples", "recalled"], rows, words=True)


def _as_csv(queries: Sequence[Path], answers: "Sequence[Explanation]") -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    labels = list(answers[0].probabilities)
    rows.writerow(["picture", "answer", "total", "aleatoric", "epistemic", *labels])
    for query, answer in zip(queries, answers, strict=True):
        chances = [f"{answer.probabilities[label]:.6f}" for label in labels]
        doubts = [f"{value:.6f}" for value in answer.uncertainty]
        rows.writerow([query, answer.prediction, *doubts, *chances])
    return text.getvalue()
