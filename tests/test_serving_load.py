"""Many clients at once: no answer is wrong, lost, or another's."""

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from serving import HERE, LABELS, drawing, model, parts
from vsm import FewShotClassifier
from vsm.serve import Limits
from vsm.serve.app import Service, create_app
from vsm.stores import open_store

CLIENTS, EACH, TASKS = 32, 6, 3


def expected() -> list[Any]:
    """Return the probabilities of each task for every image, as Python has them."""
    found = []
    for task in range(TASKS):
        classifier = FewShotClassifier(model())
        for n, label in enumerate(LABELS):
            image = Image.open(io.BytesIO(drawing(n + 4 * task, 0)))
            classifier.partial_fit([image], [label])
        asked = [Image.open(io.BytesIO(drawing(n + 4 * task, 5))) for n in range(4)]
        found.append(classifier.predict_proba(asked))
    return found


@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_no_answer_is_wrong_or_lost_whoever_else_asks(tmp_path: Path, wait: float) -> None:
    asyncio.run(_ask_all(str(tmp_path / "store.sqlite"), wait))


async def _ask_all(target: str, wait: float) -> None:
    python = expected()
    service = Service(model(), open_store(target), Limits(batch_milliseconds=wait))
    app = create_app(service)
    service.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(service.stop)
        transport = httpx2.ASGITransport(app)
        client = await stack.enter_async_context(
            httpx2.AsyncClient(transport=transport, base_url=HERE, timeout=60)
        )
        tasks = []
        for task in range(TASKS):
            made = await client.post("/v1/tasks", json={"name": str(task)})
            tasks.append(made.json()["id"])
            for n, label in enumerate(LABELS):
                answer = await client.post(
                    f"/v1/tasks/{tasks[-1]}/examples",
                    data={"label": label},
                    files=parts(drawing(n + 4 * task, 0)),
                )
                assert answer.status_code == 201

        async def ask(number: int) -> int:
            for turn in range(EACH):
                task, first = (number + turn) % TASKS, (number + turn) % 4
                asked = [first, (first + 1) % 4][: 1 + number % 2]
                files = parts(
                    *(drawing(n + 4 * task, 5) for n in asked),
                    names=[f"{number}-{turn}-{n}" for n in asked],
                )
                address = f"/v1/tasks/{tasks[task]}/classify"
                answer = await client.post(address, files=files)
                assert answer.status_code == 200, answer.text
                for n, one in zip(asked, answer.json()["answers"], strict=True):
                    assert one["file"] == f"{number}-{turn}-{n}"
                    chances = python[task][n]
                    assert one["label"] == sorted(LABELS)[chances.argmax()]
                    assert one["probability"] == pytest.approx(chances.max(), abs=2e-5)
            return EACH

        async def disturb() -> None:
            """Change another task all the while."""
            made = await client.post("/v1/tasks", json={"name": "other"})
            for n in range(6):
                address = f"/v1/tasks/{made.json()['id']}"
                files = parts(drawing(30 + n, 0))
                await client.post(f"{address}/examples", data={"label": f"new{n}"}, files=files)

        answered = await asyncio.gather(*map(ask, range(CLIENTS)), disturb())
        assert sum(filter(None, answered)) == CLIENTS * EACH
        assert service.worker.batches < service.worker.images / 2  # batches were shared
        assert np.isfinite(service.worker.waiting)
