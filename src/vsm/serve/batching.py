"""The thread that uses the model; requests that arrive at about the same time share a batch.

It also keeps the classifiers of tasks. The versions in the store say whether one is up to date, so
that changes by other servers are seen with the next answer.
"""

import asyncio
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.classify import FewShotClassifier, Recalled
from vsm.classify.classifier import NONE_OF_THESE, Embedded
from vsm.classify.fitted import Examples, FittedClasses
from vsm.data.dataset import Pixels
from vsm.errors import ClassifierError, NotStoredError, VsmError
from vsm.runs.trained_model import TrainedModel
from vsm.serve import Limits
from vsm.serve.middleware import Problem, logger
from vsm.serve.schemas import Alternative, Answer, QuestionForm, RecalledClass
from vsm.stores import Store, Support, Versions
from vsm.system.files import finite

MAX_RECALLED = 5
MAX_ALTERNATIVES = 20
NUMBERS_AT_ONCE = 625_000
"""Pixels times channels that pass the model at once, which is 4 photographs. More would not be
faster, and the memory that the server keeps would grow with its largest batch."""
NO_PIXELS: Pixels = np.empty((0, 0, 0, 0), np.uint8)
NOTHING = torch.empty(0)


class FittedTask(NamedTuple):
    """A task's classifier, what it was fitted to, and what each of its classes recalled."""

    versions: Versions
    fitted: FittedClasses
    classifier: FewShotClassifier  # of these classes
    support: Support
    recalled: dict[Any, list[Recalled]]

    def answer_together(
        self, question: QuestionForm, features: Tensor
    ) -> list[Answer] | Problem | ClassifierError:
        """Answer a question whose images ``[n, D]`` help each other; nothing of them is kept."""
        try:
            fitted = replace(self.fitted, unlabeled=features)
            classifier = FewShotClassifier.from_fitted(fitted)
            probabilities = classifier.predict_proba(Embedded(features))
        except ClassifierError as error:
            return error
        return self._replace(classifier=classifier).answer(question, features, probabilities)

    def answer(
        self, question: QuestionForm, features: Tensor, probabilities: npt.NDArray[np.float32]
    ) -> list[Answer] | Problem:
        """Answer a question about images with ``features [n, D]``, ``probabilities [n, N]``."""
        embedded, labels = Embedded(features), self.classifier.classes_.tolist()
        rejected: Sequence[bool] = [False] * len(features)
        explanations: Sequence[Any] = [None] * len(features)
        try:
            if question.reject is not None:
                rejected = self.classifier.predict(embedded, question.reject) == NONE_OF_THESE
            if question.explain:
                explanations = self.classifier.explain_all(embedded)
        except ClassifierError as error:
            reason = str(error).removeprefix("reject: ").split("; ")[0]
            return Problem(409, "reject", f"{reason}; classify without reject")
        answers = []
        for name, row, is_rejected, explanation in zip(
            question.names, probabilities, rejected, explanations, strict=True
        ):
            order = np.argsort(-row, kind="stable")[: MAX_ALTERNATIVES + 1].tolist()
            ranked = [Alternative(label=labels[n], probability=float(row[n])) for n in order]
            best, recalled = ranked[0], self.recalled[ranked[0]["label"]]
            answer: Answer = {
                "file": name,
                "label": None if is_rejected else best["label"],
                "probability": None if is_rejected else best["probability"],
                "alternatives": ranked[:MAX_ALTERNATIVES] if is_rejected else ranked[1:],
                "recalled": [RecalledClass(name=one.name, weight=one.weight) for one in recalled],
            }
            if explanation is not None:
                answer["explanation"] = finite(explanation.as_dict())
            answers.append(answer)
        return answers


@dataclass
class Job:
    """A job for the model.

    Its result is the features ``[n, D]`` without a task, the fitted task without a question, or
    else the answers.
    """

    result: "asyncio.Future[Any]"
    pixels: Pixels  # to embed [n, H, W, C]
    task: str | None
    question: QuestionForm | None
    features: Tensor = NOTHING  # of the pixels
    outcome: Any = None  # the result, or an error, before it is delivered


