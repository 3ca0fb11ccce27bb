"""Results studies: from tiny trained runs to a result file and a page."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from run_helpers import edit_config, rows
from vsm.cli import main
from vsm.data import open_dataset
from vsm.errors import RunError
from vsm.evaluation.evaluator import EpisodeProtocol, Evaluation
from vsm.evaluation.intervals import class_bootstrap, estimate
from vsm.memory import SlotMemory
from vsm.runs.configuration import preset_paths, read_settings
from vsm.runs.directory import RunDirectory, shipped_names
from vsm.runs.loading import load
from vsm.runs.trained_model import ModelOnData
from vsm.seeding import generator
from vsm.settings import MemorySettings, ModelSettings, PretrainSettings, RunSettings
from vsm.system.files import read_json
from vsm_lab.jobs import VIEWS, with_changes
from vsm_lab.measures import with_slots
from vsm_lab.provenance import command, training_record
from vsm_lab.study.charts import chart
from vsm_lab.study.definition import (
    PretrainingStudySettings,
    StudySettings,
    read_study,
)
from vsm_lab.study.page import write_page
from vsm_lab.study.runs import StudyPlan

ROOT = Path(__file__).parents[1]
TINY = [
    *("--way", "5", "--queries", "2", "--tasks", "1", "--steps", "3", "--shot", "1"),
    *("--model.channels", "4", "--model.hidden-units", "8", "--model.inference", "conjugate"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.episodes", "2", "--json"),
]
ROWS = {"memory": ("vsm", "none"), "without": ("vpn", "none"), "permuted": ("vsm", "permuted")}
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images of 12/6/7 classes, 8 each, that a small network can almost tell apart."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 6), ("test", 7)):
        for number in range(count):
            (folder / split / f"{split}{number}").mkdir(parents=True)
            pattern = np.kron(rng.integers(0, 120, (4, 4)), np.ones((4, 4), int))
            for image in range(8):
                pixels = (pattern + rng.integers(0, 135, (16, 16))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / f"{split}{number}" / f"{image}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def runs(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for every row and seed."""
    folder = tmp_path_factory.mktemp("study-runs")
    for (label, (method, control)), seed in product(ROWS.items(), SEEDS):
        choices = ["--method", method, "--memory.control", control, "--seed", str(seed)]
        choices += ["--memory.strength", "2"] if method == "vsm" else []
        output = ["--output", str(folder / f"{label}-{seed}")]
        words = ["--data", data, *choices, *output, *TINY, "--learn-memory", "false"]
        assert main(["train", *words]) == 0
    return folder


