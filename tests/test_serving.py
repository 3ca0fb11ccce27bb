"""The server's answers are those of ``FewShotClassifier``, and everything else is refused."""

import base64
import io
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor

from classify_helpers import write_run
from serving import HERE, LABELS, MODEL, add_task, drawing, parts, problem, queries, serving
from vsm import FewShotClassifier
from vsm.encoders import Encoder
from vsm.runs.loading import load
from vsm.serve import Limits
from vsm.serve.app import Service, create_app
from vsm.serve.middleware import Access
from vsm.stores import open_store

JSON = {"content-type": "application/json"}
TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with serving(str(tmp_path / "store.sqlite")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server that tests may ask but not change."""
    with serving(str(tmp_path_factory.mktemp("shared") / "store.sqlite")) as opened:
        yield opened


def classify(client: TestClient, task: str, *images: bytes, **fields: str) -> list[dict[str, Any]]:
    answer = client.post(f"/v1/tasks/{task}/classify", data=fields, files=parts(*images))
    assert answer.status_code == 200, answer.text
    answers: list[dict[str, Any]] = answer.json()["answers"]
    return answers


def probabilities(answers: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Return the probabilities ``[n, N]`` of sorted labels."""
    rows = []
    for answer in answers:
        known = {one["label"]: one["probability"] for one in answer["alternatives"]}
        known |= {} if answer["label"] is None else {answer["label"]: answer["probability"]}
        rows.append([known[label] for label in sorted(known)])
    return np.asarray(rows)


def images(*contents: bytes) -> list[Image.Image]:
    return [Image.open(io.BytesIO(one)) for one in contents]


def fitted_alike(shots: int = 1) -> FewShotClassifier:
    """A classifier that is given what :func:`add_task` uploads, in the same order."""
    classifier = FewShotClassifier.from_pretrained(MODEL)
    for character, label in enumerate(LABELS):
        given = images(*(drawing(character, n) for n in range(shots)))
        classifier.partial_fit(given, [label] * shots)
    return classifier


@pytest.mark.parametrize("shots", [1, 3])
def test_answers_are_those_of_the_python_classifier(client: TestClient, shots: int) -> None:
    task, asked = add_task(client, shots), queries()
    answers = classify(client, task, *asked)
    python = fitted_alike(shots)
    given = images(*asked)
    np.testing.assert_allclose(probabilities(answers), python.predict_proba(given), atol=1e-7)
    assert [one["label"] for one in answers] == python.predict(given).tolist() == list(LABELS)
    assert [one["file"] for one in answers] == [f"{n}.png" for n in range(len(asked))]
    for answer in answers:
        expected = python.recalled()[answer["label"]]
        assert [one["name"] for one in answer["recalled"]] == [one.name for one in expected]
        chances = [answer["probability"], *(o["probability"] for o in answer["alternatives"])]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1, abs=1e-5)


def test_an_image_of_none_of_the_classes_is_null_as_python_says(client: TestClient) -> None:
    task, python = add_task(client), fitted_alike()
    asked = [*queries(), *(drawing(n, 3) for n in range(20, 40))]
    expected = python.predict(images(*asked), reject=0.8)
    answers = classify(client, task, *asked, reject="0.8")
    got = [one["label"] for one in answers]
    assert got == [None if one == "none of these" else one for one in expected.tolist()]
    assert None in got
    rejected = answers[got.index(None)]
    assert rejected["probability"] is None
    assert {one["label"] for one in rejected["alternatives"]} == set(LABELS)


def test_explanations_are_those_of_python(client: TestClient) -> None:
    task, python = add_task(client), fitted_alike()
    [answer] = classify(client, task, queries()[0], explain="true")
    expected = python.explain(images(queries()[0])[0]).as_dict()
    found = answer["explanation"]
    assert set(found) == set(expected)
    assert found["uncertainty"] == pytest.approx(expected["uncertainty"], abs=1e-5)
    assert found["shots"] == expected["shots"]


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    target = str(tmp_path / "store.sqlite")
    with serving(target, keep_originals=True) as client:
        task = add_task(client)
        client.post(f"/v1/tasks/{task}/remember")
        before = client.get(f"/v1/tasks/{task}").json(), classify(client, task, *queries())
        listed = client.get("/v1/memory?limit=10000").json()
    with serving(target) as client:
        after = client.get(f"/v1/tasks/{task}").json(), classify(client, task, *queries())
        assert after == before
        assert client.get("/v1/memory?limit=10000").json() == listed
        example = after[0]["examples"][0]["id"]
        store = client.app_state["service"].store
        assert store.example_file(task, example, "original") == drawing(0, 0)
        small = client.get(f"/v1/tasks/{task}/examples/{example}/thumbnail")
        assert small.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(small.content)).size == (28, 28)


