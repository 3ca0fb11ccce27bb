"""The addresses of the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files as package_files
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from vsm import __version__
from vsm.serve import schemas
from vsm.serve.forms import ExamplesForm, QuestionForm, described, form_of
from vsm.serve.gate import Access, Gate
from vsm.serve.metrics import Metrics
from vsm.serve.problems import Problem, add_problem_handlers
from vsm.serve.service import Service

PAGE = FilePath(str(package_files("vsm.serve") / "page"))
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "Refused; the detail says why.",
        "content": {
            "application/problem+json": {"schema": schemas.ProblemBody.model_json_schema()}
        },
    }
}
MOST_LISTED = 10_000


def create_app(service: Service, access: Access | None = None) -> Gate:
    """Return the application, ready for any ASGI server."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    app = FastAPI(
        title="VSM",
        description="Few-shot classification with a long-term memory.",
        version=__version__,
        docs_url=None,  # its pages are fetched from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=PROBLEMS,
    )
    add_problem_handlers(app)
    # Routes are tried in turn, and those of answers are asked most.
    _add_answer_routes(app, service)
    _add_task_routes(app, service)
    _add_memory_routes(app, service)
    _add_state_routes(app, service, metrics)
    app.mount("/page", StaticFiles(directory=PAGE), "page")
    return Gate(app, service.limits, access or Access(), metrics)


def _add_state_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/healthz", summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="The model works and the store answers")
    async def readyz() -> dict[str, str]:
        if not service.worker.is_alive:
            raise Problem(503, "worker", "worker: the model does not work; restart the server")
        await service.stored(service.store.check)
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")
    async def counters() -> PlainTextResponse:
        worker = service.worker
        others = {
            "vsm_pictures_total": ("counter", "Pictures embedded.", worker.pictures),
            "vsm_batches_total": ("counter", "Batches that passed the model.", worker.batches),
            "vsm_fits_total": ("counter", "Classifiers fitted.", service.classifiers.fits),
            "vsm_jobs_waiting": ("gauge", "Jobs that wait for the model.", worker.waiting),
        }
        return PlainTextResponse(metrics.text(others), media_type="text/plain; version=0.0.4")

    @app.get("/v1/model", response_model=schemas.ModelBody, summary="The model and the limits")
    async def model() -> JSONResponse:
        trained, form = service.trained, service.form
        return JSONResponse(
            {
                "name": FilePath(trained.name).name,
                "encoder": str(trained.encoder),
                "method": trained.settings.method,
                "side": form.side,
                "channels": form.channels,
                "ink": form.ink,
                "remembers": trained.memory is not None,
                "can_reject": await service.stored(service.can_reject),
                "limits": asdict(service.limits),
            }
        )


def _add_answer_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/tasks/{task}/classify",
        response_model=schemas.Answers,
        summary="Classify pictures",
        openapi_extra=described(QuestionForm),
    )
    async def classify(task: str, request: Request) -> JSONResponse:
        async with form_of(request, QuestionForm) as asked:
            answers = await service.classify(task, asked.files, asked.reject, asked.explain)
        return JSONResponse({"answers": answers})

    @app.post(
        "/v1/tasks/{task}/remember",
        response_model=schemas.RememberedBody,
        summary="Let the memory take in the task's examples, each once",
    )
    async def remember(task: str) -> JSONResponse:
        changes, classes = await service.remember(task)
        told = {name: list(names) for name, names in changes._asdict().items()}
        return JSONResponse({**told, "classes": classes})

    @app.get(
        "/v1/tasks/{task}/map", response_model=schemas.TaskMap, summary="Prototypes in a plane"
    )
    async def task_map(task: str) -> JSONResponse:
        places = await service.task_map(task)
        return JSONResponse(
            {
                kind: [{"name": name, "x": x, "y": y} for name, x, y in found]
                for kind, found in places._asdict().items()
            }
        )

    @app.get(
        "/v1/tasks/{task}/export",
        response_class=Response,
        summary="The classifier as a file that FewShotClassifier.load opens",
    )
    async def export(task: str) -> Response:
        content = await service.export(task)
        headers = {"Content-Disposition": f'attachment; filename="{task}.vsm"'}
        return Response(content, media_type="application/octet-stream", headers=headers)


def _add_task_routes(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/tasks", status_code=201, response_model=schemas.TaskId, summary="Create a task")
    async def create(task: schemas.NewTask) -> JSONResponse:
        made = await service.stored(store.create_task, task.name, service.limits.tasks)
        return JSONResponse({"id": made.id, "name": made.name}, 201)

    @app.get("/v1/tasks", response_model=schemas.TaskList, summary="List tasks")
    async def tasks() -> JSONResponse:
        found = await service.stored(store.tasks)
        return JSONResponse({"tasks": [one._asdict() for one in found]})

    @app.get("/v1/tasks/{task}", response_model=schemas.TaskBody, summary="Show a task")
    async def task(task: str) -> JSONResponse:
        found = await service.stored(store.task, task)
        examples = await service.stored(store.examples, task)
        listed = [one._asdict() for one in examples]
        return JSONResponse({**found._asdict(), "examples": listed})

    @app.delete("/v1/tasks/{task}", status_code=204, summary="Delete a task and its examples")
    async def delete(task: str) -> Response:
        await service.stored(store.delete_task, task)
        return Response(status_code=204)

    @app.post(
        "/v1/tasks/{task}/examples",
        status_code=201,
        response_model=schemas.AddedExamples,
        summary="Add examples of a class: all files, or none",
        openapi_extra=described(ExamplesForm),
    )
    async def add_examples(task: str, request: Request) -> JSONResponse:
        async with form_of(request, ExamplesForm) as given:
            ids = await service.add_examples(task, given.label, given.files)
        return JSONResponse({"label": given.label, "examples": ids}, 201)

    @app.delete("/v1/tasks/{task}/examples/{example}", status_code=204, summary="Delete an example")
    async def delete_example(task: str, example: str) -> Response:
        await service.stored(store.delete_example, task, example)
        return Response(status_code=204)

    @app.get(
        "/v1/tasks/{task}/examples/{example}/thumbnail",
        response_class=Response,
        summary="A small PNG",
    )
    async def thumbnail(task: str, example: str) -> Response:
        content = await service.stored(store.thumbnail, task, example)
        return Response(content, media_type="image/png")


def _add_memory_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/memory", response_model=schemas.MemoryBody, summary="List remembered classes")
    async def memory(
        search: Annotated[str, Query(max_length=200, description="A part of the name.")] = "",
        near: Annotated[str | None, Query(description="Sort by distance to this class.")] = None,
        offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 1000,
        map: Annotated[bool, Query(description="Add places in the plane.")] = False,
    ) -> JSONResponse:
        version, total, found = await service.classes(search, near, offset, limit, map)
        listed = [
            asdict(one) | ({} if place is None else {"x": place[0], "y": place[1]})
            for one, place in found
        ]
        return JSONResponse({"version": version, "total": total, "classes": listed})

    @app.delete(
        "/v1/memory/{name:path}", response_model=schemas.Forgotten, summary="Forget a class"
    )
    async def forget(name: str) -> JSONResponse:
        exact, classes = await service.forget(name)
        return JSONResponse({"name": name, "exact": exact, "classes": classes})

    @app.get("/v1/memory/{name:path}/thumbnail", response_class=Response, summary="A small PNG")
    async def thumbnail(name: str) -> Response:
        content = await service.stored(service.class_thumbnail, name)
        return Response(content, media_type="image/png")
