"""Whatever is sent to an address of the description: no 500, no hang, nothing half-stored.

``VSM_FUZZ=1000 pytest tests/test_serving_fuzz.py`` tries more.
"""

import io
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from serving import HERE, LABELS, add_task, drawing, model
from store_helpers import new_database
from vsm.serve import Limits
from vsm.serve.app import Service, create_app
from vsm.stores import Store, open_store

LIMITS = Limits(files=3, examples=40, tasks=8, file_bytes=20_000, request_bytes=40_000)
SECONDS = 10.0
OPERATIONS = 18
EXAMPLES = int(os.environ.get("VSM_FUZZ", "30"))


@dataclass
class Server:
    """A server under test, and what it holds."""

    client: TestClient
    store: Store
    description: dict[str, Any]

    def task(self) -> str:
        """Return a task with examples, made anew if it was deleted."""
        for one in self.store.tasks():
            if one.name == "characters" and one.classes:
                return one.id
        for one in self.store.tasks():
            self.store.delete_task(one.id)
        return add_task(self.client, labels=LABELS[:2])

    def state(self) -> tuple[Any, ...]:
        tasks = [self.store.task(one.id) for one in self.store.tasks()]
        return tasks, [one.examples for one in tasks], self.store.memory().version


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    target = str(tmp_path_factory.mktemp("fuzz") / "store.sqlite")
    if request.param == "postgresql":
        postgres = request.getfixturevalue("postgres")
        if isinstance(postgres, str):
            pytest.skip(postgres)
        target = new_database(postgres)
    store = open_store(target)
    app = create_app(Service(model(), store, LIMITS))
    with TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        yield Server(client, store, client.get("/openapi.json").json())


def operations(description: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method, path) for path, found in description["paths"].items() for method in found]


