"""Images of one request that are classified together, and only they."""

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from starlette.testclient import TestClient

from classify_helpers import write_run_of
from serving import HERE, LABELS, add_task, drawing, model, parts, problem, serving
from tiny import make_settings, variant
from vsm import FewShotClassifier
from vsm.model import FewShotModel
from vsm.runs.loading import load
from vsm.serve import Limits
from vsm.serve.app import Service, create_app
from vsm.stores import open_store

OWN = [drawing(character, n) for character in range(len(LABELS)) for n in range(5, 11)]
UNEQUAL = [drawing(0, 12), *(drawing(3, n) for n in range(8, 20))]
OTHERS = [drawing(character, 3) for character in range(20, 30)]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with serving(str(tmp_path / "store.sqlite")) as opened:
        yield opened


def python(unlabeled: list[bytes]) -> FewShotClassifier:
    """A classifier that is given what :func:`add_task` uploads, and images without labels."""
    examples = [drawing(character, 0) for character in range(len(LABELS))]
    return FewShotClassifier(model()).fit(images(examples), LABELS, unlabeled=images(unlabeled))


def images(contents: list[bytes]) -> list[Image.Image]:
    return [Image.open(io.BytesIO(one)) for one in contents]


def ask(client: TestClient, task: str, asked: list[bytes], **fields: str) -> list[dict[str, Any]]:
    answer = client.post(f"/v1/tasks/{task}/classify", data=fields, files=parts(*asked))
    assert answer.status_code == 200, answer.text
    answers: list[dict[str, Any]] = answer.json()["answers"]
    return answers


