"""The one thread that uses the model; requests that come at about the same time share a batch."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vsm.runs.trained_model import TrainedModel
from vsm.serve.answers import Answer, Question, answer_all
from vsm.serve.fitting import Classifiers, FittedTask
from vsm.serve.limits import Limits
from vsm.serve.problems import Problem, logger

NUMBERS_AT_ONCE = 625_000
"""Pixels times channels that pass the model at once, which is 4 photographs: more need more memory,
which would then vary with the load, and are not faster."""


class Job(NamedTuple):
    """Work for the model, and where its result goes.

    Attributes:
        result: the features ``[n, D]`` without a task; the fitted task without a question; else
            the answers.
        pixels: uint8 ``[n, H, W, C]``; None if there are none to embed.
        task: the task that is asked.
        question: what is asked of it.
    """

    result: "asyncio.Future[Any]"
    pixels: npt.NDArray[np.uint8] | None = None
    task: str | None = None
    question: Question | None = None

    @property
    def size(self) -> int:
        """Pictures to embed."""
        return 0 if self.pixels is None else len(self.pixels)


class Worker:
    """Takes jobs from an event loop and does them in batches, first come, first served.

    A batch begins with the oldest job and takes in what comes within a few milliseconds, or what
    came while the batch before was worked on, up to a number of pictures.
    """

    def __init__(self, trained: TrainedModel, classifiers: Classifiers, limits: Limits) -> None:
        self.trained, self.classifiers = trained, classifiers
        self.most, self.wait = limits.batch, limits.batch_milliseconds / 1000
        self.batches = self.pictures = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._next: Job | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="vsm-model", daemon=True)
        # Parts of a batch pass the model side by side, each on one core. Threads of torch would
        # share every layer and wait for each other, and so for whatever else the cores are doing.
        self._cores = torch.get_num_threads()
        self._embedding = ThreadPoolExecutor(
            self._cores, "vsm-embed", initializer=torch.set_num_threads, initargs=(1,)
        )

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what was submitted, then end."""
        self._is_stopping = True
        self._jobs.put(None)
        self._thread.join()
        self._embedding.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are worked on."""
        return self._thread.is_alive() and not self._is_stopping

    @property
    def waiting(self) -> int:
        """Jobs that no batch has taken in yet."""
        return self._jobs.qsize()

    def embed(self, pixels: npt.NDArray[np.uint8]) -> "asyncio.Future[Tensor]":
        """Embed pictures ``[n, H, W, C]``."""
        return self._submit(Job(_future(), pixels))

    def fitted(self, task: str) -> "asyncio.Future[FittedTask]":
        """Return a task's classifier as it is now."""
        return self._submit(Job(_future(), None, task))

    def classify(
        self, task: str, pixels: npt.NDArray[np.uint8], question: Question
    ) -> "asyncio.Future[list[Answer]]":
        """Answer a question about pictures."""
        return self._submit(Job(_future(), pixels, task, question))

    def _submit(self, job: Job) -> "asyncio.Future[Any]":
        if not self.is_alive:
            raise Problem(503, "server", "server: it is shutting down; ask again in a moment")
        self._jobs.put(job)
        return job.result

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            wanted = [job for job in batch if not job.result.cancelled()]
            if not wanted:
                continue
            try:
                outcomes = self._work(wanted)
            except Exception as error:
                logger.error("a batch failed", exc_info=error)
                outcomes = [error] * len(wanted)
            loop = wanted[0].result.get_loop()
            loop.call_soon_threadsafe(_deliver, wanted, outcomes)  # once, as it wakes the loop

    def _take(self) -> list[Job] | None:
        """Wait for a batch; None at the end."""
        first = self._next or self._jobs.get()
        self._next = None
        if first is None:
            return None
        batch, count = [first], first.size
        deadline = time.monotonic() + self.wait
        while count < self.most:
            left = deadline - time.monotonic()
            try:
                job = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None or count + job.size > self.most:
                self._put_back(job)
                break
            batch.append(job)
            count += job.size
        return batch

    def _put_back(self, job: Job | None) -> None:
        """Keep what did not fit for the next batch; the end comes after all else anyway."""
        if job is None:
            self._jobs.put(None)
        else:
            self._next = job

    def _work(self, batch: Sequence[Job]) -> list[Any]:
        """Return the result of each job, or the error."""
        embedded = self._embed([job for job in batch if job.size])
        tasks = self.classifiers.of([job.task for job in batch if job.task is not None])
        outcomes: dict[int, Any] = {}
        asked: dict[str, list[Job]] = {}
        for job in batch:
            if job.task is None:
                outcomes[id(job)] = embedded[id(job)]
            elif job.question is None or isinstance(tasks[job.task], Exception):
                outcomes[id(job)] = tasks[job.task]
            else:
                asked.setdefault(job.task, []).append(job)
        for task, jobs in asked.items():
            fitted = tasks[task]
            assert isinstance(fitted, FittedTask)
            questions = [job.question for job in jobs if job.question is not None]
            answers = answer_all(fitted, questions, [embedded[id(job)] for job in jobs])
            outcomes |= {id(job): answer for job, answer in zip(jobs, answers, strict=True)}
        return [outcomes[id(job)] for job in batch]

    def _embed(self, jobs: Sequence[Job]) -> dict[int, Tensor]:
        """Embed the pictures of all jobs at once."""
        if not jobs:
            return {}
        pixels = np.concatenate([job.pixels for job in jobs if job.pixels is not None])
        self.batches += 1
        self.pictures += len(pixels)
        at_once = max(1, min(NUMBERS_AT_ONCE // pixels[0].size, -(-len(pixels) // self._cores)))
        pieces = torch.from_numpy(pixels).permute(0, 3, 1, 2).split(at_once)
        each = map if len(pieces) == 1 else self._embedding.map
        features = torch.cat(list(each(self.trained.embed_samples, pieces)))
        parts = features.split([job.size for job in jobs])
        return {id(job): part for job, part in zip(jobs, parts, strict=True)}


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


def _deliver(jobs: Sequence[Job], outcomes: Sequence[Any]) -> None:
    """Hand results over, in the event loop; who has given up waiting gets none."""
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.result.done():
            continue
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)