def images() -> list[bytes]:
    found = [drawing(0, 0)]
    with Image.open(io.BytesIO(found[0])) as image:
        for kind in ("JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
            content = io.BytesIO()
            image.convert("RGB").save(content, kind)
            found.append(content.getvalue())
    return found


IMAGES = images()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An image some of whose bytes were changed or cut off."""
    content = bytearray(draw(st.sampled_from(IMAGES)))
    for place, value in draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=8)
    ):
        content[place] = value
    return (
        bytes(content[: draw(st.integers(0, len(content)))])
        if draw(st.booleans())
        else bytes(content)
    )


TEXT = st.text(max_size=30) | st.sampled_from(["", "\0", "a\nb", "../..", "%", "'--", "x" * 300])
CONTENT = damaged() | damaged() | st.binary(max_size=200) | st.just(bytes(30_000))
SCALARS = TEXT | st.sampled_from(["0", "1", "-1", "0.9", "nan", "1e400", "true", "99999999999999"])
JSON_VALUES = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=10), st.lists)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Values for a parameter: of its type, at its bounds and beyond, or of no type at all."""
    types = {kind.get("type") for kind in (schema, *schema.get("anyOf", []))}
    found: st.SearchStrategy[str] = SCALARS
    if "integer" in types:
        found |= st.integers().map(str)
    if "number" in types:
        found |= st.floats().map(str)
    if "boolean" in types:
        found |= st.sampled_from(["true", "false", "maybe"])
    return found


def resolved(schema: dict[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = description["components"]["schemas"][name]
    return schema


class Drawn:
    """Requests for one operation, as its description has it, or not quite.

    Most parts are right, so that requests get far; chance decides which are not, and hypothesis
    what is there instead. ``TASK`` and ``EXAMPLE`` stand for ids, which only the server knows.
    """

    def __init__(self, draw: st.DrawFn, description: dict[str, Any]) -> None:
        self.draw, self.description = draw, description
        self.chance = random.Random(draw(st.integers(0, 2**32 - 1)))

    def mostly(self, right: Any, other: st.SearchStrategy[Any]) -> Any:
        return right if self.chance.random() < 0.85 else self.draw(other)

    def request(self, method: str, path: str) -> dict[str, Any]:
        operation = self.description["paths"][path][method]
        query, right = {}, {"task": "TASK", "example": "EXAMPLE", "name": "anchor"}
        for parameter in operation.get("parameters", []):
            name = parameter["name"]
            if parameter["in"] == "path":
                odd = TEXT.filter(lambda one: one not in ("", ".", ".."))
                value = self.mostly(right[name.partition(":")[0]], st.just("0" * 32) | odd)
                path = path.replace(f"{{{name}}}", _quoted(value))
            elif self.chance.random() < 0.3:
                query[name] = self.draw(values_of(resolved(parameter["schema"], self.description)))
        request: dict[str, Any] = {"method": method.upper(), "url": path, "params": query}
        body = operation.get("requestBody")
        if body is not None and self.chance.random() < 0.9:
            return request | self.body(body["content"])
        kinds = ["application/json", "multipart/form-data; boundary=x", "a", ""]
        return request | {
            "content": self.draw(st.binary(max_size=100)),
            "headers": {"content-type": self.chance.choice(kinds)},
        }

    def body(self, content: dict[str, Any]) -> dict[str, Any]:
        [[kind, described]] = content.items()
        if kind == "application/json":
            odd = JSON_VALUES | st.fixed_dictionaries({"name": TEXT | JSON_VALUES})
            value = self.mostly({"name": "characters"}, odd)
            return {"content": json.dumps(value), "headers": {"content-type": kind}}
        properties = resolved(described["schema"], self.description)["properties"]
        right = {"label": self.chance.choice(LABELS), "reject": "0.9"}
        right |= {"explain": "1", "transductive": "1"}
        count = self.mostly(1 + self.chance.randrange(3), st.sampled_from([0, 4]))
        images = [self.chance.choice(IMAGES) for _ in range(count)]
        files = [
            (
                self.mostly("files", st.just("other")),
                (self.mostly("a.png", TEXT), self.mostly(image, CONTENT), "a/b"),
            )
            for image in images
        ]
        data = {
            name: self.mostly(right[name], SCALARS)
            for name in properties
            if name != "files" and self.chance.random() < 0.85
        }
        return {"data": data, "files": files}


@st.composite
def requests(draw: st.DrawFn, server: Server, method: str, path: str) -> dict[str, Any]:
    return Drawn(draw, server.description).request(method, path)


def _quoted(value: str) -> str:
    return "".join(f"%{byte:02X}" for byte in value.encode("utf-8", "surrogatepass"))


def test_the_description_has_something_to_try(server: Server) -> None:
    assert len(operations(server.description)) == OPERATIONS


@pytest.mark.parametrize("number", range(OPERATIONS))
def test_nothing_that_is_sent_breaks_the_server(server: Server, number: int) -> None:
    method, path = operations(server.description)[number]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        request = data.draw(requests(server, method, path))
        task = server.task()
        example = server.store.task(task).examples[0].id
        for name, id_ in (("TASK", task), ("EXAMPLE", example)):
            request["url"] = request["url"].replace(_quoted(name), id_)
        before, begin = server.state(), time.monotonic()
        try:
            answer = server.client.request(**request)
        except (httpx2.InvalidURL, UnicodeEncodeError):
            return  # which the client itself cannot send
        assert time.monotonic() - begin < SECONDS
        assert answer.status_code < 500, answer.text
        assert b"Traceback" not in answer.content
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            body = answer.json()
            assert body["status"] == answer.status_code
            assert "\n" not in body["detail"]
            assert server.state() == before
        elif method == "get" or path.endswith(("classify", "map", "export")):
            assert server.state() == before
        elif path.endswith("examples"):
            sent = sum(name == "files" for name, _ in request["files"])
            counts = [sum(len(one) for one in state[1]) for state in (before, server.state())]
            assert counts[1] - counts[0] == sent == len(answer.json()["examples"])

    attempt()


def test_the_server_still_answers(server: Server) -> None:
    assert server.client.get("/readyz").json() == {"status": "ready"}
    task = server.task()
    files = [("files", ("a.png", drawing(0, 3), "image/png"))]
    assert server.client.post(f"/v1/tasks/{task}/classify", files=files).is_success
    assert server.store.memory().named is not None
