"""The thread that uses the model; requests that arrive at about the same time share a batch."""

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
from vsm.serve.classifiers import Classifiers, FittedTask, Question
from vsm.serve.limits import Limits
from vsm.serve.problems import Problem, logger
from vsm.serve.schemas import Answer

NUMBERS_AT_ONCE = 625_000
"""Pixels times channels that pass the model at once, which is 4 photographs. More would not be
faster, and the memory that the server keeps would grow with its largest batch."""


class Job(NamedTuple):
    """A job for the model, and the future of its result.

    Attributes:
        result: the features ``[n, D]`` without a task; the fitted task without a question; else
            the answers.
        pixels: uint8 ``[n, H, W, C]``; None if there are none to embed.
        task: the task to use.
        question: what to answer.
    """

    result: "asyncio.Future[Any]"
    pixels: npt.NDArray[np.uint8] | None = None
    task: str | None = None
    question: Question | None = None

    @property
    def size(self) -> int:
        """Images to embed."""
        return 0 if self.pixels is None else len(self.pixels)


class Worker:
    """Runs jobs from an event loop in batches, first come, first served.

    A batch begins with the oldest job and includes those that arrive within a few milliseconds, or
    arrived during the batch before, up to a number of images.
    """

    def __init__(self, trained: TrainedModel, classifiers: Classifiers, limits: Limits) -> None:
        self.trained, self.classifiers = trained, classifiers
        self.max_images, self.wait = limits.batch, limits.batch_milliseconds / 1000
        self.batches = self.images = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._next: Job | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="vsm-model", daemon=True)
        # Parts of a batch pass the model in parallel, each on one core. With torch's own threads
        # every layer would wait for the core that also decodes and answers.
        self._cores = torch.get_num_threads()
        self._embedding = ThreadPoolExecutor(
            self._cores, "vsm-embed", initializer=torch.set_num_threads, initargs=(1,)
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

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

    def embed(self, pixels: npt.NDArray[np.uint8]) -> "asyncio.Future[Tensor]":
        """Embed images ``[n, H, W, C]``."""
        return self._submit(Job(_future(), pixels))

    def fitted(self, task: str) -> "asyncio.Future[FittedTask]":
        """Return a task's classifier as it is now."""
        return self._submit(Job(_future(), None, task))

    def classify(
        self, task: str, pixels: npt.NDArray[np.uint8], question: Question
    ) -> "asyncio.Future[list[Answer]]":
        """Answer a question about images."""
        return self._submit(Job(_future(), pixels, task, question))

    def _submit(self, job: Job) -> "asyncio.Future[Any]":
        if not self.is_alive:
            raise Problem(503, "server", "it is shutting down; ask again in a moment")
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
        while count < self.max_images:
            left = deadline - time.monotonic()
            try:
                job = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # behind all jobs
                break
            if count + job.size > self.max_images:
                self._next = job
                break
            batch.append(job)
            count += job.size
        return batch

    def _work(self, batch: Sequence[Job]) -> list[Any]:
        """Return the result of each job, or the error."""
        embedded = self._embed([job for job in batch if job.size])
        tasks = self.classifiers.get([job.task for job in batch if job.task is not None])
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
            answers = fitted.answer(questions, [embedded[id(job)] for job in jobs])
            outcomes |= {id(job): answer for job, answer in zip(jobs, answers, strict=True)}
        return [outcomes[id(job)] for job in batch]

    def _embed(self, jobs: Sequence[Job]) -> dict[int, Tensor]:
        """Embed the images of all jobs at once."""
        if not jobs:
            return {}
        pixels = np.concatenate([job.pixels for job in jobs if job.pixels is not None])
        self.batches += 1
        self.images += len(pixels)
        at_once = max(1, min(NUMBERS_AT_ONCE // pixels[0].size, -(-len(pixels) // self._cores)))
        pieces = torch.from_numpy(pixels).permute(0, 3, 1, 2).split(at_once)
        each = map if len(pieces) == 1 else self._embedding.map
        features = torch.cat(list(each(self.trained.embed_samples, pieces)))
        parts = features.split([job.size for job in jobs])
        return {id(job): part for job, part in zip(jobs, parts, strict=True)}


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


def _deliver(jobs: Sequence[Job], outcomes: Sequence[Any]) -> None:
    """Set the results in the event loop, except of requests that were cancelled."""
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.result.done():
            continue
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)
