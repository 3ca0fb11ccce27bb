"""``vsm classify``, ``vsm review`` and ``vsm suggest``."""

import csv
import io
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsm.cli.arguments import (
    BackboneOption,
    JsonOption,
    ModelOptions,
    PlacementOptions,
    default_model,
)
from vsm.cli.output import print_json, print_table, progress_bar, say
from vsm.errors import SettingsError

if TYPE_CHECKING:
    from vsm.classify import FewShotClassifier, Suggestion
    from vsm.classify.classifier import Embedded
    from vsm.classify.labeling import Review as Findings

FEW_QUERIES = 50  # below this, no progress bar

Answer = dict[str, Any]
"""An answer as plain values: prediction, probabilities and, with ``--explain``, the explanation."""


class FewShotOptions(ModelOptions, JsonOption):
    """What ``classify`` and ``suggest`` share."""

    support: list[Path]
    """A folder with a folder of examples per class, or a CSV file with the columns path and label;
    several are taken together."""
    seed: int = 0
    """Seed of sampled prototypes, and of the images that many unlabeled ones are judged by."""
    transductive: bool = False
    """Use all images without labels together: they help to find where the classes lie."""

    def open_classifier(self) -> "FewShotClassifier":
        """Return the classifier of the model, to be fitted."""
        from vsm.classify import FewShotClassifier

        return FewShotClassifier.from_pretrained(
            self.chosen_model,
            memory=self.memory,
            backbone=self.backbone,
            device=self.device,
            seed=self.seed,
        )


class Classify(FewShotOptions):
    """Fit to the support, classify the queries, print the answers."""

    query: list[Path]
    """Images to classify, folders, or CSV files with a column path; if such a file also has a
    column label, the accuracy is printed."""
    explain: bool = False
    """Explain every answer."""
    reject: float | None = None
    """Answer 'none of these' for images far from all classes; aim to answer this share of the
    others."""
    csv: Path | None = None
    """Write the answers to this file instead."""

    def __call__(self) -> None:
        if self.json and self.csv is not None:
            raise SettingsError("csv: goes to a file and --json to the screen; give one of them")

        from vsm.classify import NONE_OF_THESE
        from vsm.data.folder import labeled_images
        from vsm.system.files import write_text

        examples, labels = labeled_images(*self.support)
        queries, truth = self._queries()
        classifier = self.open_classifier()
        if classifier.encoder is None or classifier.encoder.preprocessing is None:
            raise SettingsError(
                f"model: {self.chosen_model} takes features, not images; use another model, or "
                "vsm.FewShotClassifier from Python"
            )
        if self.reject is not None and NONE_OF_THESE in labels:
            raise SettingsError(
                f"reject: {NONE_OF_THESE!r} means that an image is none of the classes, but a "
                "folder has that name; give it another"
            )
        if self.transductive and not classifier.encoder.can_use_unlabeled:
            raise SettingsError(
                "transductive: needs Gaussian inference, or conjugate inference with squared "
                f"distances, but {self.chosen_model} has neither; leave it out, or use another "
                "model"
            )
        support = classifier.embed(examples)
        quiet = self.json or len(queries) < FEW_QUERIES
        with progress_bar("classify", len(queries), quiet) as bar:
            embedded = classifier.embed(queries, bar)
        classifier.fit(support, labels, unlabeled=embedded if self.transductive else None)
        answers = self._answers(classifier, embedded)
        accuracy = _accuracy(answers, truth)
        if self.json:
            pairs = zip(queries, answers, strict=True)
            listed = [{"image": str(query), **answer} for query, answer in pairs]
            classes = list(answers[0]["probabilities"])
            described = {"model": self.chosen_model, "classes": classes}
            print_json({**described, **accuracy, "answers": listed})
            return
        if self.csv is not None:
            write_text(self.csv, _as_csv(queries, answers))
            say(f"{self.csv}: {len(answers):,} answers")
        else:
            names = [str(query) for query in queries]
            if len(self.query) == 1 and self.query[0].is_dir():
                names = [str(query.relative_to(self.query[0])) for query in queries]
            _print(names, answers, self.explain)
        if accuracy:
            say(f"accuracy: {accuracy['accuracy']:.1%} of {accuracy['labels']:,} labels")

    def _queries(self) -> tuple[list[Path], list[str | None]]:
        """Return the images to classify, and the label of each if a table has one."""
        from vsm.data.folder import images_below, is_table, read_table
        from vsm.errors import DataError

        queries: list[Path] = []
        truth: list[str | None] = []
        for source in self.query:
            images, labels = (
                read_table(source, "optional") if is_table(source) else (images_below(source), None)
            )
            queries += images
            truth += labels or [None] * len(images)
        if not queries:
            raise DataError(f"query: there are no images in {self.query[0]}; give files or folders")
        return queries, truth

    def _answers(self, classifier: "FewShotClassifier", embedded: "Embedded") -> list[Answer]:
        """Return every answer as plain values, explained only if that is shown."""
        if self.explain or self.csv is not None:
            return [one.as_dict() for one in classifier.explain_all(embedded, reject=self.reject)]
        labels = [str(label) for label in classifier.classes_]
        predictions = classifier.predict(embedded, self.reject).tolist()
        probabilities = classifier.predict_proba(embedded).tolist()
        return [
            {"prediction": prediction, "probabilities": dict(zip(labels, row, strict=True))}
            for prediction, row in zip(predictions, probabilities, strict=True)
        ]


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


