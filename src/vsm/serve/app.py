"""The application: what each address does, with the worker and the store.

Methods of :class:`Service` are FastAPI's endpoints: parameters and results are described and
validated by their types.
"""

import asyncio
import io
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from PIL import Image
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from torch import Tensor

from vsm import __version__
from vsm.classify import NONE_OF_THESE, FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data.dataset import Pixels
from vsm.data.glyphs import NUM_ALPHABETS, SEED, draw_alphabet
from vsm.errors import ClassifierError, NotStoredError, SettingsError, VsmError
from vsm.memory.named import NamedMemory
from vsm.runs.memory_map import map_coordinates
from vsm.runs.trained_model import TrainedModel
from vsm.serve import Limits, middleware, schemas
from vsm.serve.batching import FittedTask, Worker
from vsm.serve.middleware import Access, LimitsMiddleware, Problem
from vsm.stores import NewExample, Store, require_name
from vsm.stores.store import TaskWithExamples

PAGE = Path(str(package_files("vsm.serve") / "page"))
STORE_THREADS = 8
GLYPH_NAME = re.compile(r"alphabet(\d\d)/character(\d\d)")
GLYPH_SIDE = 84  # pixels of an image, three for each of a drawing
TASK, MEMORY = "/v1/tasks/{task}", "/v1/memory/{name:path}"
EXAMPLE = f"{TASK}/examples/{{example}}"
ROUTES: list[tuple[str, str, str, dict[str, Any]]] = []
"""Method, address, endpoint and FastAPI's options; they are tried in this order."""
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Result = TypeVar("Result")


