"""What the page needs of the server, without a browser."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from serving import glyphs, problem, serving
from vsm.serve.middleware import Access


def test_browsers_are_asked_for_the_token_but_not_requests_of_the_page(tmp_path: Path) -> None:
    with serving(str(tmp_path / "store.sqlite"), access=Access("t" * 20)) as client:
        name = "www-authenticate"
        asked = client.get("/").headers.get_list(name)
        # Chromium reads the first challenge of a header alone.
        assert [one.split()[0] for one in asked] == ["Bearer", "Basic"]
        told = client.get("/v1/tasks", headers={"x-vsm-page": "1"})
        problem(told, 401, "token")
        assert [one.split()[0] for one in told.headers.get_list(name)] == ["Bearer"]


def test_characters_that_the_project_draws_have_images(tmp_path: Path) -> None:
    name = "alphabet03/character05"
    with serving(str(tmp_path / "store.sqlite")) as client:
        [listed] = client.get(f"/v1/memory?search={name}").json()["classes"]
        assert listed["has_thumbnail"]
        assert not listed["added"]
        content = client.get(f"/v1/memory/{name}/thumbnail").content
        with Image.open(io.BytesIO(content)) as image:
            shown = np.asarray(image.resize((28, 28), Image.Resampling.BOX))
        drawn = glyphs().images[glyphs().image_ids(glyphs().class_names.index(name))[0]][..., 0]
        assert np.corrcoef(255 - shown.ravel(), drawn.ravel())[0, 1] > 0.95
        assert shown[0, 0] == 255  # paper
        client.delete(f"/v1/memory/{name}")
        for gone in (name, "alphabet03/character99", "alphabet99/character00"):
            problem(client.get(f"/v1/memory/{gone}/thumbnail"), 404, "class")
