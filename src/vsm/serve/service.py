"""What the addresses of the server do, without HTTP: limits, decoding, the worker, the store."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import UploadFile

from vsm.classify.classifier import NONE_OF_THESE
from vsm.errors import ClassifierError, NotStoredError, SettingsError
from vsm.memory.named import Changes, NamedMemory
from vsm.runs.trained_model import TrainedModel
from vsm.serve.answers import Answer, Question
from vsm.serve.drawings import draws_classes_of, is_drawn, picture_of
from vsm.serve.fitting import Classifiers
from vsm.serve.limits import Limits
from vsm.serve.maps import TaskPlaces, memory_places, task_places
from vsm.serve.pictures import Pictures, Upload, decode_uploads, read_uploads
from vsm.serve.problems import Problem
from vsm.serve.worker import Worker
from vsm.stores import NewExample, Remembered, Store
from vsm.stores.contract import name_problem

STORE_THREADS = 8
Result = TypeVar("Result")


class Service:
    """A model, a store and the worker between them.

    Args:
        trained: the model; it must take pictures.
        store: is bound to the model's encoder, and begins with its memory if it is new.
        limits: of requests.
        keep_originals: keep the files of examples besides their features and thumbnails.
    """

    def __init__(
        self,
        trained: TrainedModel,
        store: Store,
        limits: Limits | None = None,
        *,
        keep_originals: bool = False,
    ) -> None:
        if trained.preprocessing is None:
            raise SettingsError(
                f"model: {trained.name} takes features, not pictures; serve one that takes pictures"
            )
        store.bind(trained.encoder, trained.memory)
        store.memory()  # says now if it is damaged
        self.trained, self.store = trained, store
        self.limits = limits or Limits()
        self.keep_originals = keep_originals
        self.form = trained.preprocessing.form
        self._draws = draws_classes_of(trained)
        self.classifiers = Classifiers(trained, store, self.limits.fitted_tasks)
        self.worker = Worker(trained, self.classifiers, self.limits)
        decoders = min(4, os.cpu_count() or 1)
        self._decoding = ThreadPoolExecutor(decoders, thread_name_prefix="vsm-decode")
        self._storing = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="vsm-store")

    def start(self) -> None:
        """Begin to work."""
        self.worker.start()

    def stop(self) -> None:
        """Finish what is under way and give everything back."""
        self._decoding.shutdown()
        self.worker.stop()
        self._storing.shutdown()
        self.store.close()

    async def stored(self, call: Callable[..., Result], *values: Any) -> Result:
        """Call what waits for the store, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._storing, partial(call, *values))

    async def add_examples(self, task: str, label: str, files: Sequence[UploadFile]) -> list[str]:
        """Embed and store examples of a class: all of them, or none."""
        _check_label(label)
        await self.stored(self.store.task, task)  # says at once if there is none
        uploads, pictures = await self._decoded(files, thumbnails=True)
        features = await self.worker.embed(pictures.pixels)
        examples = [
            NewExample(upload.name, row, small, upload.content if self.keep_originals else None)
            for upload, row, small in zip(
                uploads, features.cpu().numpy(), pictures.thumbnails, strict=True
            )
        ]
        most = self.limits.examples
        return await self.stored(self.store.add_examples, task, label, examples, most)

    async def classify(
        self, task: str, files: Sequence[UploadFile], reject: float | None, explain: bool
    ) -> list[Answer]:
        """Answer for every file."""
        _, pictures = await self._decoded(files, thumbnails=False)
        question = Question(pictures.names, reject, explain)
        return await self.worker.classify(task, pictures.pixels, question)

    async def remember(self, task: str) -> tuple[Changes, int]:
        """Let the memory take in a task's examples; return the changes and how many classes."""
        consolidation = self.trained.manual_consolidation()
        source = {"from": "vsm serve", "task": (await self.stored(self.store.task, task)).name}
        changes, memory = await self.stored(
            self.store.remember,
            task,
            lambda memory, features, labels: memory.add(consolidation, features, labels, source),
        )
        assert memory.named is not None
        return changes, len(memory.named.names)

    async def forget(self, name: str) -> tuple[bool, int]:
        """Forget a class; return whether nothing of it is left, and how many classes there are."""

        def without(memory: NamedMemory) -> NamedMemory:
            if name not in memory.places:
                raise NotStoredError(f"class: there is no {name[:64]!r} in the memory")
            return memory.forget([name])

        if name_problem(name):
            raise NotStoredError(f"class: there is no {name[:64]!r} in the memory")
        _, memory = await self.stored(self.store.change_memory, without)
        assert memory is not None
        return not memory.provenance[-1].get("scatter_stays"), len(memory.names)

    async def classes(
        self, search: str, near: str | None, offset: int, limit: int, with_map: bool
    ) -> tuple[int, int, list[tuple[Remembered, tuple[float, float] | None]]]:
        """Return the memory's version, how many classes match, and a part of them with places."""
        stored = await self.stored(self.store.memory)
        total, found = await self.stored(self.store.classes, search, near, offset, limit)
        places: dict[str, tuple[float, float]] = {}
        if with_map and stored.named is not None:
            places = await self.stored(memory_places, stored.named)
        if self._draws:
            found = [
                replace(one, has_thumbnail=one.has_thumbnail or is_drawn(one.name)) for one in found
            ]
        return stored.version, total, [(one, places.get(one.name)) for one in found]

    def class_thumbnail(self, name: str) -> bytes:
        """Return the PNG of a remembered class: the stored one, or else a drawing of it."""
        try:
            return self.store.class_thumbnail(name)
        except NotStoredError:
            memory = self.store.memory().named if self._draws and is_drawn(name) else None
            drawn = picture_of(name) if memory is not None and name in memory.places else None
            if drawn is None:
                raise
            return drawn

    async def task_map(self, task: str) -> TaskPlaces:
        """Return where a task's prototypes and examples are."""
        fitted = await self.worker.fitted(task)
        return await self.stored(task_places, fitted)

    async def export(self, task: str) -> bytes:
        """Return a task's classifier as the file that ``FewShotClassifier.load`` reads."""
        fitted = await self.worker.fitted(task)
        return await self.stored(_saved, fitted.classifier.save)

    def can_reject(self) -> bool:
        """Tell whether "none of these" can be answered with the memory as it is."""
        memory = self.store.memory().named
        model = self.trained if memory is None else self.trained.with_memory(memory, "store")
        try:
            model.thresholds()
        except ClassifierError:
            return False
        return True

    async def _decoded(
        self, files: Sequence[UploadFile], thumbnails: bool
    ) -> tuple[list[Upload], Pictures]:
        uploads = await read_uploads(files, self.limits)
        loop = asyncio.get_running_loop()
        pictures = await loop.run_in_executor(
            self._decoding, decode_uploads, uploads, self.form, self.limits, thumbnails
        )
        return uploads, pictures


def _check_label(label: str) -> None:
    problem = name_problem(label)
    if label == NONE_OF_THESE:
        problem = f"{label!r} is what a picture of none of the classes is called; choose another"
    if problem:
        raise Problem(422, "label", f"label: {problem}")


def _saved(save: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="vsm-export-") as folder:
        path = Path(folder) / "task.vsm"
        save(path)
        return path.read_bytes()
