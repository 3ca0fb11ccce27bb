"""One small specimen of every file that the program reads, made by the program itself.

All of them lie in one folder, which must stay where it is: runs hold the full path of their data.
"""

import io
import json
import os
import shutil
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml
from PIL import Image

from faults.processes import Around, Program, as_json, command, run

TINY = (
    *("--way", "3", "--shot", "1", "--queries", "2", "--tasks", "1", "--model.channels", "4"),
    *("--model.hidden-units", "8", "--sampling.train-prototypes", "4", "--json"),
    *("--sampling.evaluation-prototypes", "4", "--validation.episodes", "2"),
)
TRAIN = (
    *("train", "--data", "folder:pictures", *TINY, "--learn-memory", "false", "--steps", "6"),
    *("--checkpoint-every", "2", "--validation.every", "2"),
)
PRETRAIN = (
    *("pretrain", "--data", "folder:pictures", "--channels", "4", "--epochs", "3", "--json"),
    *("--validation.queries", "1", "--validation.episodes", "2", "--batch-size", "16"),
    *("--checkpoint-every", "2"),
)
STUDY = {
    "title": "A study",
    "rows": {"memory": "run", "without": "plain"},
    "reference": "memory",
    "ways": [3],
    "shots": [1],
    "queries": 2,
    "episodes": 4,
    "temperature_episodes": 4,
    "baselines": ["cosine"],
    "memory_sizes": [0],
    "memory_subsets": 1,
    "pictures": False,
}
SPLITS = (("train", 9), ("validation", 5), ("test", 5))
EACH = 8
KINDS = ("png", "jpg", "bmp", "gif", "webp")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that programs run with in ``folder``."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {
        "HOME": str(folder / "home"),
        "VSM_DATA": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(folder / "home"),
        "LANG": "C.UTF-8",
    }