def test_another_server_sees_what_one_was_told(store_target: str) -> None:
    with serving(store_target) as one, serving(store_target) as other:
        task = add_task(one, labels=LABELS[:2])
        first = classify(other, task, *queries(2))
        files = parts(drawing(2, 0))
        one.post(f"/v1/tasks/{task}/examples", data={"label": LABELS[2]}, files=files)
        assert classify(other, task, *queries(3))[2]["label"] == LABELS[2]
        other.post(f"/v1/tasks/{task}/remember")
        assert one.get("/v1/memory", params={"search": "anchor"}).json()["total"] == 1
        twin = add_task(one, labels=LABELS[:2])
        explained = classify(one, twin, queries()[0], explain="1")[0]["explanation"]
        assert explained["remembered"] == {"anchor": 0, "bow": 0}  # the very same examples
        assert one.delete("/v1/memory/anchor").json()["exact"]
        assert other.get("/v1/memory", params={"search": "anchor"}).json()["total"] == 0
        assert other.delete(f"/v1/tasks/{task}").status_code == 204
        problem(one.post(f"/v1/tasks/{task}/classify", files=parts(queries()[0])), 404, "task")
        assert len(first) == 2


def test_remembering_leaves_answers_as_they_are_and_is_done_once(client: TestClient) -> None:
    task, asked = add_task(client), queries()
    before = classify(client, task, *asked)
    size = client.get("/v1/memory?limit=1").json()["total"]
    told = client.post(f"/v1/tasks/{task}/remember").json()
    assert (told["added"], told["updated"], told["classes"]) == (list(LABELS), [], size + 4)
    assert classify(client, task, *asked) == before  # to the bit
    again = client.post(f"/v1/tasks/{task}/remember").json()
    assert (again["added"], again["updated"], again["classes"]) == ([], [], size + 4)
    files = parts(drawing(0, 1))
    client.post(f"/v1/tasks/{task}/examples", data={"label": "anchor"}, files=files)
    assert client.post(f"/v1/tasks/{task}/remember").json()["updated"] == ["anchor"]
    [found] = client.get("/v1/memory", params={"search": "anchor"}).json()["classes"]
    assert (found["count"], found["added"], found["has_thumbnail"]) == (2, True, True)
    small = client.get("/v1/memory/anchor/thumbnail")
    assert small.content.startswith(b"\x89PNG")


def test_another_task_is_helped_by_what_was_remembered_under_its_label(client: TestClient) -> None:
    first = add_task(client, shots=5, labels=LABELS[:2])
    client.post(f"/v1/tasks/{first}/remember")
    second: str = client.post("/v1/tasks", json={"name": "later"}).json()["id"]
    for character, label in enumerate(LABELS[:2]):
        files = parts(drawing(character, 9))
        client.post(f"/v1/tasks/{second}/examples", data={"label": label}, files=files)
    [answer] = classify(client, second, drawing(0, 7), explain="true")
    assert answer["explanation"]["remembered"] == {"anchor": 5, "bow": 5}


