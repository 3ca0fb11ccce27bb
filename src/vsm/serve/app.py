"""The addresses of the server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files as package_files
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from pydantic import TypeAdapter

from vsm import __version__
from vsm.serve.metrics import Metrics
from vsm.serve.middleware import Access, LimitsMiddleware
from vsm.serve.problems import ERROR_HANDLERS, ProblemBody, ProblemResponse
from vsm.serve.service import Service

PAGE = Path(str(package_files("vsm.serve") / "page"))


def create_app(service: Service, access: Access | None = None) -> LimitsMiddleware:
    """Return the application, for any ASGI server."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    schema = TypeAdapter(ProblemBody).json_schema()
    refused = {"description": "Refused; the detail says why."}
    app = FastAPI(
        title="VSM",
        description="Few-shot classification with a long-term memory.",
        version=__version__,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses={"4XX": {**refused, "content": {ProblemResponse.media_type: {"schema": schema}}}},
        exception_handlers=ERROR_HANDLERS,
    )
    _add_routes(app, service)
    _add_state_routes(app, service, metrics)
    app.mount("/page", StaticFiles(directory=PAGE), "page")
    return LimitsMiddleware(app, service.limits, access or Access(), metrics)


def _add_routes(app: FastAPI, service: Service) -> None:
    """Add what lies under /v1; routes are tried in order, and most requests classify."""
    get, post, delete = app.get, app.post, app.delete
    task, memory = "/v1/tasks/{task}", "/v1/memory/{name:path}"
    example = f"{task}/examples/{{example}}"
    post(f"{task}/classify", summary="Classify images")(service.classify)
    post(f"{task}/remember", summary="Add the task's examples to the memory, each once")(
        service.remember
    )
    get(f"{task}/map", summary="Prototypes in a plane")(service.task_map)
    get(
        f"{task}/export",
        summary="The classifier as a file that FewShotClassifier.load opens",
        response_class=Response,
    )(service.export)
    post("/v1/tasks", status_code=201, summary="Create a task")(service.create_task)
    get("/v1/tasks", summary="List tasks")(service.tasks)
    get(task, summary="Show a task")(service.task)
    delete(task, status_code=204, summary="Delete a task and its examples")(service.delete_task)
    post(
        f"{task}/examples", status_code=201, summary="Add examples of a class: all files, or none"
    )(service.add_examples)
    delete(example, status_code=204, summary="Delete an example")(service.delete_example)
    get(f"{example}/thumbnail", summary="A small PNG", response_class=Response)(service.thumbnail)
    get("/v1/memory", summary="List remembered classes", response_model_exclude_none=True)(
        service.classes
    )
    delete(memory, summary="Forget a class")(service.forget)
    get(f"{memory}/thumbnail", summary="A small PNG", response_class=Response)(
        service.class_thumbnail
    )
    get("/v1/model", summary="The model and the limits")(service.model_info)


def _add_state_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/healthz", summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="The model works and the store answers")
    async def readyz() -> dict[str, str]:
        await service.check()
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse, summary="Counters for Prometheus")
    async def counters() -> PlainTextResponse:
        worker = service.worker
        others = {
            "vsm_pictures_total": ("counter", "Images embedded.", worker.images),
            "vsm_batches_total": ("counter", "Batches that passed the model.", worker.batches),
            "vsm_fits_total": ("counter", "Classifiers fitted.", service.classifiers.fits),
            "vsm_jobs_waiting": ("gauge", "Jobs that wait for the model.", worker.waiting),
        }
        return PlainTextResponse(metrics.text(others), media_type="text/plain; version=0.0.4")