class Worker:
    """Runs jobs from an event loop in batches, first come, first served.

    A batch begins with the oldest job and includes those that arrive within a few milliseconds, or
    arrived during the batch before, up to a number of images.
    """

    def __init__(self, trained: TrainedModel, store: Store, limits: Limits) -> None:
        self.trained, self.store, self.limits = trained, store, limits
        self.batches = self.images = self.fits = 0
        self._fitted: OrderedDict[str, FittedTask] = OrderedDict()
        self._model: tuple[int, TrainedModel] | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._next: Job | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="vsm-model", daemon=True)
        self.start = self._thread.start
        # Parts of a batch pass the model in parallel, each on one core. With torch's own threads
        # every layer would wait for the core that also decodes and answers.
        self._cores = torch.get_num_threads()
        self._embedding = ThreadPoolExecutor(
            self._cores, "vsm-embed", initializer=torch.set_num_threads, initargs=(1,)
        )

    def stop(self) -> None:
        """Finish submitted jobs, then end the thread."""
        self._is_stopping = True
        self._jobs.put(None)
        self._thread.join()
        self._embedding.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are being run."""
        return self._thread.is_alive() and not self._is_stopping

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a batch."""
        return self._jobs.qsize()

    def submit(
        self,
        pixels: Pixels = NO_PIXELS,
        task: str | None = None,
        question: QuestionForm | None = None,
    ) -> "asyncio.Future[Any]":
        """Return the result of a :class:`Job` once it has run."""
        if not self.is_alive:
            raise Problem(503, "server", "it is shutting down; ask again in a moment")
        job = Job(asyncio.get_running_loop().create_future(), pixels, task, question)
        self._jobs.put(job)
        return job.result

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            wanted = [job for job in batch if not job.result.cancelled()]
            if not wanted:
                continue
            try:
                self._work(wanted)
            except Exception as error:
                logger.error("a batch failed", exc_info=error)
                for job in wanted:
                    job.outcome = error
            loop = wanted[0].result.get_loop()
            loop.call_soon_threadsafe(_deliver, wanted)  # once, as it wakes the loop

    def _take(self) -> list[Job] | None:
        """Wait for a batch; None at the end."""
        first = self._next or self._jobs.get()
        self._next = None
        if first is None:
            return None
        batch, count = [first], len(first.pixels)
        deadline = time.monotonic() + self.limits.batch_milliseconds / 1000
        while count < self.limits.batch:
            left = deadline - time.monotonic()
            try:
                job = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # behind all jobs
                break
            if count + len(job.pixels) > self.limits.batch:
                self._next = job
                break
            batch.append(job)
            count += len(job.pixels)
        return batch

    def _work(self, batch: Sequence[Job]) -> None:
        """Set the outcome of each job.

        All images of a task are classified at once, except of jobs whose images help each other.
        """
        self._embed([job for job in batch if len(job.pixels)])
        tasks = self._get_tasks([job.task for job in batch if job.task is not None])
        for job in batch:
            job.outcome = job.features if job.task is None else tasks[job.task]
        for task, fitted in tasks.items():
            asked = [(job, job.question) for job in batch if job.task == task and job.question]
            if isinstance(fitted, VsmError):
                continue
            for job, question in asked:
                if question.transductive:
                    job.outcome = fitted.answer_together(question, job.features)
            asked = [pair for pair in asked if not pair[1].transductive]
            if not asked:
                continue
            features = torch.cat([job.features for job, _ in asked])
            probabilities = fitted.classifier.predict_proba(Embedded(features))
            ends = np.cumsum([len(job.pixels) for job, _ in asked])
            parts = np.split(probabilities, ends[:-1])
            for (job, question), part in zip(asked, parts, strict=True):
                job.outcome = fitted.answer(question, job.features, part)

    def _embed(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        pixels = np.concatenate([job.pixels for job in jobs])
        self.batches += 1
        self.images += len(pixels)
        at_once = max(1, min(NUMBERS_AT_ONCE // pixels[0].size, -(-len(pixels) // self._cores)))
        pieces = torch.from_numpy(pixels).permute(0, 3, 1, 2).split(at_once)
        each = map if len(pieces) == 1 else self._embedding.map
        features = torch.cat(list(each(self.trained.encoder.embed_samples, pieces)))
        for job, part in zip(jobs, features.split([len(job.pixels) for job in jobs]), strict=True):
            job.features = part

    def _get_tasks(self, tasks: Sequence[str]) -> dict[str, FittedTask | VsmError]:
        """Return the classifier of each task, or why there is none."""
        try:
            versions = self.store.versions(tasks)
        except VsmError as error:
            return dict.fromkeys(tasks, error)
        return {task: self._get_task(task, versions.get(task)) for task in dict.fromkeys(tasks)}

    def _get_task(self, task: str, versions: Versions | None) -> FittedTask | VsmError:
        found = self._fitted.pop(task, None)
        if versions is None:
            return NotStoredError(f"task: there is no {task[:64]!r}; was it deleted?")
        if found is None or found.versions != versions:
            try:
                found = self._fit(task, versions)
            except VsmError as error:
                return error
        self._fitted[task] = found
        if len(self._fitted) > self.limits.fitted_tasks:
            self._fitted.popitem(last=False)
        return found

    def _fit(self, task: str, versions: Versions) -> FittedTask:
        support = self.store.support(task)
        if not support.examples:
            raise ClassifierError(
                f"task: {task} has no examples yet; add some with POST /v1/tasks/{task}/examples"
            )
        trained = self.current_model()
        features = support.features.to(trained.model.device)
        labels = [one.label for one in support.examples]
        examples = Examples().add(features, np.asarray(labels))
        # Remembered examples come first in their class.
        remembered = [one.label for one in support.examples if one.remembered]
        counts = tuple(remembered.count(label) for label in examples.labels)
        # Its own classes are taken out of the memory, since its examples would count twice. So
        # remembering leaves the answers of a task unchanged, as it does those of a classifier.
        recalled = trained.memory
        if recalled is not None and (own := recalled.added.intersection(remembered)):
            recalled = recalled.forget(sorted(own))
        examples = replace(examples, remembered=counts)
        fitted = FittedClasses(trained, recalled, examples)
        classifier = FewShotClassifier.from_fitted(fitted)
        self.fits += 1
        return FittedTask(versions, fitted, classifier, support, classifier.recalled(MAX_RECALLED))

    def current_model(self) -> TrainedModel:
        """Return the model with the current memory of the store."""
        version, memory = self.store.memory()
        if self._model is None or self._model[0] != version:
            model = self.trained
            if memory is not None:
                model = model.with_memory(memory, repr(self.store))
            self._model = version, model
        return self._model[1]


def _deliver(jobs: Sequence[Job]) -> None:
    """Set the results in the event loop, except of requests that were cancelled."""
    for job in jobs:
        if job.result.done():
            continue
        if isinstance(job.outcome, Exception):
            job.result.set_exception(job.outcome)
        else:
            job.result.set_result(job.outcome)