def test_forgetting_is_exact_where_it_can_be_and_says_where_not(client: TestClient) -> None:
    task, asked = add_task(client), queries()
    before = client.get("/v1/memory?limit=10000").json()["classes"]
    client.post(f"/v1/tasks/{task}/remember")
    for label in LABELS:
        assert client.delete(f"/v1/memory/{label}").json()["exact"]
    assert client.get("/v1/memory?limit=10000").json()["classes"] == before
    told = client.post(f"/v1/tasks/{task}/remember").json()
    assert told["added"] == list(LABELS)  # they can be remembered again
    assert classify(client, task, *asked, reject="0.9")
    name = before[0]["name"]
    assert "/" in name
    told = client.delete(f"/v1/memory/{name}").json()
    assert told == {"name": name, "exact": False, "classes": len(before) + 3}
    problem(client.delete(f"/v1/memory/{name}"), 404, "class")
    refused = client.post(
        f"/v1/tasks/{task}/classify", data={"reject": "0.9"}, files=parts(asked[0])
    )
    told = problem(refused, 409, "reject")
    assert told.startswith("reject: glyphs-5w1s cannot answer none of these: its rejection")
    assert "thresholds were measured with other remembered classes" in told
    assert not client.get("/v1/model").json()["can_reject"]
    assert len(classify(client, task, *asked)) == 4


@pytest.mark.parametrize("remembered", [False, True])
def test_an_exported_task_answers_the_same_in_python(
    client: TestClient, tmp_path: Path, remembered: bool
) -> None:
    task, asked = add_task(client, shots=2), queries()
    if remembered:
        client.post(f"/v1/tasks/{task}/remember")
    exported = client.get(f"/v1/tasks/{task}/export")
    assert exported.headers["content-disposition"] == f'attachment; filename="{task}.vsm"'
    path = tmp_path / "task.vsm"
    path.write_bytes(exported.content)
    loaded = FewShotClassifier.load(path)
    expected = probabilities(classify(client, task, *asked))
    np.testing.assert_allclose(loaded.predict_proba(images(*asked)), expected, atol=1e-7)
    memory = loaded.memory
    assert memory is not None
    assert ("anchor" in memory.names) == remembered
    assert loaded.remember().added == (() if remembered else LABELS)


def test_maps_have_a_place_for_everything(client: TestClient) -> None:
    task = add_task(client)
    before = client.get(f"/v1/tasks/{task}/map").json()
    assert [one["name"] for one in before["prototypes"]] == list(LABELS)
    examples = [one["id"] for one in client.get(f"/v1/tasks/{task}").json()["examples"]]
    assert [one["name"] for one in before["examples"]] == examples
    assert before["recalled"]
    files = parts(drawing(0, 1))
    client.post(f"/v1/tasks/{task}/examples", data={"label": "anchor"}, files=files)
    after = client.get(f"/v1/tasks/{task}/map").json()
    assert after["prototypes"][0] != before["prototypes"][0]
    for was, now in zip(before["prototypes"][1:], after["prototypes"][1:], strict=True):
        assert now == {key: pytest.approx(value, abs=1e-4) for key, value in was.items()}
    classes = client.get("/v1/memory?map=true&limit=3").json()["classes"]
    assert all(np.isfinite([one["x"], one["y"]]).all() for one in classes)


def test_remembered_classes_are_found_by_name_and_by_likeness(client: TestClient) -> None:
    def listed(**query: str | int) -> tuple[int, list[str]]:
        found = client.get("/v1/memory", params=query).json()
        return found["total"], [one["name"] for one in found["classes"]]

    total, known = listed()
    assert len(known) == min(total, 1000)
    for label in ("Çöpper beech", "beech_50%"):  # of the same image
        client.post(f"/v1/tasks/{add_task(client, labels=[label])}/remember")
    [*_, first, second] = client.get("/v1/memory", params={"limit": 10_000}).json()["classes"]
    assert (first["name"], second["name"]) == ("Çöpper beech", "beech_50%")
    assert (first["count"], first["added"], first["has_thumbnail"]) == (1, True, True)
    assert "x" not in first
    for search, expected in [("BEECH", 2), ("çÖPP", 1), ("%", 1), ("_", 1), ("\\", 0), ("\0", 0)]:
        assert listed(search=search)[0] == expected, search
    nearest = listed(near="beech_50%", limit=2)
    assert (nearest[0], sorted(nearest[1])) == (total + 2, ["beech_50%", "Çöpper beech"])
    assert listed(offset=1, limit=1)[1] == known[1:2]


