"""The paper's tables and figures: what is planned, run and reported."""

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, variance
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from vsm import training
from vsm.cli import main
from vsm.errors import DataError, RunError, SettingsError
from vsm.evaluation.intervals import crossed_estimate, estimate, student_quantile
from vsm.runs.configuration import preset_paths, read_settings
from vsm.settings import METHODS, GaussianSettings, ModelSettings, RunSettings, SlurmSettings
from vsm.system.interruption import Interrupted
from vsm_lab import execution, jobs
from vsm_lab.document import Block, Heading, Plot, Table, Text, to_html, to_markdown
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import Job, evaluate_job, in_order, run_settings, train_job, with_changes
from vsm_lab.launchers import Handle, InProcess, Outcome, SubmittedJob, make_launcher, run_jobs
from vsm_lab.measures import separation
from vsm_lab.paper.plan import Plan, Request, check_data, make_plan, remember, requests
from vsm_lab.paper.report import collect, difference_table, value_table, write_report
from vsm_lab.paper.tables import (
    BUDGETS,
    FOLDER,
    Budget,
    Column,
    PaperTable,
    Row,
    Unavailable,
    table,
    tables,
)
from vsm_lab.study.definition import StudySettings, read_study

STUDIES = Path(__file__).parents[1] / "studies"

# From rows to settings.


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("name", tables())
def test_every_row_builds_settings_under_every_budget_or_says_why_not(
    name: str, budget: Budget
) -> None:
    shown = table(name)
    for row in shown.rows:
        for column in shown.columns:
            settings = settings_or_reason(budget, shown, column, row)
            if isinstance(settings, str):
                assert row.changes is None or is_honest(settings, shown.backbone, budget.name)
                continue
            assert row.changes is not None
            assert (settings.data, settings.way, settings.shot, settings.seed) == (
                column.data,
                column.way,
                column.shot,
                2,
            )
            assert settings.model.backbone == shown.backbone
            assert settings.freeze_backbone == bool(budget.pretraining_epochs)
            for dotted, value in row.changes.items():
                assert setting(settings, dotted) == value


def settings_or_reason(
    budget: Budget, shown: PaperTable, column: Column, row: Row
) -> RunSettings | str:
    try:
        return budget.settings(shown, column, row, seed=2)
    except Unavailable as reason:
        return str(reason)


def is_honest(reason: str, backbone: str, budget: str) -> bool:
    """Whether a row is refused because of what this version lacks, or because it is deep."""
    if budget == "cpu" and backbone != "conv4":
        return "a deep network takes days on a CPU" in reason
    missing = reason.partition("not available in this version: method ")[2]
    return missing != "" and missing not in METHODS


def setting(settings: RunSettings, dotted: str) -> Any:
    value: Any = settings
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("shot", [1, 5])
def test_the_paper_budget_is_the_papers_preset(shot: int) -> None:
    shown = table("table-5")
    column = Column("cifar-fs", 5, shot)
    settings = BUDGETS["paper"].settings(shown, column, shown.row("vsm"), seed=0)
    assert settings == read_settings(RunSettings, *preset_paths(f"paper-cifar-fs-5way-{shot}shot"))


def test_a_stand_in_has_the_papers_schedule_too() -> None:
    shown = table("table-5")
    for data, like in (("glyphs", "omniglot"), ("folder:image_folder", "mini-imagenet")):
        settings = BUDGETS["paper"].settings(shown, Column(data, 5, 1), shown.row("vsm"), seed=0)
        preset = read_settings(RunSettings, *preset_paths(f"paper-{like}-5way-1shot"))
        assert settings == replace(preset, data=data)


def test_deep_rows_are_narrow_under_smoke_and_full_under_paper() -> None:
    shown = table("table-6")
    widths = {
        name: BUDGETS[name]
        .settings(shown, shown.columns[0], shown.row("vsm"), seed=0)
        .model.channels
        for name in ("smoke", "paper")
    }
    assert widths["paper"] == 64
    assert widths["smoke"] < 64
    assert BUDGETS["smoke"].narrow("resnet12") == f"resnet12 with {widths['smoke']} of 64 channels"
    assert BUDGETS["paper"].narrow("resnet12") == ""


def test_under_the_cpu_budget_one_pretraining_serves_all_rows_and_seeds_of_a_dataset() -> None:
    plans = [
        make_plan(Request(name, "cpu", ("glyphs",), seeds=2)) for name in ("table-1", "table-3")
    ]
    found = in_order(job for plan in plans for job in plan.jobs)
    [pretraining] = [job for job in found if job.kind == "pretrain"]
    trainings = [job for job in found if job.kind == "train"]
    assert len(trainings) == 16
    assert all(job.after == (pretraining,) for job in trainings)
    other = make_plan(Request("table-1", "cpu", ("omniglot",), seeds=1))
    assert pretraining.key not in {job.key for job in other.jobs}


# Names of jobs.


