"""A small sample of every file that the program reads, and programs that read or serve them.

All of them are in one folder that must not be moved: runs hold the full path of their data.
"""

import io
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml
from PIL import Image

from faults.processes import Command, Program

TINY = (
    "--way 3 --shot 1 --queries 2 --tasks 1 --model.channels 4 --model.hidden-units 8 --json "
    "--sampling.train-prototypes 4 --sampling.evaluation-prototypes 4 --validation.episodes 2"
)
TRAIN = (
    f"train --data folder:images {TINY} --learn-memory false --steps 6 --checkpoint-every 2 "
    "--validation.every 2"
)
PRETRAIN = (
    "pretrain --data folder:images --channels 4 --epochs 3 --json --validation.queries 1 "
    "--validation.episodes 2 --batch-size 16 --checkpoint-every 2"
)
INTERRUPTED = {"resumed": TRAIN, "begun": PRETRAIN}
"""Folders of commands that are killed once they have saved a state to resume."""
LEARN = "memory learn --data folder:images --json"
EVALUATE_FOREIGN = "evaluate foreign --data folder:images --way 3 --queries 2 --episodes 2 --json"
STUDY = {
    "title": "A study",
    "rows": {"memory": "run", "without": "plain"},
    "reference": "memory",
    **{"ways": [3], "shots": [1], "queries": 2, "episodes": 4, "temperature_episodes": 4},
    **{"baselines": ["cosine"], "memory_sizes": [0], "memory_subsets": 1},
}
SETTINGS = {
    **{"data": "folder:images", "way": 3, "steps": 2},
    "optimizer": {"learning_rate": 0.001},
}
SPLITS = (("train", 9), ("validation", 5), ("test", 5))
IMAGES_PER_CLASS = 8
SUFFIXES = ("png", "jpg", "bmp", "gif", "webp")
SERVER_SECONDS = 30.0


def write_files(folder: Path) -> None:
    """Write the samples that no program writes."""
    _write_images(folder)
    _write_features(folder)
    study = {"data": f"folder:{folder / 'images'}", **STUDY}
    for name, content in (("study", study), ("settings", SETTINGS)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def _write_images(folder: Path) -> None:
    """Write noisy patterns, one per class: a dataset, examples, queries and a table."""
    random, lines = np.random.default_rng(0), ["path,label"]
    for split, count in SPLITS:
        for number in range(count):
            pattern = np.kron(random.integers(0, 120, (4, 4)), np.ones((4, 4), int))
            for place in range(IMAGES_PER_CLASS):
                pixels = (pattern + random.integers(0, 135, (16, 16))).astype(np.uint8)
                _save(folder / "images" / split / f"{split}{number}" / f"{place}.png", pixels)
                if split == "test" and place < 2:
                    _save(folder / "support" / f"test{number}" / f"{place}.png", pixels)
                    lines.append(f"support/test{number}/{place}.png,test{number}")
                if split == "test" and place == 2:
                    _save(folder / "query" / f"{number}.{SUFFIXES[number]}", pixels)
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def _save(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _write_features(folder: Path) -> None:
    """Write features both as a folder and as one file."""
    from vsm.data import features
    from vsm.data.dataset import SPLITS as PARTS

    random, classes, each = np.random.default_rng(1), 12, 6
    labels = np.repeat(np.arange(classes), each)
    rows = random.standard_normal((classes, 8))[labels] + random.standard_normal((len(labels), 8))
    names = [f"class{number}" for number in range(classes)]
    splits = {name: PARTS[number % 3] for number, name in enumerate(names)}
    target = folder / "features"
    target.mkdir()
    np.save(target / "features.npy", rows.astype(np.float32))
    np.save(target / "labels.npy", labels)
    (target / "class_names.json").write_text(json.dumps(names))
    (target / "splits.json").write_text(json.dumps(splits))
    features.write(folder / "features.safetensors", rows, labels, class_names=names, splits=splits)


def _copy_shipped_model() -> None:
    from vsm.runs.directory import MODELS

    shutil.copytree(MODELS / "glyphs-5w1s", "model")


def _save_classifier() -> None:
    import vsm

    classifier = vsm.FewShotClassifier.from_pretrained("learned")
    examples = sorted(Path("support").glob("*/*.png"))
    classifier.fit(examples, [path.parent.name for path in examples])
    classifier.save("saved.vsm")


def predict_with_saved() -> int:
    """Predict with the saved classifier; print its errors as a command does."""
    import vsm
    from vsm.cli.output import printable

    try:
        classifier = vsm.FewShotClassifier.load("saved.vsm")
        probabilities = classifier.predict_proba(sorted(Path("query").iterdir()))
    except vsm.VsmError as error:
        print(f"program: {printable(error)}", file=sys.stderr)
        return error.exit_code
    labels = list(map(str, classifier.classes_))
    print(json.dumps({"labels": labels, "p": np.asarray(probabilities).tolist()}))
    return 0


def _fill_store() -> None:
    """Create a task of two classes on a server, and remember it."""
    from starlette.testclient import TestClient

    from vsm.runs.loading import load
    from vsm.serve.app import Service, create_app
    from vsm.stores import open_store

    service = Service(load("learned"), open_store("store.sqlite"))
    with TestClient(create_app(service), base_url="http://localhost") as client:
        task = client.post("/v1/tasks", json={"name": "shapes"}).json()["id"]
        for number, label in enumerate(("ash", "beech")):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16)).astype(np.uint8)
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "PNG")
            files = [("files", ("a.png", content.getvalue(), "image/png"))]
            client.post(
                f"/v1/tasks/{task}/examples", data={"label": label}, files=files
            ).raise_for_status()
        client.post(f"/v1/tasks/{task}/remember").raise_for_status()


QUICK_PROGRAMS: tuple[Program, ...] = (
    Command(f"{TRAIN} --output run"),
    Command(f"{LEARN} --encoder run --output learned"),
    _save_classifier,
)
PROGRAMS: tuple[Program, ...] = (
    *QUICK_PROGRAMS,
    Command(f"{TRAIN} --method vpn --output plain"),
    Command(f"{PRETRAIN} --output pre"),
    _copy_shipped_model,
    Command("memory export model other.safetensors"),
    Command("export learned --onnx onnx --json"),
    Command(f"{LEARN} --encoder onnx:onnx/encoder.onnx --output foreign"),
    Command("study study.yaml --output jobs --json"),
    Command(EVALUATE_FOREIGN),
    _fill_store,
)


def serve_and_query() -> int:
    """Run ``vsm serve``, send a few requests, stop it, and print the answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    answers: dict[str, object] = {}
    threading.Thread(target=_query, args=(port, answers), daemon=True).start()
    code = Command(f"serve --port {port} --model learned --store store.sqlite")()
    if answers:
        print(json.dumps(answers, sort_keys=True))
        return 0
    return code


def _query(port: int, answers: dict[str, object]) -> None:
    """Wait until the server listens, query it, and stop it."""
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline:
        try:
            answers["ready"] = _get(port, "/readyz")
        except OSError:
            time.sleep(0.02)
            continue
        for path in ("/v1/tasks", "/v1/memory", "/v1/model"):
            answers[path] = _get(port, path)
        break
    os.kill(os.getpid(), signal.SIGTERM)


def _get(port: int, path: str) -> object:
    """Return the document at ``path``, or the status of an error."""
    try:
        address = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(address, timeout=SERVER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code
