"""A fitted task and embedded pictures to answers as plain values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsm.classify.classifier import NONE_OF_THESE, Embedded
from vsm.errors import ClassifierError
from vsm.serve.fitting import FittedTask
from vsm.serve.problems import Problem
from vsm.system.documents import finite

ALTERNATIVES = 20
Answer = dict[str, Any]


class Question(NamedTuple):
    """What a client wants to know of pictures, besides the most probable class of each.

    Attributes:
        names: of the pictures.
        reject: the coverage at which the answer may be "none of these"; None: never.
        explain: whether to tell what the answers rest on.
    """

    names: list[str]
    reject: float | None = None
    explain: bool = False


def answer_all(
    fitted: FittedTask, questions: Sequence[Question], features: Sequence[Tensor]
) -> list[list[Answer] | Problem]:
    """Answer the questions about one task; each has the ``features [n, D]`` of its pictures.

    All pictures are classified at once. What only some ask for is done for those.
    """
    classifier = fitted.classifier
    probabilities = classifier.predict_proba(Embedded(torch.cat(list(features))))
    ends = np.cumsum([len(rows) for rows in features])[:-1]
    answers: list[list[Answer] | Problem] = []
    for question, rows, chances in zip(
        questions, features, np.split(probabilities, ends), strict=True
    ):
        try:
            answers.append(_answers(fitted, question, Embedded(rows), chances))
        except ClassifierError as error:
            reason = str(error).split("; ")[0]
            answers.append(Problem(409, "reject", f"{reason}; classify without reject"))
    return answers


def _answers(
    fitted: FittedTask, question: Question, embedded: Embedded, probabilities: Any
) -> list[Answer]:
    classifier = fitted.classifier
    labels = classifier.classes_.tolist()
    is_none = [False] * len(probabilities)
    if question.reject is not None:
        predictions = classifier.predict(embedded, question.reject).tolist()
        is_none = [prediction == NONE_OF_THESE for prediction in predictions]
    explanations: Sequence[Any] = [None] * len(probabilities)
    if question.explain:
        explanations = classifier.explain_all(embedded)
    answers = []
    for name, chances, none, explanation in zip(
        question.names, probabilities, is_none, explanations, strict=True
    ):
        order = np.argsort(-chances, kind="stable")[: ALTERNATIVES + 1].tolist()
        ranked = [{"label": labels[n], "probability": float(chances[n])} for n in order]
        best, others = ranked[0], ranked[1:]
        answer: Answer = {
            "file": name,
            "label": None if none else best["label"],
            "probability": None if none else best["probability"],
            "alternatives": ranked[:ALTERNATIVES] if none else others,
            "recalled": [one._asdict() for one in fitted.recalled[best["label"]]],
        }
        if explanation is not None:
            answer["explanation"] = finite(explanation.as_dict())
        answers.append(answer)
    return answers