@pytest.fixture
def some_settings() -> RunSettings:
    return read_settings(RunSettings, *preset_paths("paper-omniglot-5way-1shot"))


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, the type and the value of every setting."""
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if hasattr(value, "__dataclass_fields__"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, kind, value


def another(kind: Any, value: Any) -> Any:
    """Return a valid value that differs from ``value``."""
    if type(None) in get_args(kind):  # a setting that may be left out
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if isinstance(value, bool):
        return not value
    if value is None:
        return kind(3)
    return value + 1 if isinstance(value, int) else value * 0.5 or 0.5


def test_every_setting_is_part_of_a_trainings_name_but_how_often_it_saves(
    some_settings: RunSettings,
) -> None:
    gumbel = with_changes(some_settings, {"memory.recall": "gumbel"})
    changed_names, all_names = set(), set()
    reading = GaussianSettings(rho=0.5)
    gaussian = RunSettings(model=ModelSettings(inference="gaussian"), gaussian=reading)
    others: list[dict[str, Any]] = [
        {"method": "mann"},
        {"method": "kanerva"},
        {"memory.capacity": 3, "optimizer.schedule": "step"},
    ]
    changed_settings = [with_changes(RunSettings(), changes) for changes in others]
    for settings in (gumbel, RunSettings(), gaussian, *changed_settings):
        key = train_job(settings, "pixels").key
        for name, kind, value in leaves(settings):
            all_names.add(name)
            other = f"{value}x" if kind is str else another(kind, value)
            try:
                changed = with_changes(settings, {name: other}, given=[name])
            except SettingsError:  # without effect here, or a word that must name something
                continue
            changed_names.add(name)
            same = train_job(changed, "pixels").key == key
            assert same == (name in ("checkpoint_every", "init")), name
    assert all_names - changed_names == {"model.backbone", "freeze_backbone"}


@pytest.mark.parametrize("name", ["stesp", "memory.upate", "steps.every"])
def test_a_setting_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown setting {name}; known there: "):
        with_changes(RunSettings(), {name: 3})


def test_the_data_what_it_needs_and_the_version_are_part_of_a_name(
    some_settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_job(some_settings, "pixels")
    assert train_job(some_settings, "other pixels").key != first.key
    assert train_job(some_settings, "pixels", first).key != first.key
    monkeypatch.setattr(jobs, "RESULTS_VERSION", jobs.RESULTS_VERSION + 1)
    assert train_job(some_settings, "pixels").key != first.key


@pytest.mark.parametrize(
    "change",
    [{"protocol": {"episodes": 7}}, {"slots": (7, 0)}, {"slots": (7, 1)}, {"confusions": True}],
)
def test_every_part_of_a_recipe_is_part_of_a_measurements_name(
    some_settings: RunSettings, change: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"protocol": {"episodes": 4}, "slots": (7, 2)}
    model = train_job(some_settings, "pixels")
    keys = {evaluate_job(model, "measure", **more).key for more in (usual, {**usual, **change})}
    assert len(keys) == 2
    assert evaluate_job(model, "in other words", **usual).key in keys


def test_a_name_survives_json_and_the_settings_do_too(some_settings: RunSettings) -> None:
    before = train_job(some_settings, "before")
    job = train_job(some_settings, "pixels", before)
    read = Job.from_dict(json.loads(json.dumps(job.as_dict())))
    assert read.key == job.key
    assert read == replace(job, recipe=read.recipe, after=read.after)
    assert run_settings(read, init="runs/p") == replace(some_settings, init="runs/p")
    assert run_settings(read.after[0]) == some_settings


def test_tables_that_need_the_same_run_share_it() -> None:
    keys = {}
    for name, row in (("table-2", "vsm"), ("table-5", "vsm"), ("table-11", "softmax")):
        plan = make_plan(Request(name, "tiny", rows=(row,)))
        keys[name] = plan.cells[row, 0, 0].key
    plan = make_plan(Request("table-10", "tiny", rows=("alpha-0.7", "alpha-0.8")))
    assert set(keys.values()) == {plan.cells["alpha-0.7", 0, 0].key}
    assert plan.cells["alpha-0.8", 1, 0].key == (
        make_plan(Request("table-2", "tiny", rows=("vsm",))).cells["vsm", 1, 0].key
    )


# Plans.


def test_stand_in_data_has_one_column_for_each_way_and_shot() -> None:
    plan = make_plan(Request("table-7", "tiny", ("glyphs",)))
    assert [str(one.column) for one in plan.columns] == [
        f"glyphs {way}-way {shot}-shot" for way in (5, 20) for shot in (1, 5)
    ]
    plan = make_plan(Request("table-1", "tiny", ("glyphs", "cifar-fs")))
    assert [(str(one.column), one.beside, one.stands_in) for one in plan.columns] == [
        ("glyphs 5-way 1-shot", (0, 2, 4), True),
        ("glyphs 5-way 5-shot", (1, 3, 5), True),
        ("cifar-fs 5-way 1-shot", (4,), False),
        ("cifar-fs 5-way 5-shot", (5,), False),
    ]


def test_without_a_word_about_data_the_paper_budget_takes_the_papers() -> None:
    plan = make_plan(Request("table-1", "paper", seeds=1))
    assert tuple(one.column for one in plan.columns) == table("table-1").columns
    with pytest.raises(DataError, match=r"table-1: data: mini-imagenet is not prepared.* --data"):
        check_data(plan)


def test_rows_this_version_lacks_are_listed_and_the_others_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vsm_lab.paper.tables.METHODS", ("protonet", "vsm"))
    plan = make_plan(Request("table-4", "tiny", seeds=1))
    assert {row for row, _, _ in plan.cells} == {"vsm"}
    assert plan.unavailable == {
        row: f"not available in this version: method {row}" for row in ("mann", "kanerva")
    }


def test_two_requests_of_the_same_columns_are_joined(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    remember(store, Request("table-2", "tiny", seeds=3, rows=("vpn",)))
    joined = remember(store, Request("table-2", "tiny", seeds=1, rows=("vsm", "vpn")))
    assert (joined.seeds, joined.rows) == (3, ("vpn", "vsm"))
    assert requests(store) == [joined]
    remember(store, Request("table-2", "tiny"))
    assert [request.rows for request in requests(store)] == [()]


def test_results_are_found_after_the_data_has_gone(image_folder: str) -> None:
    asked = make_plan(Request("table-1", "tiny", (image_folder,), seeds=1)).request
    gone = replace(asked, data=("folder:/nowhere",), checksums={"folder:/nowhere": "pixels"})
    [job] = {job.recipe["data"] for job in make_plan(gone).jobs if job.kind == "train"}
    assert job == "pixels"


# Running.


class Noting(InProcess):
    """Keeps the jobs that were begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.began: list[Job] = []

    def begin(self, job: Job) -> Handle:
        self.began.append(job)
        return super().begin(job)


