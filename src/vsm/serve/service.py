"""What the addresses of the server do: decoding, the worker, the store.

Methods are FastAPI's endpoints: parameters and results are described and validated by their types.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Response, UploadFile

from vsm.classify import FewShotClassifier
from vsm.classify.classifier import NONE_OF_THESE
from vsm.data.dataset import Pixels
from vsm.errors import ClassifierError, NotStoredError, SettingsError
from vsm.memory.named import NamedMemory
from vsm.runs.trained_model import TrainedModel
from vsm.serve import schemas
from vsm.serve.classifiers import Classifiers, Question
from vsm.serve.images import (
    Upload,
    decode_uploads,
    draw_glyph,
    is_glyph,
    read_uploads,
)
from vsm.serve.limits import Limits
from vsm.serve.maps import TaskMap, memory_places, task_places
from vsm.serve.problems import Problem
from vsm.serve.worker import Worker
from vsm.stores import NewExample, Store
from vsm.stores.records import name_error

STORE_THREADS = 8
Result = TypeVar("Result")


class Service:
    """A model, a store and the worker between them.

    Args:
        trained: the model; its inputs must be images.
        store: is bound to the model's encoder, and starts with its memory if it is new.
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
                f"model: {trained.name} takes features, not images; serve one that takes images"
            )
        store.bind(trained.encoder, trained.memory)
        store.memory()  # raises now if it is damaged
        self.trained, self.store = trained, store
        self.limits = limits or Limits()
        self.keep_originals = keep_originals
        self.form = trained.preprocessing
        self._draws_glyphs = trained.settings.data == "glyphs"
        self.classifiers = Classifiers(trained, store, self.limits.fitted_tasks)
        self.worker = Worker(trained, self.classifiers, self.limits)
        decoders = min(4, os.cpu_count() or 1)
        self._decoding = ThreadPoolExecutor(decoders, thread_name_prefix="vsm-decode")
        self._storing = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="vsm-store")

    def start(self) -> None:
        """Start the worker."""
        self.worker.start()

    def stop(self) -> None:
        """Finish what is under way, then close the store."""
        self._decoding.shutdown()
        self.worker.stop()
        self._storing.shutdown()
        self.store.close()

    async def check(self) -> None:
        """Raise unless the worker runs and the store answers."""
        if not self.worker.is_alive:
            raise Problem(503, "worker", "the model does not work; restart the server")
        await self._in_thread(self.store.check)

    async def model_info(self) -> schemas.ModelInfo:
        """Describe the model, the format of its images, and the limits."""
        return schemas.ModelInfo(
            name=Path(self.trained.name).name,
            encoder=str(self.trained.encoder),
            method=self.trained.settings.method,
            side=self.form.side,
            channels=self.form.channels,
            ink=self.form.ink,
            remembers=self.trained.memory is not None,
            can_reject=await self._in_thread(self._can_reject),
            limits=self.limits,
        )

    async def create_task(self, task: schemas.NewTask) -> schemas.TaskId:
        """Create a task without examples."""
        created = await self._in_thread(self.store.create_task, task.name, self.limits.tasks)
        return schemas.TaskId(created.id, created.name)

    async def tasks(self) -> schemas.TaskList:
        """List all tasks, oldest first."""
        return schemas.TaskList(await self._in_thread(self.store.tasks))

    async def task(self, task: str) -> schemas.TaskWithExamples:
        """Show a task with its examples."""
        found = await self._in_thread(self.store.task, task)
        examples = await self._in_thread(self.store.examples, task)
        return schemas.TaskWithExamples(**vars(found), examples=examples)

    async def delete_task(self, task: str) -> None:
        """Delete a task and its examples; what was remembered stays."""
        await self._in_thread(self.store.delete_task, task)

    async def add_examples(self, task: str, form: schemas.Examples) -> schemas.AddedExamples:
        """Embed and store examples of a class: all of them, or none."""
        _check_label(form.label)
        await self._in_thread(self.store.task, task)  # before anything is decoded
        uploads, pixels, thumbnails = await self._decode(form.files, thumbnails=True)
        features = await self.worker.embed(pixels)
        examples = [
            NewExample(upload.name, row, small, upload.content if self.keep_originals else None)
            for upload, row, small in zip(uploads, features.cpu().numpy(), thumbnails, strict=True)
        ]
        ids = await self._in_thread(
            self.store.add_examples, task, form.label, examples, self.limits.examples
        )
        return schemas.AddedExamples(form.label, ids)

    async def delete_example(self, task: str, example: str) -> None:
        """Delete an example of a task."""
        await self._in_thread(self.store.delete_example, task, example)

    async def thumbnail(self, task: str, example: str) -> Response:
        """Return a small PNG of an example."""
        content = await self._in_thread(self.store.thumbnail, task, example)
        return Response(content, media_type="image/png")

    async def classify(self, task: str, form: schemas.Question) -> schemas.Answers:
        """Classify every file."""
        uploads, pixels, _ = await self._decode(form.files, thumbnails=False)
        question = Question([upload.name for upload in uploads], form.reject, form.explain)
        return schemas.Answers(await self.worker.classify(task, pixels, question))

    async def remember(self, task: str) -> schemas.Remembered:
        """Add those examples of a task to the memory that it does not include yet."""
        consolidation = self.trained.manual_consolidation()
        source = {"from": "vsm serve", "task": (await self._in_thread(self.store.task, task)).name}
        changes, memory = await self._in_thread(
            self.store.remember,
            task,
            lambda memory, features, labels: memory.add(consolidation, features, labels, source),
        )
        return schemas.Remembered(*changes, classes=len(memory.names))

    async def task_map(self, task: str) -> TaskMap:
        """Place prototypes, examples and recalled classes of a task in a plane."""
        return await self._in_thread(task_places, await self.worker.fitted(task))

    async def export(self, task: str) -> Response:
        """Return a task's classifier as a file."""
        fitted = await self.worker.fitted(task)
        content = await self._in_thread(_saved, fitted.classifier)
        headers = {"Content-Disposition": f'attachment; filename="{task}.vsm"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def classes(self, query: schemas.Listing) -> schemas.MemoryPage:
        """List remembered classes."""
        version, memory = await self._in_thread(self.store.memory)
        total, found = await self._in_thread(
            self.store.classes, query.search, query.near, query.offset, query.limit
        )
        places: dict[str, tuple[float, float]] = {}
        if query.map and memory is not None:
            places = await self._in_thread(memory_places, memory)
        if self._draws_glyphs:
            found = [
                replace(one, has_thumbnail=one.has_thumbnail or is_glyph(one.name)) for one in found
            ]
        listed = [
            schemas.ListedClass(**vars(one), x=x, y=y)
            for one in found
            for x, y in [places.get(one.name, (None, None))]
        ]
        return schemas.MemoryPage(version, total, listed)

    async def forget(self, name: str) -> schemas.Forgotten:
        """Remove a class from the memory."""

        def without(memory: NamedMemory) -> NamedMemory:
            if name not in memory.places:
                raise NotStoredError(f"class: there is no {name[:64]!r} in the memory")
            return memory.forget([name])

        _, memory = await self._in_thread(self.store.change_memory, without)
        assert memory is not None
        exact = not memory.provenance[-1].get("scatter_stays")
        return schemas.Forgotten(name, exact, len(memory.names))

    async def class_thumbnail(self, name: str) -> Response:
        """Return a PNG of a remembered class: the stored one, or a drawing."""
        return Response(await self._in_thread(self._class_image, name), media_type="image/png")

    def _class_image(self, name: str) -> bytes:
        try:
            return self.store.class_thumbnail(name)
        except NotStoredError:
            memory = self.store.memory().named if self._draws_glyphs and is_glyph(name) else None
            drawn = draw_glyph(name) if memory is not None and name in memory.places else None
            if drawn is None:
                raise
            return drawn

    def _can_reject(self) -> bool:
        """Whether "none of these" can be answered with the current memory."""
        memory = self.store.memory().named
        model = self.trained if memory is None else self.trained.with_memory(memory, "store")
        try:
            model.thresholds()
        except ClassifierError:
            return False
        return True

    async def _decode(
        self, files: Sequence[UploadFile], thumbnails: bool
    ) -> tuple[list[Upload], Pixels, list[bytes]]:
        uploads = await read_uploads(files, self.limits)
        loop = asyncio.get_running_loop()
        decoded = await loop.run_in_executor(
            self._decoding, decode_uploads, uploads, self.form, self.limits, thumbnails
        )
        return uploads, *decoded

    async def _in_thread(self, call: Callable[..., Result], *values: Any) -> Result:
        """Call what may wait for the store; unlike FastAPI's threads, a deadline ends the wait."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._storing, partial(call, *values))


def _check_label(label: str) -> None:
    error = name_error(label)
    if label == NONE_OF_THESE:
        error = f"{label!r} is the answer for images of none of the classes; choose another"
    if error:
        raise Problem(422, "label", error)


def _saved(classifier: FewShotClassifier) -> bytes:
    with tempfile.TemporaryDirectory(prefix="vsm-export-") as folder:
        path = Path(folder) / "task.vsm"
        classifier.save(path)
        return path.read_bytes()
