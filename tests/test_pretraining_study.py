"""The study of pre-trainings: one job for each row, a teacher before its pupil, and a table."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vsm.cli import main
from vsm.errors import SettingsError
from vsm.runs.directory import PretrainingDirectory
from vsm_lab.study.definition import read_study
from vsm_lab.study.pretraining import PretrainingPlan

STUDY = """
kind: pretraining
title: Ingredients
data: folder:{data}
changes: {{channels: 4, epochs: 2, batch_size: 12, validation.episodes: 6, validation.way: 2,
  validation.queries: 2, validation.shots: [1, 2], validation.every: 1}}
rows:
  born again: {{teacher: plain, distillation.weight: 0.25}}
  plain: {{}}
  unsmoothed: {{label_smoothing: 0.0}}
seeds: [0, 3]
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    random = np.random.default_rng(0)
    for name in range(15):
        (folder / "data" / f"class{name}").mkdir(parents=True)
        for image in range(4):
            pixels = random.integers(0, 255, (28, 28)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "data" / f"class{name}" / f"{image}.png")
    path = folder / "mine.yaml"
    path.write_text(STUDY.format(data=folder / "data"))
    return path


def test_every_row_is_pretrained_once_and_listed_with_its_validation_and_time(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = study.parent / "store"
    words = ["study", str(study), "--output", str(store), "--json"]
    assert main(words) == 0
    [done] = json.loads(capsys.readouterr().out)["studies"]
    assert (done["measured"], done["kept"]) == (6, 0)
    results = json.loads(Path(done["results"]).read_text(encoding="utf-8"))
    found = results["pretrainings"]
    assert [(one["row"], one["seed"]) for one in found] == [
        (label, seed) for label in ("born again", "plain", "unsmoothed") for seed in (0, 3)
    ]
    plan = PretrainingPlan(read_study(study))
    rounded = PretrainingPlan(read_study(study), precision="bfloat16").job("plain", 0)
    assert rounded.options["precision"] == "bfloat16"
    assert rounded.key == plan.job("plain", 0).key, "where it is made is no part of its name"
    described = plan.job("plain", 0).recipe["settings"]
    assert "augment_affine" not in described, "results from before there was one keep their names"
    page = Path(done["page"]).read_text(encoding="utf-8")
    for one in found:
        folder = next(store.glob(f"**/{plan.job(one['row'], one['seed']).key}*/run"))
        run = PretrainingDirectory(folder)
        best = max(run.read_validations(), key=lambda row: row["validation"]["mean_accuracy"])
        assert one["validation"] == best["validation"]
        assert one["best_epoch"] == best["epoch"]
        assert one["seconds"] > 0
        score = best["validation"]["shots"]["2"]
        right = np.array(one["answers"]["2"])
        assert right.shape == (6,)
        assert right.mean() / 4 == pytest.approx(score["accuracy"])
        if one["row"] != "born again":
            first = next(o for o in found if o["row"] == "born again" and o["seed"] == one["seed"])
            more = 25 * (right - np.array(first["answers"]["2"]))
            error = 1.96 * more.std(ddof=1) / 6**0.5
            assert f"| {more.mean():+.2f} ± {error:.2f} |" in page
        assert f"| {100 * score['accuracy']:.2f} ± {100 * score['ci95']:.2f} |" in page
        taught = run.settings()
        assert (taught.seed, taught.label_smoothing) == (
            one["seed"],
            0.0 if one["row"] == "unsmoothed" else 0.1,
        )
        assert (taught.distillation.teacher is not None) == (one["row"] == "born again")
    again = next(store.glob(f"**/{plan.job('born again', 3).key}*/run"))
    teacher = PretrainingDirectory(again).settings().distillation.teacher
    assert teacher is not None
    assert plan.job("plain", 3).key in teacher
    assert main(words) == 0
    [done] = json.loads(capsys.readouterr().out)["studies"]
    assert (done["measured"], done["kept"]) == (0, len(found)), "what is done is not done again"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("teacher: plain", "teacher: nobody", "the teacher 'nobody' of 'born again' is no other"),
        ("plain: {}", "plain: {teacher: born again}", "is no other row"),
        ("teacher: plain", "distillation.teacher: runs/p", "name another row as teacher"),
        ("label_smoothing", "smoothing", "unknown setting smoothing"),
        ("label_smoothing: 0.0", "label_smoothing: 2.0", "label_smoothing: must lie in"),
    ],
)
def test_mistakes_are_named(study: Path, before: str, after: str, named: str) -> None:
    wrong = study.with_name("wrong.yaml")
    wrong.write_text(study.read_text().replace(before, after))
    with pytest.raises(SettingsError, match=named):
        PretrainingPlan(read_study(wrong))