def _print(names: Sequence[str], answers: Sequence[Answer], explain: bool) -> None:
    rows = []
    for name, answer in zip(names, answers, strict=True):
        prediction, probabilities = answer["prediction"], answer["probabilities"]
        ranked = sorted(probabilities, key=lambda label: -probabilities[label])
        shown = [(label, f"{probabilities[label]:.1%}") for label in ranked]
        if prediction not in probabilities:  # none of these
            shown.insert(0, (prediction, ""))
        shown.append(("", ""))  # in place of the second, if there is but one
        rows.append([name, *shown[0], *shown[1]])
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
    rows = []
    for name, answer in zip(names, answers, strict=True):
        best = max(answer["probabilities"], key=answer["probabilities"].__getitem__)
        nats = [f"{value:.2f}" for value in answer["uncertainty"].values()]
        distance, std = answer["distances"][best], answer["std"][best]
        rows.append([name, f"{distance:.3g}", f"± {std:.1%}", *nats])
    columns = ["image", "distance", "std", "uncertainty", "aleatoric", "epistemic"]
    print_table("distance and std of the likeliest; uncertainty in nats", columns, rows)
    say("aleatoric: more examples would not remove it; epistemic: they could")


def _print_recalled(answer: Answer) -> None:
    """Print what each class recalled and was assigned, which is the same for all images."""
    unlabeled = answer["unlabeled"]
    if unlabeled is not None:
        assigned = [
            [label, f"{one['images']:.1f}", f"{one['moved']:.0%}"]
            for label, one in unlabeled.items()
        ]
        print_table("what unlabeled images added", ["class", "images", "moved by"], assigned)
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
        probabilities = [answer["probabilities"][label] for label in labels]
        numbers = [f"{value:.6f}" for value in (*answer["uncertainty"].values(), *probabilities)]
        rows.writerow([as_cell(query), as_cell(answer["prediction"]), *numbers])
    return text.getvalue()


class Review(BackboneOption, PlacementOptions, JsonOption):
    """Embed the images, leave out each in turn, and report what is odd."""

    folder: Path = field(kw_only=False)
    """A folder with a folder of images per class, or a CSV file with the columns path and label."""
    model: str | None = None
    """A run with a Gaussian memory, or a name that vsm models lists; unset: as classify."""
    output: Path = Path("review.html")
    """The page to write."""
    csv: Path | None = None
    """Also write a row for every image."""
    number: int = 60
    """Findings of each kind to show."""
    duplicate: float = 0.98
    """Cosine from which images are near duplicates."""

    def __call__(self) -> None:
        if self.number < 1:
            raise SettingsError(f"number: must be at least 1, got {self.number}")
        if not 0 < self.duplicate <= 1:
            raise SettingsError(f"duplicate: expected a cosine up to 1, got {self.duplicate}")

        from vsm.classify.labeling import review
        from vsm.classify.pages import name_below, review_csv, review_html
        from vsm.data.folder import labeled_images
        from vsm.encoders.encoder import embed_files
        from vsm.runs.loading import load
        from vsm.system.files import write_text

        placement = self.prepare_placement()
        images, labels = labeled_images(self.folder)
        model = self.model or default_model()
        trained = load(model, backbone=self.backbone, placement=placement)
        with progress_bar("embed", len(images), quiet=self.json) as bar:
            features = embed_files(trained.encoder, images, bar)
        found = review(trained, features, labels, self.duplicate)
        root = self.folder if self.folder.is_dir() else self.folder.parent
        write_text(self.output, review_html(found, images, root, self.number))
        if self.csv is not None:
            write_text(self.csv, review_csv(found, images, root))
        if self.json:
            print_json({"model": model, **_as_dict(found, images, self.number)})
            return
        rows = [
            [name_below(images[one.image], root), str(one.suggestion), f"{one.probability:.1%}"]
            for one in found.label_issues[: min(self.number, 10)]
        ]
        title = f"{len(found.label_issues):,} of {len(images):,} labels may be wrong"
        print_table(title, ["image", "rather", "chance of its label"], rows)
        say(f"{len(found.near_duplicates):,} pairs of near duplicates")
        say(f"{self.output}: the page, with thumbnails")