def run_plan(plan: Plan, root: Path) -> tuple[Outcome, list[Job]]:
    launcher = Noting(root)
    return run_jobs(plan.jobs, JobStore(root), launcher), launcher.began


@pytest.fixture
def plan(image_folder: str) -> Plan:
    """Two rows of one column and one seed: two trainings and two measurements."""
    return make_plan(Request("figure-2", "tiny", (image_folder,), seeds=1))


@pytest.fixture
def table_plan(image_folder: str) -> Plan:
    """Two rows, two columns and one seed of accuracies."""
    return make_plan(Request("table-1", "tiny", (image_folder,), seeds=1))


def test_a_plan_runs_once_and_then_is_done(plan: Plan, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first, began = run_plan(plan, tmp_path)
    assert (len(first.done), len(first.skipped), first.failed, first.blocked) == (4, 0, [], [])
    assert [job.key for job in began] == [job.key for job in plan.jobs]
    assert {store.state(job) for job in plan.jobs} == {"done"}
    again, began = run_plan(plan, tmp_path)
    assert (len(again.done), len(again.skipped), began) == (0, 4, [])


def test_a_run_begins_with_the_pretraining_it_needs(
    image_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = replace(BUDGETS["tiny"], file="cpu.yaml", pretraining_epochs={"": 1})
    monkeypatch.setitem(BUDGETS, "tiny", frozen)
    monkeypatch.setattr("vsm_lab.paper.tables._base", short_heads)
    plan = make_plan(Request("figure-2", "tiny", (image_folder,), seeds=1))
    assert [job.kind for job in plan.jobs] == ["pretrain", *["train", "prototypes"] * 2]
    outcome, _ = run_plan(plan, tmp_path)
    assert (len(outcome.done), outcome.failed) == (5, [])
    store, [pretraining, run, *_] = JobStore(tmp_path), plan.jobs
    begun = read_settings(RunSettings, store.run_folder(run) / "config.yaml")
    assert begun.init == str(store.run_folder(pretraining))
    assert begun.freeze_backbone


def short_heads(file: str, _: Column) -> RunSettings:
    """Return two steps of the heads that ``file`` describes."""
    settings = read_settings(RunSettings, FOLDER / file)
    validation = replace(settings.validation, every=2, episodes=2)
    return replace(settings, steps=2, tasks=1, queries=2, validation=validation)


def test_a_job_is_never_before_what_it_needs(table_plan: Plan) -> None:
    seen: set[str] = set()
    for job in in_order(reversed(table_plan.jobs)):
        assert {before.key for before in job.after} <= seen
        seen.add(job.key)
    assert seen == {job.key for job in table_plan.jobs}


def test_a_failing_job_harms_no_other_and_is_tried_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_or_fail(settings: RunSettings, *rest: Any, **more: Any) -> Any:
        if settings.method == "vpn":
            raise RuntimeError("the disk\nmelted")
        return training.train(settings, *rest, **more)

    store = JobStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(execution, "train", train_or_fail)
        outcome, _ = run_plan(plan, tmp_path)
    [(failed, why)] = outcome.failed
    assert (failed.kind, why) == ("train", "RuntimeError: the disk melted")
    assert "vpn" in failed.title
    assert [job.after[0].key for job in outcome.blocked] == [failed.key]
    assert len(outcome.done) == 2
    assert store.state(failed) == "failed"
    results = collect(plan, store)
    assert results.failures == {failed.title: why}
    assert value_table(results).rows[0][1] == "failed"
    again, began = run_plan(plan, tmp_path)
    assert (len(again.skipped), len(again.done), again.failed) == (2, 2, [])
    assert began[0].key == failed.key


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the package may catch it."""


def test_a_killed_training_goes_on_where_it_was_saved(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def counted(*arguments: Any) -> Any:
        steps.append(arguments[4].step)
        return training_step(*arguments)

    def killed_at_the_second(*arguments: Any) -> Any:
        if arguments[4].step == 2:
            raise Killed
        return counted(*arguments)

    training_step = training.training_step
    store, first = JobStore(tmp_path), plan.jobs[0]
    monkeypatch.setattr(training, "training_step", killed_at_the_second)
    with pytest.raises(Killed):
        run_plan(plan, tmp_path)
    assert store.state(first) == "interrupted"
    assert steps == [1]
    monkeypatch.setattr(training, "training_step", counted)
    run_plan(plan, tmp_path)
    assert steps[:2] == [1, 2]  # the first step was not repeated
    complete, _ = run_plan(plan, tmp_path / "complete")
    assert len(complete.done) == 4
    for job in plan.cells.values():
        assert outcome_of(store, job) == outcome_of(JobStore(tmp_path / "complete"), job)


def outcome_of(store: JobStore, job: Job) -> dict[str, Any]:
    found = store.result(job)
    assert found is not None
    outcome: dict[str, Any] = found["outcome"]
    return outcome


@pytest.mark.parametrize("left", ['{"key": "', "{}", '{"key": 3, "outcome": {}}', ""])
def test_a_half_written_result_is_named_and_redone(plan: Plan, tmp_path: Path, left: str) -> None:
    store = JobStore(tmp_path)
    run_plan(plan, tmp_path)
    last = plan.jobs[-1]
    before = outcome_of(store, last)
    store.result_file(last).write_text(left)
    assert store.state(last) == "damaged"
    with pytest.raises(RunError, match=r"result.json is half-written or damaged .* does it again"):
        collect(plan, store)
    again, began = run_plan(plan, tmp_path)
    assert [job.key for job in began] == [last.key]
    assert (len(again.skipped), len(again.done)) == (3, 1)
    assert outcome_of(store, last) == before


def test_a_job_that_another_process_holds_is_left_to_it(plan: Plan, tmp_path: Path) -> None:
    store, first = JobStore(tmp_path), plan.jobs[0]
    with store.lock(first):
        assert store.state(first) == "running"
        outcome, _ = run_plan(plan, tmp_path)
    [(held, why)] = outcome.failed
    assert held.key == first.key
    assert "another process is working on" in why
    assert not store.failure_file(first).exists()
    assert store.state(first) == "waiting"


class Endless:
    """A launcher whose jobs never end by themselves; the last one begun presses Ctrl-C."""

    capacity = 2

    def __init__(self) -> None:
        self.running: list[str] = []
        self.stopped: list[str] = []

    def begin(self, job: Job) -> Handle:
        self.running.append(job.key)
        if len(self.running) == self.capacity:
            os.kill(os.getpid(), signal.SIGINT)
        return Handle(lambda: False, stop=lambda: self.stopped.append(job.key))


def test_a_request_to_stop_reaches_every_running_job(plan: Plan, tmp_path: Path) -> None:
    launcher = Endless()
    with pytest.raises(Interrupted, match="the same command goes on") as stopped:
        run_jobs(plan.jobs, JobStore(tmp_path), launcher)
    assert stopped.value.exit_code == 130
    assert launcher.stopped == launcher.running
    trainings = {job.key for job in plan.jobs if not job.after}
    assert set(launcher.running) == trainings  # a measurement waits for its training


def test_a_training_in_this_process_saves_when_stopped(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return training_step(*arguments)

    training_step = training.training_step
    with monkeypatch.context() as patch:
        patch.setattr(training, "training_step", press)
        with pytest.raises(Interrupted, match="stopped and saved after 0 jobs") as stopped:
            run_plan(plan, tmp_path)
    assert stopped.value.exit_code == 143
    assert JobStore(tmp_path).progress(plan.jobs[0]) == 1
    outcome, _ = run_plan(plan, tmp_path)
    assert len(outcome.done) == 4


def test_jobs_run_in_processes_of_their_own(
    image_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--budget", "tiny", "--seeds", "1", "--rows", "vpn", "--data", image_folder]
    arguments = ["reproduce", "figure-2", *asked, "--output", str(tmp_path), "--json"]
    assert main([*arguments, "--jobs", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["jobs"]["done"] == 2
    [folder, _] = tmp_path.glob("jobs/*/worker.log")
    assert folder.is_file()


def test_jobs_can_be_submitted(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[str] = []

    class Executor:
        def __init__(self, folder: Path, cluster: str, slurm_max_num_timeout: int) -> None:
            assert (cluster, slurm_max_num_timeout) == ("slurm", 20)

        def update_parameters(self, name: str, timeout_min: int, **_: Any) -> None:
            assert timeout_min == 90
            submitted.append(name)

        def submit(self, work: Any) -> Any:
            assert work() == 0
            return types.SimpleNamespace(done=lambda: True)

    fake: Any = types.ModuleType("submitit")
    fake.AutoExecutor = Executor
    monkeypatch.setitem(sys.modules, "submitit", fake)
    launcher = make_launcher(tmp_path, "slurm", 8, SlurmSettings(hours=1.5))
    outcome = run_jobs(plan.jobs, JobStore(tmp_path), launcher)
    assert len(outcome.done) == 4
    assert set(submitted) == {f"vsm-{job.kind}-{job.key}" for job in plan.jobs}


def test_submitting_without_submitit_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SettingsError, match=r"launcher: slurm needs submitit: pip install"):
        make_launcher(tmp_path, "slurm", 1, SlurmSettings())


def test_a_submitted_job_that_runs_out_of_time_saves_and_asks_for_another_turn(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        return training_step(*arguments)

    training_step, first = training.training_step, plan.jobs[0]
    store, asked = JobStore(tmp_path), []
    before = signal.signal(signal.SIGUSR2, lambda number, _: asked.append(number))
    try:
        store.describe(first)
        with monkeypatch.context() as patch:
            patch.setattr(training, "training_step", warn)
            work = SubmittedJob(str(tmp_path), first.key)
            assert work() == 128 + signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert asked == [signal.SIGUSR2]
    assert store.progress(first) == 1
    assert work() == 0
    assert store.state(first) == "done"


def test_a_process_that_dies_without_a_word_is_a_failure(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    launcher = make_launcher(tmp_path, "none", 2, SlurmSettings())
    outcome = run_jobs(plan.jobs, JobStore(tmp_path), launcher)
    assert len(outcome.failed) == len(outcome.blocked) == 2
    assert all("its process ended with code 1; see" in why for _, why in outcome.failed)


# Statistics.


def test_the_interval_over_seeds_and_episodes_equals_a_plain_analysis_of_variance() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(3, 1)) + random.normal(size=(1, 20)) + random.normal(size=(3, 20))
    by_seed, by_episode = values.mean(1), values.mean(0)
    overall = mean(values.flatten().tolist())
    square_seed = 20 * variance(by_seed.tolist())
    square_episode = 3 * variance(by_episode.tolist())
    rest = 0.0
    for s in range(3):
        for e in range(20):
            rest += (values[s, e] - by_seed[s] - by_episode[e] + overall) ** 2
    rest /= 2 * 19
    total = square_seed + square_episode - rest
    assert square_seed > rest
    assert square_episode > rest
    degrees = total**2 / (square_seed**2 / 2 + square_episode**2 / 19 + rest**2 / (2 * 19))
    found = crossed_estimate(torch.from_numpy(values))
    assert found.mean == pytest.approx(overall)
    assert found.ci95 == pytest.approx(student_quantile(degrees) * (total / 60) ** 0.5)


def test_one_seed_leaves_the_interval_over_episodes() -> None:
    values = torch.rand(1, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert crossed_estimate(values) == estimate(values[0])


def test_seeds_that_agree_give_no_narrower_interval_than_one_of_them() -> None:
    values = torch.rand(1, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone, copied = crossed_estimate(values), crossed_estimate(values.expand(4, 50))
    assert copied.ci95 == pytest.approx(alone.ci95, rel=0.03)


def test_the_interval_covers_the_true_mean_about_95_times_in_100() -> None:
    random = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(300):
        seeds, episodes = (torch.randn(shape, generator=random) for shape in ((3, 1), (1, 30)))
        found = crossed_estimate(0.5 * seeds + episodes + torch.randn(3, 30, generator=random))
        covered += abs(found.mean) <= found.ci95
    assert 0.90 <= covered / 300 <= 0.99


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706205), (2, 4.302653), (10, 2.228139), (30, 2.042272), (1000, 1.962339)],
)
def test_students_quantile_is_that_of_printed_tables(degrees: float, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=2e-6)
    assert student_quantile(degrees + 1e-3) <= student_quantile(degrees)


def test_separation_equals_plain_loops() -> None:
    random = torch.Generator().manual_seed(0)
    prototypes = torch.randn(2, 3, 4, 5, generator=random, dtype=torch.float64)
    found = separation(prototypes)
    for e in range(2):
        means = [prototypes[e, n].mean(0) for n in range(3)]
        gaps = [(means[a] - means[b]).norm().item() for a in range(3) for b in range(a)]
        squares, strayed = [], 0
        for n in range(3):
            for sample in prototypes[e, n]:
                squares.append((sample - means[n]).square().sum().item())
                distances = [(sample - middle).norm().item() for middle in means]
                strayed += distances.index(min(distances)) != n
        assert found.distance[e].item() == pytest.approx(mean(gaps))
        assert found.std[e].item() == pytest.approx(mean(squares) ** 0.5)
        assert found.overlap[e].item() == pytest.approx(strayed / 12)


# The report.


def fill(plan: Plan, root: Path, offsets: Mapping[str, int], episodes: int = 6) -> dict[Any, Any]:
    """Write made-up results; return the correct counts by (row, column, seed)."""
    store = JobStore(root)
    remember(store, plan.request)
    random = np.random.default_rng(0)
    shared = random.integers(20, 40, episodes)
    made = {}
    for (row, position, seed), job in plan.cells.items():
        noise = random.integers(-3, 4, episodes)
        made[row, position, seed] = (shared + noise + offsets[row] + position).tolist()
        store.write_result(job, {"correct": made[row, position, seed], "queries": 75}, 1.0)
    return made


def section(text: str, heading: str) -> str:
    return text.split(heading, 1)[1].split("\n#", 1)[0]


def test_the_report_shows_means_over_seeds_and_episodes_beside_the_papers_values(
    tmp_path: Path,
) -> None:
    plan = make_plan(Request("table-1", "tiny", ("glyphs",), seeds=3))
    made = fill(plan, tmp_path, {"protonet": 0, "vpn": 20})
    markdown, _ = write_report(tmp_path)
    text = markdown.read_text(encoding="utf-8")
    part = section(text, "### tiny budget on glyphs")
    header = next(line for line in part.splitlines() if line.startswith("| table-1"))
    assert "glyphs 5-way 1-shot: ours (tiny)" in header
    assert "mini-imagenet 5-way 1-shot: paper" in header
    [line] = [line for line in part.splitlines() if line.startswith("| ProtoNet")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    accuracies = [
        count / 75 for seed in range(3) for count in made["protonet", 0, seed]
    ]  # the oracle
    assert cells[1].startswith(f"{100 * mean(accuracies):.2f} ± ")
    assert cells[2:5] == ["47.40 ± 0.60", "53.31 ± 0.89", "55.50 ± 0.70"]
    assert "glyphs stands in for the paper's data" in part
    assert "3 training seeds, 4 test episodes" in part


def test_the_report_marks_clear_paired_differences_and_only_those(tmp_path: Path) -> None:
    plan = make_plan(Request("table-1", "tiny", ("glyphs",), seeds=3))
    for offset, clear in ((20, True), (0, False)):
        root = tmp_path / str(offset)
        made = fill(plan, root, {"protonet": 0, "vpn": offset})
        differences = difference_table(collect(plan, JobStore(root)))
        assert differences is not None
        [line] = differences.rows
        gaps = [
            (a - b) / 75
            for seed in range(3)
            for a, b in zip(made["vpn", 0, seed], made["protonet", 0, seed], strict=True)
        ]
        assert line[0] == "vpn − protonet"
        assert line[1].startswith(f"{100 * mean(gaps):+.2f} ± ")
        assert line[1].endswith(" *") is clear
        assert line[2] == "+4.71"  # the paper's 52.11 − 47.40


def test_one_seed_is_never_enough_for_a_clear_difference(tmp_path: Path) -> None:
    plan = make_plan(Request("table-1", "tiny", ("glyphs",), seeds=1))
    fill(plan, tmp_path, {"protonet": 0, "vpn": 30})
    found = collect(plan, JobStore(tmp_path)).differences()
    assert all(one.estimate and one.estimate.mean > one.estimate.ci95 for one in found)
    assert not any(one.is_clear for one in found)


def test_budgets_are_never_mixed_in_a_column(tmp_path: Path) -> None:
    for budget in ("tiny", "smoke"):
        plan = make_plan(Request("table-1", budget, ("glyphs",), seeds=2))
        fill(plan, tmp_path, {"protonet": 0, "vpn": 3 if budget == "tiny" else 9})
    text = write_report(tmp_path)[0].read_text(encoding="utf-8")
    assert text.count("## Table 1: ") == 1
    for budget, other in (("tiny", "smoke"), ("smoke", "tiny")):
        part = section(text, f"### {budget} budget on glyphs")
        assert f"ours ({budget})" in part
        assert f"ours ({other})" not in part
        results = collect(
            make_plan(Request("table-1", budget, ("glyphs",), seeds=2)), JobStore(tmp_path)
        )
        assert value_table(results).rows[1][1] in part
    assert section(text, "### tiny budget") != section(text, "### smoke budget")


def test_quoted_rows_show_the_papers_number_and_a_dash_for_ours(tmp_path: Path) -> None:
    plan = make_plan(Request("table-5", "tiny", ("cifar-fs",), seeds=1, rows=("vsm",)))
    fill(plan, tmp_path, {"vsm": 5})
    rows = {row[0]: row[1:] for row in value_table(collect(plan, JobStore(tmp_path))).rows}
    assert rows["MAML"] == ["–", "58.90 ± 1.91", "–", "71.52 ± 1.10"]
    assert rows["PLATIPUS"] == ["–", "–", "–", "–"]
    assert rows["VSM (This paper)"][1] == "63.42 ± 1.90"
    assert "±" in rows["VSM (This paper)"][0]


def test_unfinished_seeds_and_missing_methods_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsm_lab.paper.tables.METHODS", ("protonet", "vsm"))
    plan = make_plan(Request("table-4", "tiny", ("glyphs",), seeds=2))
    fill(plan, tmp_path, {"vsm": 5})
    store = JobStore(tmp_path)
    store.result_file(plan.cells["vsm", 0, 1]).unlink()
    store.result_file(plan.cells["vsm", 1, 0]).unlink()
    store.result_file(plan.cells["vsm", 1, 1]).unlink()
    rows = {row[0]: row for row in value_table(collect(plan, store)).rows}
    assert rows["MANN"][1] == "not available"
    assert rows["Variational semantic memory"][1].endswith("(1 of 2 seeds)")
    assert rows["Variational semantic memory"][5] == "not run yet"
    text = write_report(tmp_path)[0].read_text(encoding="utf-8")
    assert "mann: not available in this version: method mann." in text


def test_differences_pair_only_seeds_that_both_rows_have(tmp_path: Path) -> None:
    plan = make_plan(Request("table-1", "tiny", ("glyphs",), seeds=2))
    made = fill(plan, tmp_path, {"protonet": 0, "vpn": 9})
    store = JobStore(tmp_path)
    store.result_file(plan.cells["vpn", 0, 0]).unlink()
    [first, *_] = collect(plan, store).differences()
    assert first.estimate is not None
    gaps = np.subtract(made["vpn", 0, 1], made["protonet", 0, 1]) / 75
    assert first.estimate.mean == pytest.approx(gaps.mean())


def test_curves_are_drawn_and_kept_beside_the_report(tmp_path: Path) -> None:
    name, rows = "figure-3", ("capacity-4", "slots-0")
    plan = make_plan(Request(name, "tiny", ("glyphs",), seeds=1, rows=rows))
    fill(plan, tmp_path, dict.fromkeys(rows, 4))
    markdown, html = write_report(tmp_path)
    image = tmp_path / "figures" / f"{name}-tiny-glyphs.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert f"(figures/{image.name})" in markdown.read_text(encoding="utf-8")
    assert "data:image/png;base64," in html.read_text(encoding="utf-8")


def test_prototype_distributions_are_measured_and_drawn(plan: Plan, tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    remember(store, plan.request)
    run_plan(plan, tmp_path)
    markdown, _ = write_report(tmp_path)
    text = markdown.read_text(encoding="utf-8")
    assert "overlap (%): ours (tiny)" in text
    assert "vsm − vpn" in text
    assert len(list((tmp_path / "figures").glob("figure-2-*.png"))) == 1


def test_both_forms_of_a_report_hold_the_same_words() -> None:
    blocks: list[Block] = [
        Heading(1, "Title"),
        Text("a < b"),
        Table(["", "x | y"], [["row", "1.00 *"]]),
        Plot("figures/name.png", b"png", "caption"),
    ]
    markdown, page = to_markdown(blocks), to_html("Title", blocks)
    assert "# Title\n\na < b\n\n|  | x \\| y |\n| --- | ---: |\n| row | 1.00 \\* |" in markdown
    assert "![caption](figures/name.png)" in markdown
    assert "<h1>Title</h1>" in page
    assert "<p>a &lt; b</p>" in page
    assert "<td>row</td><td>1.00 *</td>" in page
    assert "data:image/png;base64,cG5n" in page


# The command line.


def vsm(*arguments: str | Path) -> int:
    try:
        return main(["reproduce", *map(str, arguments)])
    except SystemExit as stop:
        return int(str(stop.code))


def test_a_table_is_reproduced_looked_at_and_reported(
    image_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["table-1", "--budget", "tiny", "--seeds", "1", "--data", image_folder]
    output = ["--output", str(tmp_path / "out")]
    assert vsm(*asked, *output) == 0
    captured = capsys.readouterr()
    assert "ProtoNet" in captured.out
    assert "±" in captured.out
    assert "8 of 8 jobs to do" in captured.err
    assert "[8/8] done in " in captured.err
    assert vsm(*asked, *output, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["jobs"] == {"skipped": 8, "done": 0, "failed": [], "blocked": 0}
    [one] = printed["tables"]
    assert [cell["row"] for cell in one["cells"]] == ["protonet", "protonet", "vpn", "vpn"]
    assert all(cell["seeds"] == [0] for cell in one["cells"])
    assert vsm("status", *output, "--json") == 0
    [status] = json.loads(capsys.readouterr().out)["requests"]
    assert status["jobs"]["done"] == 8
    assert vsm("status", *output) == 0
    assert "table-1" in capsys.readouterr().out
    assert vsm("report", *output, "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert "vpn − protonet" in Path(written["markdown"]).read_text(encoding="utf-8")
    assert Path(written["html"]).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_dry_run_shows_the_plan_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "out")]
    assert vsm("table-3", "--budget", "paper", "--seeds", "1", "--dry-run", *output) == 0
    printed = capsys.readouterr().out
    assert "24 of 24 jobs to do; nothing was done" in " ".join(printed.split())
    assert "mini-imagenet is not prepared" in printed
    assert list(tmp_path.iterdir()) == []


def test_all_tables_are_planned_together_and_share_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["all", "--budget", "smoke", "--seeds", "1", "--dry-run", "--json"]
    assert vsm(*asked, "--output", tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    keys = [job["key"] for job in printed["jobs"]]
    assert len(keys) == len(set(keys)) > 50


def test_the_list_names_every_table_and_figure_with_its_rows_and_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert vsm("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["tables"]
    assert [one["name"] for one in listed] == [
        *(f"table-{number}" for number in range(1, 12)),
        *("figure-2", "figure-3"),
    ]
    deep = listed[5]
    assert {one["data"] for one in deep["columns"]} == {"mini-imagenet", "tiered-imagenet"}
    assert deep["backbone"] == "resnet12"
    assert [row["name"] for row in deep["rows"] if row["changes"] is not None] == ["vsm"]
    assert deep["rows"][-1]["cells"][0] == "65.72 ± 0.57"
    assert vsm("list") == 0
    assert "table-11" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tabel-1"], "unknown table or figure 'tabel-1' (did you mean table-1?)"),
        (["table-12"], "(did you mean table-"),
        (["table-2", "--rows", "vms"], "table-2 has no row 'vms' (did you mean vsm?); known: vpn"),
        (["table-5", "--rows", "maml"], "maml of table-5 is only quoted from the paper"),
        (["table-1", "--budget", "big"], "budget: expected one of tiny, smoke, cpu, paper"),
        (["table-1", "--budget", "paper"], "mini-imagenet is not prepared"),
        (["table-1", "--data", "cats"], "unknown dataset 'cats'"),
        (["table-1", "--data", "folder:/nowhere"], "/nowhere"),
        (["table-1", "--seeds", "0"], "seeds: must be at least 1, got 0"),
        (["table-1", "--jobs", "0"], "jobs: must be at least 1, got 0"),
        (["table-6", "--budget", "cpu"], "a deep network takes days on a CPU"),
        (["all", "--rows", "vsm"], "rows: they belong to one table"),
        (["report"], "holds no reproduction; begin one with"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vsm(*arguments) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("vsm reproduce: ")
    assert named in line
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named_in_one_line_and_nothing_is_lost(
    table_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(table_plan, tmp_path, {"protonet": 0, "vpn": 3})
    store = JobStore(tmp_path)
    damaged = store.result_file(table_plan.cells["vpn", 0, 0])
    damaged.write_text("{")
    before = sorted(tmp_path.rglob("*"))
    assert vsm("report", "--output", tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{damaged} is half-written or damaged" in line
    assert vsm("status", "--output", tmp_path) == 0
    assert "damaged: measure vpn" in capsys.readouterr().out
    [request] = (tmp_path / "requests").iterdir()
    request.write_text("{")
    assert vsm("status", "--output", tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is damaged" in line
    assert "no job is lost" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_failed_jobs_are_listed_and_the_exit_code_is_2(
    image_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(execution, "train", fail)
    asked = ["figure-2", "--budget", "tiny", "--seeds", "1", "--data", image_folder]
    assert vsm(*asked, "--output", tmp_path) == 2
    captured = capsys.readouterr()
    assert "2 failed and 2 wait for them; the same command tries again" in captured.err
    assert "[1/4] failed (OSError: no space left): train vpn" in captured.err
    assert vsm("status", "--output", tmp_path) == 0
    assert "failed: train vpn" in capsys.readouterr().out


def test_help_and_list_need_no_torch() -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        "for words in (['--help'], ['table-1', '--help'], ['list']):\n"
        "    try: main(['reproduce', *words])\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"table-11" in done.stdout
    assert b"--dry_run" in done.stdout


def test_every_file_of_settings_is_a_budgets() -> None:
    assert {budget.file for budget in BUDGETS.values() if budget.file} == {
        path.name for path in FOLDER.iterdir()
    }


# Settings without effect are refused, so none may be left in a table.


def test_every_row_of_every_table_is_valid_under_every_budget() -> None:
    seen = set()
    for budget in BUDGETS.values():
        for shown in tables().values():
            for row in shown.measured_rows:
                try:
                    settings = budget.settings(shown, shown.columns[0], row, seed=0)
                except Unavailable:
                    continue
                seen.add((budget.name, settings.inference))
                wanted = {"tiny": 3, "smoke": 20, "cpu": 20, "paper": 150}[budget.name]
                if settings.inference == "network" and settings.method == "vsm":
                    assert settings.sampling.train_memory == wanted
                    kind = "mixture" if budget.name == "paper" else "soft"
                    assert settings.memory.recall == ("gumbel" if row.name == "gumbel" else kind)
                    assert settings.objective.beta_m == (1 if budget.name == "paper" else 1e-3)
    assert seen == {(name, kind) for name in BUDGETS for kind in ("network", "conjugate")}


def test_every_ablation_of_the_preset_is_valid() -> None:
    base = read_settings(RunSettings, *preset_paths("cifar-fs"))
    for name in ("cifar-fs-ablations", "cifar-fs-ablations-network"):
        study = read_study(STUDIES / f"{name}.yaml").settings
        assert isinstance(study, StudySettings)
        for row in study.rows.values():
            assert isinstance(row, dict)
            settings = with_changes(base, {**study.changes, **row}, given=row)
            if settings.inference == "network" and settings.method == "vsm":
                assert settings.sampling.train_memory == row.get("sampling.train_memory", 20)
                assert settings.sampling.evaluation_memory == 50