def test_a_model_without_memory_lists_no_classes(tmp_path: Path) -> None:
    trained = load(write_run(tmp_path / "run", "protonet"))
    service = Service(trained, open_store(tmp_path / "a.sqlite"))
    with TestClient(create_app(service), base_url=HERE) as client:
        assert client.get("/v1/memory").json() == {"version": 1, "total": 0, "classes": []}
        problem(client.get("/v1/memory?near=nobody"), 404, "near")


def test_tasks_are_listed_shown_and_deleted(client: TestClient) -> None:
    task = add_task(client)
    [listed] = client.get("/v1/tasks").json()["tasks"]
    assert (listed["id"], listed["name"]) == (task, "characters")
    assert listed["classes"] == dict.fromkeys(LABELS, 1)
    first, *others = client.get(f"/v1/tasks/{task}").json()["examples"]
    assert client.delete(f"/v1/tasks/{task}/examples/{first['id']}").status_code == 204
    problem(client.delete(f"/v1/tasks/{task}/examples/{first['id']}"), 404, "example")
    assert client.get(f"/v1/tasks/{task}").json()["examples"] == others
    assert classify(client, task, queries()[0])[0]["label"] != "anchor"
    assert client.delete(f"/v1/tasks/{task}").status_code == 204
    problem(client.get(f"/v1/tasks/{task}"), 404, "task")