def _as_dict(found: "Findings", images: Sequence[Path], number: int) -> dict[str, Any]:
    def named(rows: Sequence[Any], *positions: str) -> list[dict[str, Any]]:
        """Return rows as plain values, with the image files at ``positions``."""
        values = [one._asdict() for one in rows[:number]]
        return [one | {key: str(images[one[key]]) for key in positions} for one in values]

    return {
        "images": len(images),
        "classes": len(found.labels),
        "num_label_issues": len(found.label_issues),
        "label_issues": named(found.label_issues, "image"),
        "outliers": named(found.outliers, "image"),
        "near_duplicates": named(found.near_duplicates, "first", "second"),
        "confusable": named(found.confusable),
    }


class Suggest(FewShotOptions):
    """Fit to the support, embed the unlabeled images, and say which to label next."""

    unlabeled: list[Path] = field(metadata={"aliases": ["--unlabelled"]})
    """Images to choose from, folders, or CSV files with a column path; what --support has is left
    out."""
    number: int = 20
    """Images to choose."""
    csv: Path | None = None
    """Write a table whose column label is to be filled in."""
    output: Path | None = None
    """Write a page with thumbnails."""

    def __call__(self) -> None:
        if self.number < 1:
            raise SettingsError(f"number: must be at least 1, got {self.number}")

        from vsm.classify.classifier import Embedded
        from vsm.classify.pages import name_below, suggestions_csv, suggestions_html
        from vsm.data.folder import labeled_images
        from vsm.encoders.encoder import embed_files
        from vsm.system.files import write_text

        examples, labels = labeled_images(*self.support)
        images = self._images(examples)
        classifier = self.open_classifier()
        trained = classifier.encoder
        assert trained is not None
        with progress_bar("embed", len(examples) + len(images), quiet=self.json) as bar:
            features = embed_files(trained.encoder, [*examples, *images], bar)
        unlabeled = Embedded(features[len(examples) :])
        used = unlabeled if self.transductive else None
        classifier.fit(Embedded(features[: len(examples)]), labels, unlabeled=used)
        found = classifier.suggest(unlabeled, self.number)
        root = Path()
        if len(self.unlabeled) == 1:
            [given] = self.unlabeled
            root = given if given.is_dir() else given.parent
        if self.csv is not None:
            write_text(self.csv, suggestions_csv(found, images, self.csv.parent))
        if self.output is not None:
            write_text(self.output, suggestions_html(found, images, root))
        if self.json:
            counts = {"unlabeled": len(images), "looked_at": found[0].images}
            known = {"model": self.chosen_model, "classes": classifier.classes_.tolist()}
            print_json({**known, **counts, "suggestions": _as_dicts(found, images)})
            return
        rows = [[name_below(images[one.image], root), one.reason] for one in found]
        title = f"{len(found):,} of {len(images):,} images to label next, the most useful first"
        print_table(title, ["image", "why"], rows, words=True)
        if self.csv is not None:
            say(f"{self.csv}: a table to fill in; then give it as --support too")
        if self.output is not None:
            say(f"{self.output}: the page, with thumbnails")

    def _images(self, examples: Sequence[Path]) -> list[Path]:
        """Return the images to choose from, each once, without those that have a label."""
        from vsm.data.folder import images_below
        from vsm.errors import DataError

        found = {one.resolve(): one for source in self.unlabeled for one in images_below(source)}
        where = self.unlabeled[0]
        if not found:
            raise DataError(f"unlabeled: there are no images in {where}; give files or folders")
        labeled = {image.resolve() for image in examples}
        images = [image for path, image in found.items() if path not in labeled]
        if not images:
            raise DataError(
                f"unlabeled: all images in {where} are in --support already; give others"
            )
        return images


def _as_dicts(found: Sequence["Suggestion"], images: Sequence[Path]) -> list[dict[str, Any]]:
    return [
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


COMMANDS = {
    "classify": Classify,
    "review": Review,
    "suggest": Suggest,
}
