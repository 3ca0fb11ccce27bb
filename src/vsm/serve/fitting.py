"""Classifiers of tasks, fitted when they are asked for and kept while nothing changes."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vsm.classify import FewShotClassifier, Recalled
from vsm.classify.fitted import Examples
from vsm.errors import ClassifierError, NotStoredError, VsmError
from vsm.memory.named import NamedMemory
from vsm.runs.trained_model import TrainedModel
from vsm.stores import Store, Support
from vsm.stores.contract import Versions

RECALLED_SHOWN = 5


class FittedTask(NamedTuple):
    """A task's classifier, what it was fitted to, and what each of its classes recalled."""

    versions: Versions
    classifier: FewShotClassifier
    support: Support
    recalled: dict[Any, list[Recalled]]


class Classifiers:
    """The classifiers of the tasks of a store; used by one thread alone.

    Whether one is still true is told by the versions in the store, so that changes by other servers
    are seen with the next answer.
    """

    def __init__(self, trained: TrainedModel, store: Store, most: int) -> None:
        self.trained, self.store, self.most = trained, store, most
        self._fitted: OrderedDict[str, FittedTask] = OrderedDict()
        self._model: tuple[int, TrainedModel] | None = None
        self.fits = 0

    def of(self, tasks: Sequence[str]) -> dict[str, FittedTask | VsmError]:
        """Return the classifier of each task, or why there is none."""
        try:
            versions = self.store.versions(tasks)
        except VsmError as error:
            return dict.fromkeys(tasks, error)
        return {task: self._of(task, versions.get(task)) for task in dict.fromkeys(tasks)}

    def _of(self, task: str, versions: Versions | None) -> FittedTask | VsmError:
        found = self._fitted.pop(task, None)
        try:
            if versions is None:
                raise NotStoredError(f"task: there is no {task[:64]!r}; was it deleted?")
            if found is None or found.versions != versions:
                found = self._fit(task, versions)
        except VsmError as error:
            return error
        self._fitted[task] = found
        if len(self._fitted) > self.most:
            self._fitted.popitem(last=False)
        return found

    def _fit(self, task: str, versions: Versions) -> FittedTask:
        support = self.store.support(task)
        if not support.labels:
            raise ClassifierError(
                f"task: {task} has no examples yet; add some with POST /v1/tasks/{task}/examples"
            )
        trained = self._model_now()
        recalled = _without_own(trained.memory, support)
        examples = _examples(support, trained)
        classifier = FewShotClassifier.of_examples(trained, examples, recalled)
        self.fits += 1
        return FittedTask(versions, classifier, support, classifier.recalled(RECALLED_SHOWN))

    def _model_now(self) -> TrainedModel:
        """Return the model with the memory that the store has now."""
        version, memory = self.store.memory()
        if self._model is None or self._model[0] != version:
            model = self.trained
            if memory is not None:
                model = model.with_memory(memory, repr(self.store))
            self._model = version, model
        return self._model[1]


def _examples(support: Support, trained: TrainedModel) -> Examples:
    """Return the examples of a task; what was remembered of a class comes first."""
    features, labels = support.features.to(trained.model.device), np.asarray(support.labels)
    examples = Examples().add(features, labels)
    pairs = list(zip(support.labels, support.remembered, strict=True))
    done = tuple(sum(yes for label, yes in pairs if label == one) for one in examples.labels)
    return replace(examples, remembered=done)


def _without_own(memory: NamedMemory | None, support: Support) -> NamedMemory | None:
    """Return the memory without the classes that it took in from this task.

    They are its own examples, which would count twice. So remembering leaves the answers of a task
    as they are, to the bit, as it does those of a :class:`FewShotClassifier`.
    """
    if memory is None:
        return None
    pairs = zip(support.labels, support.remembered, strict=True)
    own = {label for label, remembered in pairs if remembered} & memory.added
    return memory.forget(sorted(own)) if own else memory