def probabilities(answers: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    """Return the probabilities ``[n, N]`` of sorted labels."""
    rows = []
    for answer in answers:
        known = {one["label"]: one["probability"] for one in answer["alternatives"]}
        known |= {} if answer["label"] is None else {answer["label"]: answer["probability"]}
        rows.append([known[label] for label in sorted(known)])
    return np.asarray(rows)


@pytest.mark.parametrize("asked", [OWN, UNEQUAL, OWN + OTHERS, OWN[:1]])
def test_answers_are_those_of_python_with_the_same_unlabeled_images(
    client: TestClient, asked: list[bytes]
) -> None:
    task = add_task(client)
    found = probabilities(ask(client, task, asked, transductive="true"))
    np.testing.assert_allclose(found, python(asked).predict_proba(images(asked)), atol=1e-5)


def test_rejection_and_explanations_are_those_of_python(client: TestClient) -> None:
    task, asked = add_task(client), OWN + OTHERS
    answers = ask(client, task, asked, transductive="true", reject="0.8", explain="true")
    expected, given = python(asked), images(asked)
    labels = ["none of these" if one["label"] is None else one["label"] for one in answers]
    assert labels == expected.predict(given, reject=0.8).tolist()
    assert "none of these" in labels
    np.testing.assert_allclose(probabilities(answers), expected.predict_proba(given), atol=1e-5)
    for answer, explained in zip(answers, expected.explain_all(given), strict=True):
        found, known = answer["explanation"], explained.as_dict()
        assert found["prediction"] == known["prediction"]
        assert found["uncertainty"] == pytest.approx(known["uncertainty"], abs=1e-4)
        for label, counted in known["unlabeled"].items():
            assert found["unlabeled"][label] == pytest.approx(counted, abs=1e-3)
    for answer in answers:
        if answer["label"] is not None:
            recalled = expected.recalled()[answer["label"]]
            assert [one["name"] for one in answer["recalled"]] == [one.name for one in recalled]


def test_explanations_do_not_depend_on_how_many_are_made_at_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = add_task(client)
    before = ask(client, task, OWN, transductive="1", explain="1")
    monkeypatch.setattr("vsm.classify.fitted.ELEMENTS_AT_ONCE", 5 * 64 * len(LABELS) ** 2)
    after = ask(client, task, OWN, transductive="1", explain="1")
    for was, now in zip(before, after, strict=True):
        for part in ("probabilities", "std", "uncertainty", "distances"):
            expected = pytest.approx(was["explanation"][part], abs=1e-4)
            assert now["explanation"][part] == expected
        assert now["explanation"]["unlabeled"] == was["explanation"]["unlabeled"]


def test_nothing_of_the_images_is_kept(client: TestClient) -> None:
    task = add_task(client)
    worker = client.app_state["service"].worker
    before = client.get(f"/v1/tasks/{task}").json(), client.get("/v1/memory?limit=10000").json()
    plain = ask(client, task, OWN, explain="1")
    fits = worker.fits
    together = ask(client, task, OWN, explain="1", transductive="1")
    assert np.abs(probabilities(together) - probabilities(plain)).max() > 0.01
    assert ask(client, task, OWN, explain="1") == plain  # to the bit
    assert [one["explanation"]["unlabeled"] for one in plain] == [None] * len(plain)
    after = client.get(f"/v1/tasks/{task}").json(), client.get("/v1/memory?limit=10000").json()
    assert (after, worker.fits) == (before, fits)


def test_requests_in_one_batch_do_not_influence_each_other(tmp_path: Path) -> None:
    asyncio.run(_ask_at_once(str(tmp_path / "store.sqlite")))


async def _ask_at_once(target: str) -> None:
    limits = Limits(batch=200, batch_milliseconds=1000)
    with serving(target) as client:
        task = add_task(client)
    service = Service(model(), open_store(target), limits)
    app = create_app(service)
    service.start()
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url=HERE, timeout=60) as asking:

        async def answers(asked: list[bytes], **fields: str) -> npt.NDArray[np.float64]:
            address = f"/v1/tasks/{task}/classify"
            answer = await asking.post(address, data=fields, files=parts(*asked))
            return probabilities(answer.json()["answers"])

        found = await asyncio.gather(
            answers(OWN, transductive="1"),
            answers(OWN[:7]),
            answers(UNEQUAL, transductive="1"),
            answers(OTHERS, transductive="0"),
        )
        assert service.worker.batches == 1
    service.stop()
    for together, asked in ((found[0], OWN), (found[2], UNEQUAL)):
        expected = python(asked).predict_proba(images(asked))
        np.testing.assert_allclose(together, expected, atol=1e-5)
    for alone, asked in ((found[1], OWN[:7]), (found[3], OTHERS)):
        np.testing.assert_allclose(alone, python([]).predict_proba(images(asked)), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "can"),
    [
        ({"method": "protonet"}, False),
        ({"method": "vsm", "inference": "network"}, False),
        ({"method": "vsm", "inference": "conjugate"}, True),
        ({"method": "vsm", "inference": "conjugate", "distance": "cosine"}, False),
        ({"method": "vpn", "inference": "conjugate"}, True),
        ({"method": "mann"}, False),
    ],
    ids=lambda one: " ".join(one.values()) if isinstance(one, dict) else "",
)
def test_a_model_says_whether_it_can_and_refuses_if_not(
    tmp_path: Path, settings: dict[str, Any], can: bool
) -> None:
    method, base = settings.pop("method"), make_settings()
    chosen = variant(base, method=method, model=replace(base.model, **settings))
    run = write_run_of(FewShotModel(chosen, (1, 28, 28)).eval(), tmp_path / "run")
    service = Service(load(run), open_store(tmp_path / "store.sqlite"))
    with TestClient(create_app(service), base_url=HERE) as client:
        assert client.get("/v1/model").json()["can_use_together"] is can
        address = f"/v1/tasks/{add_task(client)}/classify"
        answer = client.post(address, data={"transductive": "1"}, files=parts(*OWN))
        if can:
            assert len(answer.json()["answers"]) == len(OWN)
        else:
            told = problem(answer, 409, "transductive")
            assert told.startswith("transductive: needs Gaussian inference")
            assert "leave it out" in told
        assert client.post(address, files=parts(*OWN)).is_success


def test_the_shipped_model_can(client: TestClient) -> None:
    assert client.get("/v1/model").json()["can_use_together"]