def vsm_study(
    capsys: pytest.CaptureFixture[str], study: Path, *arguments: str | Path
) -> tuple[int, str, str]:
    """Run a study with jobs beside it; return the exit code and what was printed."""
    capsys.readouterr()
    words = [study, *arguments, "--output", study.parent / "store"]
    code = main(["study", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def asked_of(data: str, runs: Path, **changes: Any) -> dict[str, Any]:
    return {
        "title": "A study",
        "data": data,
        "rows": {label: str(runs / f"{label}-{{seed}}") for label in ROWS},
        "reference": "memory",
        "without_memory": "without",
        "seeds": list(SEEDS),
        "shots": [1],
        "queries": 3,
        "episodes": 40,
        "temperature_episodes": 20,
        "baselines": ["cosine"],
        "memory_sizes": [0, 2],
        "memory_subsets": 2,
        **changes,
    }


def written(path: Path, asked: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(asked, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def measured(data: str, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study that was measured."""
    asked = asked_of(data, runs, pairs={"permuted": "without"})
    path = written(tmp_path_factory.mktemp("study") / "tiny.yaml", asked)
    assert main(["study", str(path), "--json", "--output", str(path.parent / "store")]) == 0
    return path


@pytest.fixture(scope="module")
def results(measured: Path) -> dict[str, Any]:
    return read_study(measured).read_results()


@pytest.fixture(scope="module")
def evaluations(data: str, runs: Path) -> dict[tuple[str, int], Evaluation]:
    """What the study measured, measured again without it."""
    protocol = EpisodeProtocol(data, "test", 5, 1, 3, 40, 0)
    return {
        (label, seed): load(runs / f"{label}-{seed}").on(protocol).measure(protocol).evaluation
        for label, seed in product(ROWS, SEEDS)
    }


def test_scores_are_those_of_the_runs(
    results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    [condition] = results["conditions"]
    for (label, seed), evaluation in evaluations.items():
        one = condition["rows"][label]["seeds"][seed]
        assert one["mean"] == pytest.approx(evaluation.accuracy.mean)
        assert one["ci95"] == pytest.approx(evaluation.accuracy.ci95)
        assert one["nll"] == pytest.approx(evaluation.nll)
        error = evaluation.reliability.expected_calibration_error
        assert one["ece"] == pytest.approx(error)
    means = [evaluations["memory", seed].accuracy.mean for seed in SEEDS]
    assert condition["rows"]["memory"]["mean"] == pytest.approx(sum(means) / 2)


def test_differences_are_paired_and_have_intervals_over_episodes_and_over_classes(
    results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    [condition] = results["conditions"]
    assert list(condition["differences"]) == ["without", "permuted", "cosine"]
    found = condition["differences"]["without"]
    both = [(evaluations["memory", seed], evaluations["without", seed]) for seed in SEEDS]
    for one, (reference, control) in zip(found["seeds"], both, strict=True):
        direct = estimate(reference.episode_accuracies - control.episode_accuracies)
        assert one["mean"] == pytest.approx(direct.mean)
        assert one["ci95"] == pytest.approx(direct.ci95)
        errors = (control.confusions - reference.confusions).double() / 3
        random = generator(0, "class-bootstrap")
        by_class = class_bootstrap(errors, reference.class_ids, random)
        assert by_class.mean == pytest.approx(direct.mean)
        assert one["ci95_classes"] == pytest.approx(by_class.ci95)
    assert found["mean"] == pytest.approx(sum(one["mean"] for one in found["seeds"]) / 2)
    [pair] = condition["pairs"]
    assert (pair["row"], pair["minus"]) == ("permuted", "without")
    assert pair["mean"] == pytest.approx(
        found["mean"] - condition["differences"]["permuted"]["mean"]
    )
    for one, seed in zip(pair["seeds"], SEEDS, strict=True):
        first, other = (evaluations[label, seed] for label in ("permuted", "without"))
        direct = estimate(first.episode_accuracies - other.episode_accuracies)
        assert one["ci95"] == pytest.approx(direct.ci95)


def test_the_reference_is_measured_with_none_some_and_all_of_its_slots(
    data: str, runs: Path, results: dict[str, Any]
) -> None:
    [condition] = results["conditions"]
    none, some, whole = condition["memory_sizes"]
    assert (none["slots"], none["subsets"]) == ([0], 1)
    assert (some["slots"], some["subsets"]) == ([2], 2)
    protocol = EpisodeProtocol(data, "test", 5, 1, 3, 40, 0, memory_slots=0)
    emptied = [load(runs / f"memory-{seed}").on(protocol) for seed in SEEDS]
    accuracies = [run.measure(protocol).evaluation.accuracy.mean for run in emptied]
    assert none["mean"] == pytest.approx(sum(accuracies) / 2)
    protocol = replace(protocol, memory_slots=None)
    accuracies = []
    for seed, subset in product(SEEDS, range(2)):
        run = load(runs / f"memory-{seed}").on(protocol)
        cut = with_slots(run, 2, subset, seed=0)
        accuracies.append(cut.measure(protocol).evaluation.accuracy.mean)
    assert some["mean"] == pytest.approx(sum(accuracies) / 4)
    assert whole["mean"] == pytest.approx(condition["rows"]["memory"]["mean"])


def test_subsets_of_slots_are_the_first_ones_and_then_others(data: str, runs: Path) -> None:
    trained = load(runs / "memory-0")
    assert trained.memory is not None
    names, on_data = trained.memory.names, ModelOnData(trained, open_dataset(data))
    chosen = [with_slots(on_data, 4, subset, seed=0).trained for subset in range(4)]
    kept = [one.memory.names for one in chosen if one.memory is not None]
    assert kept[0] == names[:4]
    assert all(len(set(one)) == 4 for one in kept)
    assert len(set(kept)) == 4
    again = with_slots(on_data, 4, 2, seed=0).trained
    assert again.memory is not None
    assert again.memory.names == kept[2]
    for one in chosen:
        assert one.memory is not None
        assert isinstance(one.state, SlotMemory)
        assert isinstance(trained.state, SlotMemory)
        for name, content in zip(one.memory.names, one.state.content, strict=True):
            torch.testing.assert_close(content, trained.state.content[names.index(name)])


def test_gains_by_class_add_up_to_the_difference_and_stand_beside_the_nearest_slot(
    data: str, runs: Path, results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    [condition] = results["conditions"]
    classes = {one["class"]: one for one in condition["gains"]["classes"]}
    assert sorted(classes) == [f"test{number}" for number in range(7)]
    dataset = open_dataset(data)
    class_ids = evaluations["memory", 0].class_ids.flatten().tolist()
    met = [dataset.class_names[class_id] for class_id in class_ids]
    total = sum(classes[name]["gain"] for name in met) / len(met)
    assert total == pytest.approx(condition["differences"]["without"]["mean"])
    nearness = []
    for seed in SEEDS:
        run = load(runs / f"memory-{seed}").on(EpisodeProtocol(data, "test", 5, 1, 3, 2, 0))
        assert isinstance(run.trained.state, SlotMemory)
        class_id = dataset.class_names.index("test3")
        images = dataset.normalize(dataset.load(dataset.image_ids(class_id)))
        with torch.no_grad():
            mean = run.trained.model.embed(images).mean(0)
        slots = run.trained.state.content
        center = slots.mean(0)
        cosines = [torch.cosine_similarity(mean - center, slot - center, 0) for slot in slots]
        nearness.append(max(cosines).item())
    assert classes["test3"]["nearness"] == pytest.approx(sum(nearness) / 2, abs=1e-5)


def test_answers_that_the_memory_changed_are_counted(
    results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    [condition] = results["conditions"]
    changes = condition["changes"]
    after, before = evaluations["memory", 0], evaluations["without", 0]
    pairs = list(zip(after.correct.flatten(), before.correct.flatten(), strict=True))
    assert changes["turned_right"] == pytest.approx(sum(a and not b for a, b in pairs) / len(pairs))
    assert changes["misled"] == pytest.approx(sum(b and not a for a, b in pairs) / len(pairs))


def test_the_temperature_is_that_of_validation_classes(
    data: str, runs: Path, results: dict[str, Any], evaluations: dict[tuple[str, int], Evaluation]
) -> None:
    protocol = EpisodeProtocol(data, "validation", 5, 1, 3, 20, 0)
    run = load(runs / "memory-0").on(protocol)
    temperature = run.measure(protocol).evaluation.best_temperature()
    [condition] = results["conditions"]
    found = condition["rows"]["memory"]["seeds"][0]
    assert found["temperature"] == pytest.approx(temperature)
    after = evaluations["memory", 0].scale_by_temperature(temperature)
    assert found["calibrated_nll"] == pytest.approx(after.nll)


def test_what_was_measured_is_kept_and_what_is_damaged_is_measured_again(
    measured: Path, results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(measured.parent, tmp_path / "copy")
    study = tmp_path / "copy" / "tiny.yaml"
    results_of_jobs = sorted((tmp_path / "copy" / "store" / "jobs").glob("*/result.json"))
    scores = next(file for file in results_of_jobs if '"confusions"' in file.read_text())
    scores.write_text(scores.read_text()[:100])
    (tmp_path / "copy" / "tiny" / "results.json").write_text("{")
    code, printed, _ = vsm_study(capsys, study, "--json")
    assert code == 0
    [done] = json.loads(printed)["studies"]
    assert (done["measured"], done["kept"]) == (1, len(results_of_jobs) - 1)
    assert read_study(study).read_results()["conditions"] == results["conditions"]


def test_a_changed_run_is_measured_again(
    data: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "without-0", tmp_path / "run")
    rows = {"one": str(tmp_path / "run")}
    small = {"baselines": [], "episodes": 2, "temperature_episodes": 2, "seeds": [0]}
    asked = asked_of(data, runs, rows=rows, reference="one", without_memory=None, **small)
    study = written(tmp_path / "s.yaml", asked)
    counts = []
    for _ in range(2):
        _, printed, _ = vsm_study(capsys, study, "--json")
        counts.append(json.loads(printed)["studies"][0]["measured"])
        for name in ("model.safetensors", "calibration.json"):
            shutil.copyfile(runs / "without-1" / name, tmp_path / "run" / name)
    assert counts == [1 + 3, 1 + 3]  # the row, and the cuts of a memory that it lacks


def test_rows_of_settings_are_trained_once_and_measured_as_runs_are(
    data: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few: dict[str, Any] = {"tasks": 1, "steps": 3, "queries": 2, "model.channels": 4}
    few["memory.strength"] = 2.0
    few |= {"sampling.train_prototypes": 4, "sampling.evaluation_prototypes": 4}
    few |= {"way": 5, "validation.episodes": 2, "model.inference": "conjugate"}
    few["validation.every"] = 1
    asked = asked_of(
        data,
        runs,
        base="demo",
        changes=few,
        rows={
            "memory": {},
            "without": {"method": "vpn"},
            "given": str(runs / "without-{seed}"),
            "learned": {"encoder": "without", "gaussian.rho": 0.0},
        },
        split="validation",
        remark="Measured on a Tuesday.",
        **{"episodes": 6, "baselines": [], "memory_sizes": [], "seeds": [0]},
    )
    study = written(tmp_path / "s.yaml", asked)
    assert vsm_study(capsys, study, "--dry-run")[0] == 0
    assert not (tmp_path / "store").exists()
    counts = []
    for _ in range(2):
        code, printed, error = vsm_study(capsys, study, "--json")
        assert code == 0, error
        [done] = json.loads(printed)["studies"]
        counts.append((done["measured"], done["kept"]))
    # trainings, a memory, evaluations, and what changed
    assert counts == [(2 + 1 + 4 + 2, 0), (0, 2 + 1 + 4 + 2)]
    jobs = StudyPlan(read_study(study), precision="bfloat16").jobs
    rounded = {job.kind for job in jobs if job.options.get("precision") == "bfloat16"}
    assert rounded == {"train", "learn"}
    found = read_study(study).read_results()
    [condition] = found["conditions"]
    assert "temperature" not in condition["rows"]["memory"]
    [memory, without, _, learned] = found["runs"]
    encoders = [load(run["run"]).model.require_backbone() for run in (without, learned)]
    for one, other in zip(*(encoder.parameters() for encoder in encoders), strict=True):
        assert torch.equal(one, other)
    logged = [row for row in rows(Path(memory["run"])) if "validation" in row]
    assert memory["validations"] == [
        [row["step"], row["validation"]["accuracy"], row["validation"]["ci95"]] for row in logged
    ]
    assert [step for step, _, _ in memory["validations"]] == [1, 2, 3]
    drawn = (tmp_path / "s" / "curves.svg").read_text()
    assert "<!-- memory, seed 0 -->" in drawn
    assert "<!-- without, seed 0 -->" in drawn
    assert (memory["steps"], without["method"]) == (3, "vpn")
    assert "--method vpn" in without["command"]
    trained = load(memory["run"]).on(EpisodeProtocol(data, "validation", 5, 1, 3, 6, 0))
    assert trained.trained.settings.memory.strength == 2.0
    direct = trained.measure(EpisodeProtocol(data, "validation", 5, 1, 3, 6, 0)).evaluation
    assert condition["rows"]["memory"]["mean"] == pytest.approx(direct.accuracy.mean)
    page = (tmp_path / "s.md").read_text()
    assert "6 episodes of validation classes" in page
    assert "\nMeasured on a Tuesday.\n" in page
    assert "--gaussian.rho 0.0` (RUN: the run of without)" in page
    assert "/jobs/" not in page, "readers have the study's rows, and no directories of its jobs"


def test_a_page_shows_what_its_result_file_holds_and_nothing_else(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copy(measured, tmp_path / f"{name}.yaml")
        (tmp_path / name).mkdir()
        found = read_json(measured.parent / "tiny" / "results.json")
        found["study"]["title"] = f"Study {name}"
        found["conditions"][0]["rows"]["memory"]["mean"] = 0.1234 if name == "a" else 0.5678
        (tmp_path / name / "results.json").write_text(json.dumps(found))
    studies = tmp_path / "b.yaml", tmp_path / "a.yaml"
    code, printed, _ = vsm_study(capsys, *studies, "--render", "--json")
    pages = [tmp_path / "b.md", tmp_path / "a.md"]
    assert (code, json.loads(printed)) == (0, {"pages": list(map(str, pages))})
    assert "| memory | 56.78 ± " in pages[0].read_text()
    text = pages[1].read_text()
    assert text.startswith("# Study a\n")
    assert "| memory | 12.34 ± " in text
    assert "| permuted − without | " in text
    for expected in ("− permuted", "cosine (baseline)", "Spearman", "Trained for 3 steps"):
        assert expected in text
    assert text.count("--model.channels 4") == 1, "what all rows share is said once"
    assert "| `--memory.control permuted` `--memory.strength 2.0` |" in text
    assert "--seed 0\\|1" in text
    page = tmp_path / "docs" / "page.md"
    assert vsm_study(capsys, studies[0], "--render", page)[:2] == (0, f"{page}\n")
    assert page.read_text() == pages[0].read_text()
    code, _, error = vsm_study(capsys, *studies, "--render", page)
    assert (code, "is one page; name one study" in error) == (2, True)


def test_rows_that_were_not_trained_equally_long_are_named(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured.parent, tmp_path / "copy")
    study = read_study(tmp_path / "copy" / "tiny.yaml")
    found = study.read_results()
    found["runs"][-1]["steps"] = 9
    study.results.write_text(json.dumps(found))
    page = write_page(study).read_text(encoding="utf-8")
    assert "Runs were trained for different lengths: memory for 3 steps of 1 episode," in page
    assert "permuted for 3 steps of 1 episode, permuted for 9 steps" in page


def test_a_page_has_charts_of_memory_sizes_and_gains_beside_it(
    measured: Path, tmp_path: Path
) -> None:
    study = read_study(measured)
    page = write_page(study, tmp_path / "page.md").read_text(encoding="utf-8")
    charts = sorted((tmp_path / "tiny").glob("*.svg"))
    assert charts
    assert all(f"](tiny/{chart.name})" in page for chart in charts)
    drawn = [chart.read_text(encoding="utf-8") for chart in charts]
    assert all("<svg" in text for text in drawn)
    write_page(study, tmp_path / "page.md")
    assert [chart.read_text(encoding="utf-8") for chart in charts] == drawn, "nothing new to commit"


def test_a_condition_without_sizes_and_gains_has_no_chart() -> None:
    sizes = [{"slots": [1], "mean": 0.5, "ci95": None}] * 2
    assert chart({"memory_sizes": sizes, "gains": None}, "a") is None


def test_conditions_differ_in_shape_and_batch_norm(
    data: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"seeds": [0], "episodes": 4, "temperature_episodes": 2, "memory_sizes": []}
    shapes = {"ways": [5, 7], "batch_norms": ["inductive", "transductive"]}
    study = written(tmp_path / "s.yaml", asked_of(data, runs, **small, **shapes))
    code, printed, _ = vsm_study(capsys, study)
    assert code == 0
    assert str(tmp_path / "s.md") in "".join(printed.split("\n"))
    found = read_study(study).read_results()["conditions"]
    kinds = [(one["way"], one["batch_norm"]) for one in found]
    assert kinds == [
        (5, "inductive"), (7, "inductive"), (5, "transductive"), (7, "transductive")
    ]  # fmt: skip
    assert [list(one["baselines"]) for one in found] == [["cosine"], ["cosine"], [], []]
    protocol = EpisodeProtocol(data, "test", 5, 1, 3, 4, 0, "transductive")
    direct = load(runs / "memory-0").on(protocol).measure(protocol).evaluation
    assert found[2]["rows"]["memory"]["nll"] == pytest.approx(direct.nll)
    assert "temperature" in found[2]["rows"]["memory"]
    assert "temperature" not in found[3]["rows"]["memory"]  # 6 validation classes are not 7
    page = (tmp_path / "s.md").read_text()
    assert "| 7-way 1-shot, transductive batch norm | memory |" in page
    assert "| – | – | – |" in page
    gap = 100 * found[1]["differences"]["permuted"]["mean"]
    assert "| 7-way 1-shot | − without |" in page
    assert f"|  | − permuted | {gap:+.2f} ± " in page


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reference": "memry"}, "reference: 'memry' is none of the rows"),
        ({"without_memory": "memory"}, "without_memory: 'memory' is the reference itself"),
        ({"pairs": {"memory": "wthout"}}, "pairs: 'wthout' is none of the rows"),
        ({"epsodes": 3}, "epsodes"),
        ({"shots": [1, "two"]}, "shots"),
        ({"shots": [1, 1]}, "shots: expected different numbers"),
        ({"baselines": ["cosin"]}, "baselines"),
        ({"rows": {"memory": "runs/a"}}, "put {seed} into 'runs/a'"),
        ({"rows": {"memory": "runs/{sed}"}}, "may hold {seed}, {shot} and {way}"),
        ({"rows": {"memory": "nowhere-{seed}"}}, "nowhere-0 is not a run directory"),
        ({"data": "omniglot"}, "but the study is of omniglot"),
        ({"episodes": 1}, "episodes: an interval needs at least 2"),
        ({"rows": {"memory": {"method": "vpn"}}}, "'memory' changes settings, but of no base"),
        ({"rows": {"memory": {"a.b": 1}}, "base": "demo"}, "setting a.b"),
        ({"rows": {"memory": {"init": "no/p"}}, "base": "demo"}, "init: there is no no/p; make it"),
    ],
)
def test_mistakes_are_named_in_one_line(
    changes: dict[str, Any],
    named: str,
    data: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {**asked_of(data, runs), **changes}
    if "rows" in changes:
        asked["without_memory"] = None
    code, _, error = vsm_study(capsys, written(tmp_path / "s.yaml", asked))
    assert code == 2
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_a_study_that_is_no_file_and_results_that_are_none_are_named(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere.yaml is none" in vsm_study(capsys, tmp_path / "nowhere.yaml")[2]
    study, page = tmp_path / "s.yaml", tmp_path / "page.md"
    shutil.copy(measured, study)
    code, _, error = vsm_study(capsys, study, "--render", page)
    assert (code, error.count("\n")) == (2, 1)
    assert "is not there yet; run vsm study" in error
    (tmp_path / "s").mkdir()
    for damaged in ('{"study": {', "[]", "{}"):
        (tmp_path / "s" / "results.json").write_text(damaged)
        code, _, error = vsm_study(capsys, study, "--render", page)
        assert (code, error.count("\n")) == (2, 1)
        assert "is half-written or damaged; run vsm study" in error
    assert not page.exists()


def test_a_training_that_is_not_at_its_end_is_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "memory-0", tmp_path / "run")
    edit_config(tmp_path / "run", "steps: 3\n", "steps: 9\n")
    with pytest.raises(RunError, match=r"is at step 3 of 9; finish it with vsm train .* --resume"):
        training_record(tmp_path / "run", RunDirectory(tmp_path / "run").settings())


def test_the_record_of_a_training_adds_up_the_time_of_all_its_parts(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "memory-0", tmp_path / "run")
    times = [1.0, 5.0, 2.0, 3.0, 0.5]  # resumed twice
    rows = [{"step": step, "seconds": time} for step, time in enumerate(times)]
    log = "".join(
        json.dumps(row) + "\n"
        for row in [*rows, {"step": 5, "validation": {"accuracy": 0.5, "ci95": 0.1}}]
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(log)
    record = training_record(tmp_path / "run", RunDirectory(tmp_path / "run").settings())
    assert record["seconds"] == 5.0 + 3.0 + 0.5
    assert record["init_seconds"] is None


def test_the_command_of_a_run_names_what_is_not_a_default() -> None:
    memory = MemorySettings(control="permuted", strength=1.5)
    settings = RunSettings(data="folder:my images", augment=False, memory=memory)
    assert command("train", settings) == (
        "vsm train --data 'folder:my images' --augment false --memory.control permuted "
        "--memory.strength 1.5"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_study_can_be_read(path: Path) -> None:
    settings = read_study(path).settings
    if isinstance(settings, PretrainingStudySettings):
        for asked in settings.rows.values():
            changes = {name: value for name, value in asked.items() if name != "teacher"}
            if "teacher" in asked:
                changes["distillation.teacher"] = "runs/teacher"
            with_changes(PretrainSettings(), {**settings.changes, **changes}, given=changes)
        return
    if not isinstance(settings, StudySettings):
        models = settings.models.values() if isinstance(settings.models, dict) else settings.models
        own = {model for model in models if model.startswith("runs/")}
        assert set(models) - own <= set(shipped_names())
        return
    assert settings.conditions
    for row in settings.rows.values():
        if isinstance(row, str):
            continue
        if "encoder" in row:
            changes = {name: value for name, value in row.items() if "." in name}
            gaussian = RunSettings(model=ModelSettings(inference="gaussian"))
            assert row.keys() - changes <= {"encoder", *VIEWS}
            with_changes(gaussian, changes, given=changes)
        else:
            base = read_settings(RunSettings, *preset_paths(settings.base or ""))
            with_changes(base, {**settings.changes, **row}, given=row)


def test_help_and_pages_need_no_torch(measured: Path, tmp_path: Path) -> None:
    arguments = ["study", str(measured), "--render", str(tmp_path / "page.md")]
    script = (
        f"import sys; from vsm.cli import main; code = main({arguments!r})\n"
        "try: main(['study', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"--render" in done.stdout