def _route(method: str, address: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    def add(endpoint: Endpoint) -> Endpoint:
        summary = (endpoint.__doc__ or "").partition("\n")[0].rstrip(".")
        ROUTES.append((method, address, endpoint.__name__, {"summary": summary} | options))
        return endpoint

    return add


class Service:
    """A model, whose inputs must be images, a store and the worker between them.

    The store is bound to the model's encoder, and starts with its memory if it is new.
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
        store.bind(trained.encoder.identity, trained.memory)
        store.memory()  # raises now if it is damaged
        self.trained, self.store = trained, store
        self.limits = limits or Limits()
        self.keep_originals = keep_originals
        self.form = trained.preprocessing
        self.metrics = middleware.Metrics()
        self.worker = Worker(trained, store, self.limits)
        self.start = self.worker.start
        self._draws_glyphs = trained.settings.data == "glyphs"
        decoders = min(4, os.cpu_count() or 1)
        self._decoding = ThreadPoolExecutor(decoders, thread_name_prefix="vsm-decode")
        self._storing = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="vsm-store")

    def stop(self) -> None:
        """Finish what is under way, then close the store."""
        self._decoding.shutdown()
        self.worker.stop()
        self._storing.shutdown()
        self.store.close()

    @_route("POST", f"{TASK}/classify")
    async def classify(self, task: str, form: schemas.Question) -> schemas.Answers:
        """Classify images."""
        _, pixels, _ = await self._decode(form, thumbnails=False)
        return schemas.Answers(answers=await self.worker.submit(pixels, task, form))

    @_route("POST", f"{TASK}/remember")
    async def remember(self, task: str) -> schemas.Remembered:
        """Add the task's examples to the memory, each once."""
        consolidation = self.trained.manual_consolidation()
        source = {"from": "vsm serve", "task": (await self.task(task)).name}
        changes, memory = await self._in_thread(
            self.store.remember,
            task,
            lambda memory, features, labels: memory.add(consolidation, features, labels, source),
        )
        return schemas.Remembered(
            added=changes.added,
            updated=changes.updated,
            dropped=changes.dropped,
            classes=len(memory.names),
        )

    @_route("GET", f"{TASK}/map")
    async def task_map(self, task: str) -> schemas.TaskMap:
        """Prototypes, examples and recalled classes in a plane."""
        return await self._in_thread(_task_map, await self.worker.submit(task=task))

    @_route("GET", f"{TASK}/export", response_class=Response)
    async def export(self, task: str) -> Response:
        """The classifier as a file that FewShotClassifier.load opens."""
        fitted: FittedTask = await self.worker.submit(task=task)
        content = await self._in_thread(_saved, fitted.classifier)
        headers = {"Content-Disposition": f'attachment; filename="{task}.vsm"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    @_route("POST", "/v1/tasks", status_code=201)
    async def create_task(self, task: schemas.NewTask) -> schemas.TaskId:
        """Create a task."""
        made = await self._in_thread(self.store.create_task, task.name, self.limits.tasks)
        return schemas.TaskId(id=made.id, name=made.name)

    @_route("GET", "/v1/tasks")
    async def tasks(self) -> schemas.TaskList:
        """List tasks, oldest first."""
        return schemas.TaskList(tasks=await self._in_thread(self.store.tasks))

    @_route("GET", TASK)
    async def task(self, task: str) -> TaskWithExamples:
        """Show a task with its examples."""
        return await self._in_thread(self.store.task, task)

    @_route("DELETE", TASK, status_code=204)
    async def delete_task(self, task: str) -> None:
        """Delete a task and its examples; what was remembered stays."""
        await self._in_thread(self.store.delete_task, task)

    @_route("POST", f"{TASK}/examples", status_code=201)
    async def add_examples(self, task: str, form: schemas.Examples) -> schemas.AddedExamples:
        """Add examples of a class: all files, or none."""
        require_name("label", form.label)
        if form.label == NONE_OF_THESE:
            reason = f"{NONE_OF_THESE!r} is the answer for images of no class; choose another"
            raise Problem(422, "label", reason)
        await self.task(task)  # must exist, before anything is decoded
        uploads, pixels, thumbnails = await self._decode(form, thumbnails=True)
        features = await self.worker.submit(pixels)
        examples = [
            NewExample(upload.name, row, small, upload.content if self.keep_originals else None)
            for upload, row, small in zip(uploads, features.cpu().numpy(), thumbnails, strict=True)
        ]
        ids = await self._in_thread(
            self.store.add_examples, task, form.label, examples, self.limits.examples
        )
        return schemas.AddedExamples(label=form.label, examples=ids)

    @_route("DELETE", EXAMPLE, status_code=204)
    async def delete_example(self, task: str, example: str) -> None:
        """Delete an example."""
        await self._in_thread(self.store.delete_example, task, example)

    @_route("GET", f"{EXAMPLE}/thumbnail", response_class=Response)
    async def thumbnail(self, task: str, example: str) -> Response:
        """A small PNG of an example."""
        content = await self._in_thread(self.store.example_file, task, example, "thumbnail")
        return Response(content, media_type="image/png")

    @_route("GET", "/v1/memory")
    async def classes(self, query: schemas.Listing) -> schemas.MemoryPage:
        """List remembered classes."""
        return await self._in_thread(self._list_classes, query)

    @_route("DELETE", MEMORY)
    async def forget(self, name: str) -> schemas.Forgotten:
        """Forget a class."""

        def without(memory: NamedMemory) -> NamedMemory:
            if name not in memory.places:
                raise NotStoredError(f"class: there is no {name[:64]!r} in the memory")
            return memory.forget([name])

        _, memory = await self._in_thread(self.store.change_memory, without)
        assert memory is not None
        exact = not memory.provenance[-1].get("scatter_stays")
        return schemas.Forgotten(name=name, exact=exact, classes=len(memory.names))

    @_route("GET", f"{MEMORY}/thumbnail", response_class=Response)
    async def class_thumbnail(self, name: str) -> Response:
        """A small PNG of a remembered class: the stored one, or a drawing."""
        return Response(await self._in_thread(self._class_image, name), media_type="image/png")

    @_route("GET", "/v1/model")
    async def model_info(self) -> schemas.ModelInfo:
        """The model, the format of its images, and the limits."""
        return schemas.ModelInfo(
            name=Path(self.trained.name).name,
            encoder=str(self.trained.encoder.identity),
            method=self.trained.settings.method,
            side=self.form.side,
            channels=self.form.channels,
            ink=self.form.ink,
            remembers=self.trained.memory is not None,
            can_reject=await self._in_thread(self._can_reject),
            can_use_together=self.trained.can_use_unlabeled,
            limits=self.limits,
        )

    @_route("GET", "/", include_in_schema=False)
    async def page(self) -> FileResponse:
        """The page."""
        return FileResponse(PAGE / "index.html")

    @_route("GET", "/healthz")
    async def healthz(self) -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @_route("GET", "/readyz")
    async def readyz(self) -> dict[str, str]:
        """The model works and the store answers."""
        if not self.worker.is_alive:
            raise Problem(503, "worker", "the model does not work; restart the server")
        await self._in_thread(self.store.encoder)
        return {"status": "ready"}

    @_route("GET", "/metrics", response_class=PlainTextResponse)
    async def counters(self) -> PlainTextResponse:
        """Counters for Prometheus."""
        worker = self.worker
        others = {
            "vsm_images_total": ("counter", "Images embedded.", worker.images),
            "vsm_batches_total": ("counter", "Batches that passed the model.", worker.batches),
            "vsm_fits_total": ("counter", "Classifiers fitted.", worker.fits),
            "vsm_jobs_waiting": ("gauge", "Jobs that wait for the model.", worker.waiting),
        }
        return PlainTextResponse(self.metrics.text(others), media_type="text/plain; version=0.0.4")

    def _list_classes(self, query: schemas.MemoryQuery) -> schemas.MemoryPage:
        (version, memory), near = self.store.memory(), query.near
        if near is not None and (memory is None or near not in memory.places):
            raise NotStoredError(f"near: there is no class {near!r} in the memory")
        if memory is None or not memory.names:
            return schemas.MemoryPage(version=version, total=0, classes=[])
        slots, places = memory.slots, memory.places
        found = [name for name in memory.names if query.search.casefold() in name.casefold()]
        if near is not None:
            means = slots.content.float()
            distances = (means - means[places[near]]).norm(dim=-1).tolist()
            found.sort(key=lambda name: distances[places[name]])
        shown = self.store.class_thumbnails()
        points = map_coordinates(slots.coordinates, memory).tolist() if query.map else None
        counts, updates = slots.counts.tolist(), slots.last_update.tolist()
        listed = []
        for name in found[query.offset : query.offset + query.limit]:
            place = places[name]
            one = schemas.ListedClass(
                name=name,
                count=counts[place],
                last_update=updates[place],
                added=name in memory.added,
                has_thumbnail=name in shown or (self._draws_glyphs and _is_glyph(name)),
            )
            if points is not None:
                one["x"], one["y"] = points[place]
            listed.append(one)
        return schemas.MemoryPage(version=version, total=len(found), classes=listed)

    def _class_image(self, name: str) -> bytes:
        try:
            return self.store.class_thumbnail(name)
        except NotStoredError:
            memory = self.store.memory().named if self._draws_glyphs else None
            drawn = _draw_glyph(name) if memory is not None and name in memory.places else None
            if drawn is None:
                raise
            return drawn

    def _can_reject(self) -> bool:
        try:
            self.worker.current_model().thresholds()
        except ClassifierError:
            return False
        return True

    async def _decode(
        self, form: schemas.FilesForm, thumbnails: bool
    ) -> tuple[list[schemas.Upload], Pixels, list[bytes]]:
        uploads = await form.read(self.limits)
        loop = asyncio.get_running_loop()
        decoded = await loop.run_in_executor(
            self._decoding, schemas.decode_uploads, uploads, self.form, self.limits, thumbnails
        )
        return uploads, *decoded

    async def _in_thread(self, call: Callable[..., Result], *values: Any) -> Result:
        """Call what may wait for the store; unlike FastAPI's threads, a deadline ends the wait."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._storing, partial(call, *values))


def create_app(service: Service, access: Access | None = None) -> LimitsMiddleware:
    """Return the application, for any ASGI server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    schema = TypeAdapter(middleware.ProblemBody).json_schema()
    content = {middleware.PROBLEM_TYPE: {"schema": schema}}
    app = FastAPI(
        title="VSM",
        description="Few-shot classification with a long-term memory.",
        version=__version__,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses={"4XX": {"description": "Refused; the detail says why.", "content": content}},
    )
    for kind in (RequestValidationError, HTTPException, VsmError, Exception):
        app.add_exception_handler(kind, middleware.handle_error)
    for method, address, endpoint, options in ROUTES:
        app.add_api_route(address, getattr(service, endpoint), methods=[method], **options)
    app.mount("/page", StaticFiles(directory=PAGE), "page")
    return LimitsMiddleware(app, service.limits, access or Access(), service.metrics)


def _task_map(fitted: FittedTask) -> schemas.TaskMap:
    classifier, support = fitted.classifier, fitted.support
    memory, prototypes = classifier.memory, classifier.prototypes()
    examples = classifier.coordinates(Embedded(support.features.to(prototypes.device)))
    names = list(dict.fromkeys(one.name for found in fitted.recalled.values() for one in found))
    slots = prototypes[:0]
    if memory is not None and names:
        rows = memory.slots.coordinates
        slots = rows[[memory.places[name] for name in names]].to(prototypes)
    points = map_coordinates(torch.cat([prototypes, examples.to(prototypes), slots]), memory)
    parts = points.split([len(prototypes), len(examples), len(names)])
    return schemas.TaskMap(
        prototypes=_points(map(str, classifier.classes_.tolist()), parts[0]),
        examples=_points([one.id for one in support.examples], parts[1]),
        recalled=_points(names, parts[2]),
    )


def _points(names: Iterable[str], places: Tensor) -> list[schemas.Point]:
    pairs = zip(names, places.tolist(), strict=True)
    return [schemas.Point(name=name, x=x, y=y) for name, (x, y) in pairs]


def _saved(classifier: FewShotClassifier) -> bytes:
    with tempfile.TemporaryDirectory(prefix="vsm-export-") as folder:
        path = Path(folder) / "task.vsm"
        classifier.save(path)
        return path.read_bytes()


def _is_glyph(name: str) -> bool:
    """Whether a class of the dataset ``glyphs`` may have this name."""
    found = GLYPH_NAME.fullmatch(name)
    return found is not None and int(found[1]) < sum(NUM_ALPHABETS.values())


def _draw_glyph(name: str) -> bytes | None:
    """Return a PNG of a character of the dataset ``glyphs``; None if there is no such character."""
    found = GLYPH_NAME.fullmatch(name)
    characters = _alphabet(int(found[1])) if found and _is_glyph(name) else ()
    if found is None or int(found[2]) >= len(characters):
        return None
    image = Image.fromarray(255 - characters[int(found[2])])  # dark ink on white paper
    content = io.BytesIO()
    image.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.BICUBIC).save(content, "PNG")
    return content.getvalue()


@cache
def _alphabet(number: int) -> Pixels:
    """Return the first drawing of every character, ``[n, H, W]``."""
    return np.ascontiguousarray(draw_alphabet(SEED, number)[:, 0, ..., 0])