def build(folder: Path, scratch: Path, quick: bool = False) -> None:
    """Make all specimens below ``folder``, or only those that take little time."""
    (folder / "home").mkdir(parents=True)
    _write_pictures(folder)
    _write_features(folder)
    study = {"data": f"folder:{folder / 'pictures'}", **STUDY}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    settings = {
        "data": "folder:pictures",
        "way": 3,
        "steps": 2,
        "optimizer": {"learning_rate": 0.001},
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for program in _programs() if not quick else _quick_programs():
        ended = run(program, folder, scratch, Around(environment(folder), seconds=300))
        if ended.code != 0:
            raise RuntimeError(f"a specimen cannot be made: {ended.errors or ended.output}")
    for name, program in (("resumed", command(*TRAIN)), ("begun", command(*PRETRAIN))):
        watch = partial(_kill_when_saved, folder / name)
        words = (*program.words, "--output", name)
        run(command(*words), folder, scratch, Around(environment(folder), 300, watch=watch))


def _kill_when_saved(run_folder: Path, process: int) -> None:
    """End a training as soon as it has a state to resume from."""
    if (run_folder / "resume.safetensors").exists():
        os.kill(process, signal.SIGKILL)


LEARN = ("memory", "learn", "--data", "folder:pictures", "--json")


def _quick_programs() -> Iterable[Program]:
    yield command(*TRAIN, "--output", "run")
    yield command(*LEARN, "--encoder", "run", "--output", "learned")
    yield _save_classifier


def _programs() -> Iterable[Program]:
    yield from _quick_programs()
    yield command(*TRAIN, "--method", "vpn", "--output", "plain")
    yield command(*PRETRAIN, "--output", "pre")
    yield _copy_of_a_shipped_model
    yield command("memory", "export", "model", "other.safetensors")
    yield command("export", "run", "--onnx", "onnx", "--json")
    yield command(*LEARN, "--encoder", "onnx:onnx/encoder.onnx", "--output", "foreign")
    yield command("study", "study.yaml", "--output", "jobs", "--json")
    yield command("evaluate", "foreign", *OTHER_DATA)
    yield _fill_store


OTHER_DATA = (
    *("--data", "folder:pictures", "--way", "3", "--queries", "2", "--episodes", "2", "--json"),
)


def _write_pictures(folder: Path) -> None:
    """Write small noisy pictures of a pattern per class, examples, questions and a table."""
    random, lines = np.random.default_rng(0), ["path,label"]
    for split, count in SPLITS:
        for number in range(count):
            pattern = np.kron(random.integers(0, 120, (4, 4)), np.ones((4, 4), int))
            for place in range(EACH):
                pixels = (pattern + random.integers(0, 135, (16, 16))).astype(np.uint8)
                _save(folder / "pictures" / split / f"{split}{number}" / f"{place}.png", pixels)
                if split == "test" and place < 2:
                    _save(folder / "support" / f"test{number}" / f"{place}.png", pixels)
                    lines.append(f"support/test{number}/{place}.png,test{number}")
                if split == "test" and place == 2:
                    _save(folder / "query" / f"{number}.{KINDS[number]}", pixels)
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def _save(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _write_features(folder: Path) -> None:
    """Write features both as a folder and as one file."""
    random, classes, each = np.random.default_rng(1), 12, 6
    labels = np.repeat(np.arange(classes), each)
    rows = random.standard_normal((classes, 8))[labels] + random.standard_normal((len(labels), 8))
    names = [f"kind{number}" for number in range(classes)]
    from vsm.data import features
    from vsm.data.dataset import Split

    parts: tuple[Split, ...] = ("train", "validation", "test")
    splits = {name: parts[n % 3] for n, name in enumerate(names)}
    target = folder / "features"
    target.mkdir()
    np.save(target / "features.npy", rows.astype(np.float32))
    np.save(target / "labels.npy", labels)
    (target / "class_names.json").write_text(json.dumps(names))
    (target / "splits.json").write_text(json.dumps(splits))
    features.write(
        folder / "features.safetensors",
        rows,
        labels,
        class_names=names,
        splits=splits,
    )


def _copy_of_a_shipped_model() -> int:
    from vsm.runs.shipped import MODELS

    shutil.copytree(MODELS / "glyphs-5w1s", "model")
    return 0


def _save_classifier() -> int:
    import vsm

    classifier = vsm.FewShotClassifier.from_pretrained("learned")
    examples = sorted(Path("support").glob("*/*.png"))
    classifier.fit(examples, [path.parent.name for path in examples])
    classifier.save("saved.vsm")
    return 0


def ask_saved() -> int:
    """Answer with the saved classifier, as a Python program does; its errors are told."""
    import vsm
    from vsm.errors import VsmError

    try:
        classifier = vsm.FewShotClassifier.load("saved.vsm")
        pictures = sorted(Path("query").iterdir())
        probabilities = classifier.predict_proba(pictures)
    except VsmError as error:
        import sys

        print(f"program: {error}", file=sys.stderr)
        return error.exit_code
    as_json(
        {"labels": list(map(str, classifier.classes_)), "p": np.asarray(probabilities).tolist()}
    )
    return 0


def picture(number: int) -> bytes:
    """Return a small picture as a client uploads it."""
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16)).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def _fill_store() -> int:
    """Let a server take in a task of two classes, and remember it."""
    from starlette.testclient import TestClient

    from vsm.runs.trained_model import load
    from vsm.serve.app import create_app
    from vsm.serve.service import Service
    from vsm.stores import open_store

    service = Service(load("learned"), open_store("store.sqlite"))
    with TestClient(create_app(service), base_url="http://localhost") as client:
        task = client.post("/v1/tasks", json={"name": "shapes"}).json()["id"]
        for number, label in enumerate(("ash", "beech")):
            files = [("files", ("a.png", picture(number), "image/png"))]
            client.post(
                f"/v1/tasks/{task}/examples", data={"label": label}, files=files
            ).raise_for_status()
        client.post(f"/v1/tasks/{task}/remember").raise_for_status()
    return 0