def huge_png(width: int, height: int) -> bytes:
    """Return a few bytes whose header announces many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("name", "content", "status", "told"),
    [
        ("a.txt", b"hello", 422, "a.txt: unreadable or truncated image"),
        ("none.png", b"", 422, "none.png is empty"),
        ("cut.png", drawing(0, 0)[:60], 422, "cut.png: unreadable or truncated"),
        ("bomb.png", huge_png(9000, 9000), 413, "bomb.png has 9,000 × 9,000 pixels, expected at"),
        ("bomb2.png", huge_png(60_000, 60_000), 413, "decompression bomb"),
        ("../../etc/passwd", b"x", 422, "files[1]: passwd: unreadable"),
        ("large.png", bytes(200_000), 413, "large.png has 200,000 bytes, expected at most 100,000"),
    ],
    ids=["text", "empty", "cut", "bomb", "larger bomb", "path", "large"],
)
def test_a_bad_file_is_refused_by_name_and_nothing_is_stored(
    tmp_path: Path, name: str, content: bytes, status: int, told: str
) -> None:
    limits = Limits(file_bytes=100_000)
    with serving(str(tmp_path / "store.sqlite"), limits) as client:
        task = add_task(client)
        before = client.get(f"/v1/tasks/{task}").json()
        files = parts(drawing(0, 1), content, names=["good.png", name])
        for where, data in (("examples", {"label": "anchor"}), ("classify", {})):
            answer = client.post(f"/v1/tasks/{task}/{where}", data=data, files=files)
            assert told in problem(answer, status, "files[1]")
        assert client.get(f"/v1/tasks/{task}").json() == before


def test_limits_are_kept(tmp_path: Path) -> None:
    limits = Limits(files=2, examples=3, tasks=2, request_bytes=5000, pixels=10_000)
    with serving(str(tmp_path / "store.sqlite"), limits) as client:
        task = add_task(client, labels=LABELS[:2])
        client.post("/v1/tasks", json={"name": "second"})
        address = f"/v1/tasks/{task}/examples"
        told = problem(client.post("/v1/tasks", json={"name": "third"}), 409, "tasks")
        assert "at most 2" in told
        files = parts(*queries(3))
        answer = client.post(address, data={"label": "a"}, files=files)
        assert "at most 2 per request, got 3" in problem(answer, 413, "files")
        answer = client.post(address, data={"label": "a"}, files=files[:2])
        assert "over the limit of 3" in problem(answer, 409, "files")
        answer = client.post(address, data={"label": "a" * 6000}, files=files[:1])
        assert "at most 5,000 bytes" in problem(answer, 413, "body")

        def chunks() -> Iterator[bytes]:
            yield from (b"x" * 1000 for _ in range(10))

        kind = {"content-type": "multipart/form-data; boundary=x"}
        answer = client.post(address, content=chunks(), headers=kind)
        assert "at most 5,000 bytes" in problem(answer, 413, "body")
        big = io.BytesIO()
        Image.new("L", (101, 100)).save(big, "PNG")
        answer = client.post(f"/v1/tasks/{task}/classify", files=parts(big.getvalue()))
        assert "101 × 100 pixels, expected at most 10,000" in problem(answer, 413, "files[0]")
        assert client.get(f"/v1/tasks/{task}").json()["classes"] == {"anchor": 1, "bow": 1}


def test_a_full_queue_and_a_slow_answer_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(seconds=0.2, queue=2)
    with serving(str(tmp_path / "store.sqlite"), limits) as client:
        task = add_task(client)
        service = client.app_state["service"]
        embed = service.worker._embed

        def slowly(jobs: Any) -> Any:
            time.sleep(0.5)
            return embed(jobs)

        monkeypatch.setattr(service.worker, "_embed", slowly)
        address = f"/v1/tasks/{task}/classify"
        answer = client.post(address, files=parts(queries()[0]))
        assert "no answer within 0.2" in problem(answer, 503, "seconds")
        assert answer.headers["retry-after"] == "1"
        monkeypatch.undo()
        metrics = client.app.metrics  # type: ignore[attr-defined]
        metrics.under_way += 2
        answer = client.post(address, files=parts(queries()[0]))
        assert "2 requests are under way" in problem(answer, 429, "queue")
        assert answer.headers["retry-after"] == "1"
        assert client.get("/healthz").status_code == 200
        metrics.under_way -= 2
        deadline = time.monotonic() + 5
        while client.post(address, files=parts(queries()[0])).status_code == 503:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reject": "1.5"}, "reject"),
        ({"reject": "nan"}, "reject"),
        ({"reject": "often"}, "reject"),
        ({"explain": "perhaps"}, "explain"),
        ({"transductive": "2"}, "transductive"),
    ],
)
def test_a_bad_field_is_named(shared: TestClient, fields: dict[str, str], field: str) -> None:
    address = f"/v1/tasks/{'0' * 32}/classify"
    problem(shared.post(address, data=fields, files=parts(queries()[0])), 422, field)


def form_schema(client: TestClient, name: str) -> dict[str, Any]:
    """Return what the description says of the form of an address."""
    described = client.get("/openapi.json").json()
    body = described["paths"][f"/v1/tasks/{{task}}/{name}"]["post"]["requestBody"]
    reference = body["content"]["multipart/form-data"]["schema"]["$ref"]
    schema: dict[str, Any] = described["components"]["schemas"][reference.rpartition("/")[2]]
    return schema


def test_a_question_is_read_as_the_description_says(client: TestClient) -> None:
    address = f"/v1/tasks/{add_task(client, labels=LABELS[:2])}/classify"
    files = parts(queries()[0])
    plain = client.post(address, files=files).json()
    assert client.post(address, files=files, data={"reject": "", "explain": ""}).json() == plain
    explained = client.post(address, files=files, data={"explain": "true"}).json()
    assert "explanation" in explained["answers"][0]
    text = [("files", (None, "text"))]
    assert "files.0: " in problem(client.post(address, files=text), 422, "files.0")
    problem(client.post(address, json={"files": []}), 422, "files")
    head = b'Content-Disposition: form-data; name="files"; filename=""'
    no_file = b"--x\r\n" + head + b"\r\n\r\n\r\n--x--\r\n"
    form = {"content-type": "multipart/form-data; boundary=x"}
    problem(client.post(address, content=no_file, headers=form), 422, "files")
    form = {"content-type": "multipart/form-data"}
    problem(client.post(address, content=no_file, headers=form), 400, "body")
    schema = form_schema(client, "classify")
    assert schema["required"] == ["files"]
    assert set(schema["properties"]) == {"files", "reject", "explain", "transductive"}


def test_a_field_that_a_form_does_not_have_is_refused(client: TestClient) -> None:
    address = f"/v1/tasks/{add_task(client, labels=LABELS[:2])}"
    image, data = queries()[0], {"label": LABELS[0]}
    told = client.post(f"{address}/classify", data={"rejct": "0.9"}, files=parts(image))
    assert "rejct: is not a field of this form; /openapi.json" in problem(told, 422, "rejct")
    before = client.get(address).json()
    told = client.post(f"{address}/examples", data=data, files=[("file", ("a.png", image))])
    problem(told, 422, "files")
    odd = client.post(f"{address}/examples", data=data | {"a\nb" * 99: ""}, files=parts(image))
    assert odd.status_code == 422
    assert len(odd.json()["detail"]) < 200
    assert client.get(address).json() == before
    for name, required in (("examples", {"label", "files"}), ("classify", {"files"})):
        schema = form_schema(client, name)
        assert set(schema["required"]) == required
        assert schema["additionalProperties"] is False


def test_a_batch_passes_the_model_in_pieces(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = add_task(client)
    before = classify(client, task, *queries())
    monkeypatch.setattr("vsm.serve.batching.NUMBERS_AT_ONCE", 3 * 28 * 28)
    embed, sizes = Encoder.embed_samples, list[int]()

    def noting(encoder: Encoder, samples: Tensor) -> Tensor:
        sizes.append(len(samples))
        return embed(encoder, samples)

    monkeypatch.setattr(Encoder, "embed_samples", noting)
    after = classify(client, task, *queries())
    assert sum(sizes) == 4
    assert max(sizes) <= 3
    assert [one["label"] for one in after] == [one["label"] for one in before]
    assert after[3]["probability"] == pytest.approx(before[3]["probability"], abs=2e-5)


def test_other_mistakes_are_named(shared: TestClient) -> None:
    task: str = shared.post("/v1/tasks", json={"name": "empty"}).json()["id"]
    address = f"/v1/tasks/{task}"
    files = parts(queries()[0])
    assert "has no examples yet" in problem(
        shared.post(f"{address}/classify", files=files), 409, "task"
    )
    problem(shared.get(f"{address}/export"), 409, "task")
    problem(shared.get(f"{address}/map"), 409, "task")
    problem(shared.post(f"{address}/classify"), 422, "files")
    problem(shared.post(f"{address}/examples", files=files), 422, "label")
    for label in ("", " a", "a\0", "x" * 300, "none of these"):
        told = shared.post(f"{address}/examples", data={"label": label}, files=files)
        problem(told, 422, "label")
    for body in (b'{"name": "\\ud800"}', b'{"name": 3}', b"{}"):
        problem(shared.post("/v1/tasks", content=body, headers=JSON), 422, "name")
    assert "JSON" in problem(shared.post("/v1/tasks", content=b"{", headers=JSON), 422, "body")
    hint = "; send JSON with the header content-type: application/json"
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # curl -d
        answer = shared.post("/v1/tasks", content=b'{"name": "a"}', headers=headers)
        assert problem(answer, 422, "body").endswith(hint)
    answer = shared.post("/v1/tasks", content=b"[]", headers=JSON)
    assert hint not in problem(answer, 422, "body")
    problem(shared.post("/v1/tasks", content=b"\xff", headers=JSON), 400, "body")
    problem(shared.get("/v1/tasks/nothing"), 404, "task")
    problem(shared.get("/v1/memory?limit=0"), 422, "limit")
    problem(shared.get("/v1/memory?near=nobody"), 404, "near")
    problem(shared.get("/v1/memory/nobody/thumbnail"), 404, "class")
    problem(shared.get("/nowhere"), 404, None)
    problem(shared.put("/v1/tasks"), 405, None)
    assert shared.get(address).json()["examples"] == []


def test_a_token_is_required_everywhere_but_for_health(tmp_path: Path) -> None:
    with serving(str(tmp_path / "store.sqlite"), access=Access(TOKEN)) as client:
        addresses = ["/", "/page/style.css", "/openapi.json", "/metrics", "/readyz", "/v1/tasks"]
        wrong = [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Digest {TOKEN}"}]
        wrong += [{"authorization": "Basic !"}, {"authorization": f"Bearer {TOKEN}x"}]
        for address in addresses:
            for headers in wrong:
                answer = client.get(address, headers=headers)
                told = problem(answer, 401, "token")
                assert "Bearer TOKEN" in told
                is_wrong = headers.get("authorization", "").startswith("Bearer")
                assert ("the token is wrong" in told) == is_wrong
                assert "Bearer" in answer.headers["www-authenticate"]
            assert client.get(address, headers={"authorization": f"Bearer {TOKEN}"}).is_success
        typed = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        assert client.get("/", headers={"authorization": f"Basic {typed}"}).is_success
        assert client.get("/healthz").json() == {"status": "ok"}
        problem(client.post("/v1/tasks", json={"name": "a"}), 401, "token")


def test_pages_elsewhere_can_neither_ask_nor_pretend_to_be_this_machine(tmp_path: Path) -> None:
    access = Access(None, frozenset({"localhost", "127.0.0.1"}))
    with serving(str(tmp_path / "store.sqlite"), access=access) as client:
        body = {"json": {"name": "a"}}
        for origin in ("http://evil.example", "null", "http://localhost:1"):
            answer = client.post("/v1/tasks", headers={"origin": origin}, **body)  # type: ignore[arg-type]
            problem(answer, 403, "origin")
        assert client.post("/v1/tasks", headers={"origin": HERE}, **body).is_success  # type: ignore[arg-type]
        for host in ("evil.example", "localhost.evil.example", "[", ""):
            problem(client.get("/v1/tasks", headers={"host": host}), 403, "host")
        assert client.get("/v1/tasks", headers={"host": "127.0.0.1:8000"}).is_success


def test_every_answer_has_strict_headers_and_the_page_needs_nothing_from_elsewhere(
    shared: TestClient,
) -> None:
    for address in ("/", "/page/style.css", "/v1/tasks", "/nowhere", "/healthz"):
        headers = shared.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    page = shared.get("/").text
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?://|<script>|style=| on\w+=", page)
    assert shared.get("/docs").status_code == 404
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd"):
        assert shared.get(path).status_code == 404


def test_counters_count(client: TestClient) -> None:
    task = add_task(client)
    classify(client, task, *queries())
    text = client.get("/metrics").text
    label = 'method="POST",route="/v1/tasks/{task}/classify",status="200"'
    assert f"vsm_requests_total{{{label}}} 1\n" in text
    assert "\nvsm_images_total 8\n" in text
    assert "\nvsm_fits_total 1\n" in text
    assert re.search(r'_bucket\{route="/v1/tasks",le="\+Inf"\} 1\n', text)
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) vsm_\w+ .+|vsm_\w+(\{.*\})? [\d.e+-]+", line), line


def test_a_fitted_task_is_kept_until_something_changes(client: TestClient) -> None:
    task, other = add_task(client), add_task(client)
    worker = client.app_state["service"].worker
    for _ in range(3):
        classify(client, task, queries()[0])
    assert worker.fits == 1
    classify(client, other, queries()[0])
    client.post(f"/v1/tasks/{other}/remember")  # both recall another memory now
    classify(client, task, queries()[0])
    classify(client, task, queries()[0])
    assert worker.fits == 3


def test_a_store_that_is_gone_makes_the_server_unready(client: TestClient) -> None:
    task = add_task(client)
    client.app_state["service"].store.close()
    problem(client.get("/readyz"), 503, "store")
    problem(client.post(f"/v1/tasks/{task}/classify", files=parts(queries()[0])), 503, "store")
    assert client.get("/healthz").is_success


def test_the_description_names_every_address(shared: TestClient) -> None:
    described = shared.get("/openapi.json").json()
    paths = {(m.upper(), p) for p, found in described["paths"].items() for m in found}
    assert {
        ("POST", "/v1/tasks"),
        ("GET", "/v1/tasks"),
        ("GET", "/v1/tasks/{task}"),
        ("DELETE", "/v1/tasks/{task}"),
        ("POST", "/v1/tasks/{task}/examples"),
        ("DELETE", "/v1/tasks/{task}/examples/{example}"),
        ("POST", "/v1/tasks/{task}/classify"),
        ("POST", "/v1/tasks/{task}/remember"),
        ("GET", "/v1/tasks/{task}/export"),
        ("GET", "/v1/memory"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    } <= paths
    assert any(method == "DELETE" and path.startswith("/v1/memory/{") for method, path in paths)
