"""Classifiers of tasks, fitted on demand and cached while nothing changes, and their answers."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsm.classify import FewShotClassifier, Recalled
from vsm.classify.classifier import NONE_OF_THESE, Embedded
from vsm.classify.fitted import Examples
from vsm.errors import ClassifierError, NotStoredError, VsmError
from vsm.memory.named import NamedMemory
from vsm.runs.trained_model import TrainedModel
from vsm.serve.problems import Problem
from vsm.serve.schemas import Alternative, Answer, RecalledClass
from vsm.stores import Store, Support
from vsm.stores.records import Versions
from vsm.system.documents import finite

MAX_RECALLED = 5
MAX_ALTERNATIVES = 20


class Question(NamedTuple):
    """What a client asks about images, besides the most probable class of each.

    Attributes:
        names: of the images.
        reject: the coverage at which the answer may be "none of these"; None: never.
        explain: whether to explain the answers.
    """

    names: list[str]
    reject: float | None = None
    explain: bool = False


class FittedTask(NamedTuple):
    """A task's classifier, what it was fitted to, and what each of its classes recalled."""

    versions: Versions
    classifier: FewShotClassifier
    support: Support
    recalled: dict[Any, list[Recalled]]

    def answer(
        self, questions: Sequence[Question], features: Sequence[Tensor]
    ) -> list[list[Answer] | Problem]:
        """Answer questions, each with the ``features [n, D]`` of its images.

        All images are classified at once; rejection and explanations only where they are asked for.
        """
        probabilities = self.classifier.predict_proba(Embedded(torch.cat(list(features))))
        ends = np.cumsum([len(rows) for rows in features])[:-1]
        answers: list[list[Answer] | Problem] = []
        for question, rows, part in zip(
            questions, features, np.split(probabilities, ends), strict=True
        ):
            try:
                answers.append(self._answer(question, Embedded(rows), part))
            except ClassifierError as error:
                reason = str(error).split("; ")[0]
                answers.append(Problem(409, "reject", f"{reason}; classify without reject"))
        return answers

    def _answer(self, question: Question, embedded: Embedded, probabilities: Any) -> list[Answer]:
        labels = self.classifier.classes_.tolist()
        is_none = [False] * len(probabilities)
        if question.reject is not None:
            predictions = self.classifier.predict(embedded, question.reject).tolist()
            is_none = [prediction == NONE_OF_THESE for prediction in predictions]
        explanations: Sequence[Any] = [None] * len(probabilities)
        if question.explain:
            explanations = self.classifier.explain_all(embedded)
        answers = []
        for name, row, none, explanation in zip(
            question.names, probabilities, is_none, explanations, strict=True
        ):
            order = np.argsort(-row, kind="stable")[: MAX_ALTERNATIVES + 1].tolist()
            ranked = [Alternative(label=labels[n], probability=float(row[n])) for n in order]
            best = ranked[0]
            recalled = self.recalled[best["label"]]
            answer: Answer = {
                "file": name,
                "label": None if none else best["label"],
                "probability": None if none else best["probability"],
                "alternatives": ranked[:MAX_ALTERNATIVES] if none else ranked[1:],
                "recalled": [RecalledClass(name=one.name, weight=one.weight) for one in recalled],
            }
            if explanation is not None:
                answer["explanation"] = finite(explanation.as_dict())
            answers.append(answer)
        return answers


class Classifiers:
    """The classifiers of the tasks of a store; for one thread.

    The versions in the store say whether a cached one is up to date, so that changes by other
    servers are seen with the next answer.
    """

    def __init__(self, trained: TrainedModel, store: Store, max_fitted: int) -> None:
        self.trained, self.store, self.max_fitted = trained, store, max_fitted
        self._fitted: OrderedDict[str, FittedTask] = OrderedDict()
        self._model: tuple[int, TrainedModel] | None = None
        self.fits = 0

    def get(self, tasks: Sequence[str]) -> dict[str, FittedTask | VsmError]:
        """Return the classifier of each task, or why there is none."""
        try:
            versions = self.store.versions(tasks)
        except VsmError as error:
            return dict.fromkeys(tasks, error)
        return {task: self._get(task, versions.get(task)) for task in dict.fromkeys(tasks)}

    def _get(self, task: str, versions: Versions | None) -> FittedTask | VsmError:
        found = self._fitted.pop(task, None)
        try:
            if versions is None:
                raise NotStoredError(f"task: there is no {task[:64]!r}; was it deleted?")
            if found is None or found.versions != versions:
                found = self._fit(task, versions)
        except VsmError as error:
            return error
        self._fitted[task] = found
        if len(self._fitted) > self.max_fitted:
            self._fitted.popitem(last=False)
        return found

    def _fit(self, task: str, versions: Versions) -> FittedTask:
        support = self.store.support(task)
        if not support.labels:
            raise ClassifierError(
                f"task: {task} has no examples yet; add some with POST /v1/tasks/{task}/examples"
            )
        trained = self._current_model()
        recalled = _without_own_classes(trained.memory, support)
        examples = _examples(support, trained)
        classifier = FewShotClassifier.of_examples(trained, examples, recalled)
        self.fits += 1
        return FittedTask(versions, classifier, support, classifier.recalled(MAX_RECALLED))

    def _current_model(self) -> TrainedModel:
        """Return the model with the current memory of the store."""
        version, memory = self.store.memory()
        if self._model is None or self._model[0] != version:
            model = self.trained
            if memory is not None:
                model = model.with_memory(memory, repr(self.store))
            self._model = version, model
        return self._model[1]


def _examples(support: Support, trained: TrainedModel) -> Examples:
    """Return the examples of a task; remembered ones of a class come first."""
    features, labels = support.features.to(trained.model.device), np.asarray(support.labels)
    examples = Examples().add(features, labels)
    pairs = list(zip(support.labels, support.remembered, strict=True))
    remembered = tuple(sum(yes for label, yes in pairs if label == one) for one in examples.labels)
    return replace(examples, remembered=remembered)


def _without_own_classes(memory: NamedMemory | None, support: Support) -> NamedMemory | None:
    """Return the memory without the classes that were added from this task.

    Its examples would count twice otherwise. So remembering leaves the answers of a task unchanged,
    to the bit, as it does those of a :class:`FewShotClassifier`.
    """
    if memory is None:
        return None
    pairs = zip(support.labels, support.remembered, strict=True)
    own = {label for label, remembered in pairs if remembered} & memory.added
    return memory.forget(sorted(own)) if own else memory
