"""A server of characters for tests, in this process, and images for it."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from PIL import Image
from starlette.testclient import TestClient

from vsm.data import ImageDataset, open_dataset
from vsm.runs.loading import load
from vsm.runs.trained_model import TrainedModel
from vsm.serve import Limits
from vsm.serve.app import Service, create_app
from vsm.serve.middleware import Access
from vsm.stores import open_store

MODEL = "glyphs-5w1s"
LABELS = ("anchor", "bow", "crown", "drum")
HERE = "http://localhost"


@cache
def model() -> TrainedModel:
    return load(MODEL)


@cache
def glyphs() -> ImageDataset:
    dataset = open_dataset("glyphs")
    assert isinstance(dataset, ImageDataset)
    return dataset


@cache
def drawing(character: int, number: int) -> bytes:
    """Return a PNG of a test character."""
    ids = glyphs().image_ids(int(glyphs().classes("test")[character]))
    content = io.BytesIO()
    Image.fromarray(glyphs().images[ids[number]][..., 0]).save(content, "PNG")
    return content.getvalue()


def parts(*contents: bytes, names: Sequence[str] = ()) -> list[tuple[str, tuple[str, bytes, str]]]:
    """Return files as a client uploads them."""
    named = names or [f"{n}.png" for n in range(len(contents))]
    return [("files", (name, one, "image/png")) for name, one in zip(named, contents, strict=True)]


@contextmanager
def serving(
    target: str, limits: Limits | None = None, access: Access | None = None, **settings: Any
) -> Iterator[TestClient]:
    """Serve in this process; the client raises what the server fails with."""
    service = Service(model(), open_store(target), limits, **settings)
    with TestClient(create_app(service, access), base_url=HERE) as client:
        client.app_state["service"] = service
        yield client


def add_task(client: TestClient, shots: int = 1, labels: Sequence[str] = LABELS) -> str:
    """Create a task with so many examples of each of a few characters, and return its id."""
    task: str = client.post("/v1/tasks", json={"name": "characters"}).json()["id"]
    for character, label in enumerate(labels):
        files = parts(*(drawing(character, n) for n in range(shots)))
        answer = client.post(f"/v1/tasks/{task}/examples", data={"label": label}, files=files)
        assert answer.status_code == 201, answer.text
    return task


def queries(count: int = len(LABELS), number: int = 7) -> list[bytes]:
    return [drawing(character, number) for character in range(count)]


def problem(answer: Any, status: int, field: str | None) -> str:
    """Check that an answer is a problem with a field, and return what it says."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == {"type", "title", "status", "detail", "field"}
    assert (body["status"], body["field"]) == (status, field), body
    detail: str = body["detail"]
    assert "\n" not in detail
    return detail
