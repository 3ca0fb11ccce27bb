"""Speed benchmarks: alternation, pairs, the reference, and processes that end."""

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tiny import RecordedProgress
from vsm.classify import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.cli import main
from vsm.data import EpisodeSampler, ImageDataset
from vsm.errors import BenchmarkError
from vsm.evaluation.evaluator import evaluate
from vsm.model import FewShotModel
from vsm.settings import METHODS, KanervaSettings
from vsm.system.interruption import Interrupted, StopRequest
from vsm_lab.benchmarking import processes, suite
from vsm_lab.benchmarking import runner as runner_module
from vsm_lab.benchmarking.benchmarks import (
    backbone_pass,
    build_model,
    classifier,
    consolidation,
    episode_images,
    recall,
    training_step,
)
from vsm_lab.benchmarking.processes import Timed, Worker
from vsm_lab.benchmarking.reference import (
    ReferenceConv4,
    channels_first,
    reference_accuracies,
    reference_loss,
    reference_steps,
)
from vsm_lab.benchmarking.runner import BenchmarkRunner
from vsm_lab.benchmarking.suite import (
    Group,
    Sizes,
    full_suite,
    interleave,
    quartiles,
    summarize,
)
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import Job
from vsm_lab.launchers import InProcess, run_jobs
from vsm_lab.provenance import measured_code

TINY: dict[str, Any] = {
    "channels": 2,
    "tasks": 2,
    "way": 3,
    "queries": 2,
    "memory_samples": 3,
    "prototype_samples": 2,
    "remembered": 6,
}
TINY_SIZES = Sizes(**TINY)
TINY_EVALUATION = {**TINY, "way": 2, "episodes": 3}
TINY_CLASSIFIER: dict[str, Any] = {"model": "glyphs-5w1s", "way": 2, "shot": 2, "queries": 3}
SMALLER: dict[str, dict[str, Any]] = {
    "evaluation": TINY_EVALUATION,
    "reference_evaluation": TINY_EVALUATION,
    "pretraining_step": {"channels": 2, "images": 4, "classes": 3},
    "classifier": TINY_CLASSIFIER,
}
"""Arguments that make the benchmarks of the full suite fast."""


def tiny(group: Group) -> Group:
    """Return a group that takes little time, with the same names."""
    ours, reference = (
        {
            name: (call, {**sizes, **SMALLER.get(call, TINY)})
            for name, (call, sizes) in calls.items()
        }
        for calls in (group.ours, group.reference)
    )
    rounds = 1 if "evaluation" in group.title else 2
    return replace(group, ours=ours, reference=reference, rounds=rounds, warm_up=0, processes=1)


SIZES = (28, 32, 84)


def reference_of(model: FewShotModel, sizes: Sizes) -> ReferenceConv4:
    """Return the reference backbone with the weights of ours."""
    reference = ReferenceConv4(sizes.image_shape, sizes.channels)
    reference.load_state_dict(model.require_backbone().state_dict())
    return reference


# Turns, pairs and quartiles


def test_benchmarks_alternate_in_every_round() -> None:
    done: list[str] = []

    def noting(name: str) -> Callable[[], float]:
        def benchmark() -> float:
            done.append(name)
            return float(len(done))

        return benchmark

    times = interleave({"a": noting("a"), "b": noting("b")}, rounds=3)
    assert done == ["a", "b"] * 3
    assert times == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_no_round_begins_after_the_time_is_up_but_the_first() -> None:
    progress = RecordedProgress()
    times = interleave({"a": lambda: 1.0}, 5, deadline=0.0, progress=progress)
    assert times == {"a": [1.0]}
    assert [done for _, done, _ in progress.shown] == [1]


def test_no_benchmark_begins_once_the_process_was_asked_to_stop() -> None:
    stop, done = StopRequest(), list[str]()

    def benchmark() -> float:
        done.append("benchmark")
        stop.signal_number = signal.SIGTERM
        return 1.0

    with pytest.raises(Interrupted) as stopped:
        interleave({"a": benchmark, "b": benchmark}, 3, stop=stop)
    assert (done, stopped.value.exit_code) == (["benchmark"], 143)


def test_quartiles_are_those_of_the_sorted_values_with_the_median() -> None:
    found = quartiles([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert quartiles([7.0]).describe(1) == "7.0 (7.0 … 7.0)"


def test_a_ratio_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    times = {"above": [1.0, 4.0, 30.0], "below": [2.0, 1.0, 10.0]}
    name, group = "classifying_vs_embedding", Group("group", {})
    one = replace(group, ratios={name: ("above", "below")}, suffix="_1")
    other = replace(group, ratios={name: ("below", "above")}, suffix="_2")
    found = summarize([(one, times), (other, times)])
    inverse = statistics.median([2, 1 / 4, 1 / 3])
    assert found["ratios"] == {f"{name}_1": 3.0, f"{name}_2": inverse, name: 3.0}
    assert found["milliseconds"]["above_1"]["median"] == 4000
    quarters = {"low": 1.75, "median": 3.0, "high": 3.5, "count": 3}
    assert found["quartiles"][f"{name}_1"] == quarters


# What is timed


@pytest.mark.parametrize("size", SIZES)
def test_the_reference_computes_the_loss_of_our_protonet_on_the_same_weights(size: int) -> None:
    sizes = replace(TINY_SIZES, image_size=size)
    model, images = build_model(sizes, "protonet"), episode_images(sizes)
    theirs = reference_loss(reference_of(model, sizes), channels_first(images), sizes.shot)
    step: Any = training_step("protonet", **asdict(sizes))
    torch.testing.assert_close(theirs.item(), step()["loss"], rtol=1e-4, atol=1e-5)


def test_the_reference_trains_one_task_at_a_time() -> None:
    steps: Any = reference_steps(**TINY)
    first = steps()
    assert len(first) == TINY_SIZES.tasks
    for _ in range(5):
        last = steps()
    assert sum(last) < sum(first)


def test_the_evaluation_of_the_reference_equals_ours_on_the_same_weights(
    tiny_dataset: ImageDataset,
) -> None:
    sizes = replace(TINY_SIZES, channels=4)
    model = build_model(sizes, "protonet", image_shape=tiny_dataset.image_shape)
    sampler = EpisodeSampler(tiny_dataset, "test", 5, 2, 3)
    [drawn] = sampler.evaluation_episodes(8, seed=0)
    episodes = channels_first(tiny_dataset.normalize(tiny_dataset.load(drawn.image_ids)))
    theirs = reference_accuracies(reference_of(model, sizes), episodes, shot=2)
    ours = evaluate(model, None, sampler, 8, seed=0).episode_accuracies
    assert theirs == pytest.approx(ours.tolist())
    assert len(set(theirs)) > 1


@pytest.mark.parametrize("size", SIZES)
def test_the_reference_computes_in_the_default_layout_and_we_channels_last(size: int) -> None:
    sizes = replace(TINY_SIZES, image_size=size)
    model, images = build_model(sizes, "protonet"), episode_images(sizes)
    backbone: Any = model.backbone
    ours = layouts(backbone, backbone.blocks, images.flatten(0, 2))
    reference = reference_of(model, sizes)
    theirs = layouts(reference, reference.blocks, channels_first(images).flatten(0, 2))
    assert set(ours) == {"channels last"}
    assert set(theirs) == {"default"}


def layouts(network: nn.Module, blocks: Any, images: Tensor) -> list[str]:
    """Return in which memory layout each block's convolution writes its result."""
    found: list[str] = []

    def note(_: nn.Module, __: Any, maps: Tensor) -> None:
        last = maps.is_contiguous(memory_format=torch.channels_last)
        assert last != maps.is_contiguous()
        found.append("channels last" if last else "default")

    hooks = [block[0].register_forward_hook(note) for block in blocks]
    network(images)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_every_method_learns_and_keeps_what_is_remembered(method: Any) -> None:
    step: Any = training_step(method, **TINY)
    measured = [step() for _ in range(3)]
    assert all(0 < one["loss"] < float("inf") for one in measured)
    slots = {"kanerva": KanervaSettings().slots}.get(method, TINY_SIZES.remembered)
    assert all(one.get("slots", slots) == slots for one in measured)


def test_the_bare_backbone_is_the_one_inside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights, same images, same layout."""
    met: list[tuple[Tensor, dict[str, Tensor], tuple[int, ...]]] = []
    original = FewShotModel.__init__

    def watched(self: FewShotModel, *arguments: Any) -> None:
        original(self, *arguments)

        def note(network: nn.Module, images: tuple[Tensor, ...]) -> None:
            weights = {name: value.clone() for name, value in network.named_parameters()}
            met.append((images[0], weights, images[0].stride()))

        self.require_backbone().register_forward_pre_hook(note)

    monkeypatch.setattr(FewShotModel, "__init__", watched)
    for benchmark in (training_step("vsm", **TINY), backbone_pass(**TINY)):
        benchmark()
    for images, weights, strides in met[1:]:
        torch.testing.assert_close(images, met[0][0])
        torch.testing.assert_close(weights, met[0][1])
        assert strides == met[0][2]


def test_recall_and_consolidation_meet_the_memory_they_are_asked_for() -> None:
    sizes = {**TINY, "remembered": 50}
    recollect: Any = recall(**sizes)
    assert recollect().weights.shape == (2, 3, 50)
    consolidate: Any = consolidation(**sizes)
    updated = consolidate()
    assert len(updated) == 50
    assert (updated.counts > 1).sum() <= 2 * 3
    recall(gradient=True, **sizes)()


def test_the_benchmarks_of_a_classifier_use_the_same_images() -> None:
    tasks = ("embed_images", "fit_and_predict", "predict", "explain")
    found: list[Any] = [classifier(task, **TINY_CLASSIFIER)() for task in tasks]
    (examples, queries), answers, probabilities, explained = found
    assert (len(examples), len(queries)) == (2 * 2, 3)
    labels = ["class 0", "class 0", "class 1", "class 1"]
    fitted = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(Embedded(examples), labels)
    expected = fitted.predict(Embedded(queries)).tolist()
    assert answers.tolist() == expected == [one.prediction for one in explained]
    assert probabilities == pytest.approx(fitted.predict_proba(Embedded(queries)), abs=1e-5)


# Processes


@pytest.fixture(scope="module")
def process() -> Iterator[Worker]:
    with Worker(keep_allocations=False, threads=1) as running:
        yield running


def test_a_worker_times_benchmarks_and_describes_itself(process: Worker) -> None:
    assert process.metadata["torch"] == torch.__version__
    assert process.metadata["threads"] == 1
    assert process.metadata["keeps_allocations"] is False
    calls = {
        "step": ("training_step", {"method": "vsm", **TINY}),
        "backbone": ("backbone_pass", TINY),
    }
    times = interleave(process.prepare(calls), rounds=2)
    assert times.keys() == calls.keys()
    assert all(seconds > 0 for values in times.values() for seconds in values)


def test_a_mistake_in_a_worker_is_one_line_and_not_its_end(process: Worker) -> None:
    with pytest.raises(BenchmarkError, match=r"cats"):
        process.prepare({"one": ("classifier", {"task": "predict", "model": "cats", "queries": 1})})
    assert process.prepare({"one": ("backbone_pass", TINY)})["one"]() > 0


def test_a_worker_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = (
        "import pickle, sys\n"
        "while True: pickle.dump(pickle.load(sys.stdin.buffer), sys.stdout.buffer)\n"
    )
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-u", "-c", answers))
    with Worker(keep_allocations=False) as dying:
        benchmark = dying.prepare({"one": ("backbone_pass", TINY)})["one"]
        os.kill(dying.process_id, signal.SIGKILL)
        with pytest.raises(BenchmarkError, match=r"died \(signal 9, out of memory\?\) in run"):
            benchmark()


def test_a_worker_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(BenchmarkError, match=r"died \(exit code 3\) in begin"):
        Worker(keep_allocations=True)


def test_only_a_default_allocator_forgets_how_glibc_was_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    reply = (
        "import os, pickle, sys; pickle.load(sys.stdin.buffer)\n"
        "pickle.dump({'arenas': os.environ.get('MALLOC_ARENA_MAX')}, sys.stdout.buffer)"
    )
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", reply))
    with Worker(keep_allocations=True) as kept, Worker(keep_allocations=False) as default:
        assert kept.metadata == {"arenas": "7"}
        assert default.metadata == {"arenas": None}


def children_of(process_id: int) -> set[int]:
    """Return the ids of a process's children, those that ended without being asked excluded."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if int(parent) == process_id and state != "Z":
            found.add(int(status.parent.name))
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HEEDING = """
import signal, sys
from vsm_lab.benchmarking import processes
from vsm.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1]:
    processes.COMMAND = (sys.executable, "-c", sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""
"""A shell lets what it starts in the background ignore interrupts, so they are handled again."""
BUSY_WORKER = """
import sys, time
from unittest.mock import MagicMock

heavy = ["torch", "vsm.system.allocator"]
heavy += [f"vsm_lab.benchmarking.{name}" for name in ("benchmarks", "reference")]
sys.modules.update({name: MagicMock() for name in heavy})
from vsm_lab.benchmarking import runner

class BusyRunner:
    begin = lambda *_: {}
    prepare = lambda *_: 0
    run = lambda self, places: time.sleep(0.1) or [0.1] * len(places)

runner.BenchmarkRunner = BusyRunner
runner.main()
"""
"""A worker that is always busy, but without torch, whose import takes seconds."""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "worker"),
    [(signal.SIGINT, BUSY_WORKER), (signal.SIGTERM, BUSY_WORKER), (signal.SIGKILL, "")],
    ids=["SIGINT", "SIGTERM", "SIGKILL with real workers"],
)
def test_a_benchmark_that_is_stopped_leaves_no_process_behind(
    number: signal.Signals, worker: str
) -> None:
    words = ["bench", "--repeats", "1000", "--channels", "2"]
    command = [sys.executable, "-c", HEEDING, worker, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as bench:
        wait_until(lambda: len(children_of(bench.pid)) == 2)
        workers = children_of(bench.pid)
        bench.send_signal(number)
        code = bench.wait(60)
    assert code == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


# Everything together


class NotingWorker:
    """Runs benchmarks in this process; notes what each process would prepare and run."""

    made: ClassVar[list["NotingWorker"]] = []

    def __init__(self, keep_allocations: bool, threads: int | None) -> None:
        self.keeps, self.prepared, self.done = keep_allocations, list[str](), list[str]()
        self.made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, calls: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Timed]:
        return {name: self.prepare_one(*call) for name, call in calls.items()}

    def prepare_one(self, name: str, arguments: dict[str, Any]) -> Timed:
        self.prepared.append(name)
        runner = BenchmarkRunner()
        runner.prepare(name, arguments)

        def run() -> float:
            self.done.append(name)
            return runner.run([0])[0]

        return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> JobStore:
    return JobStore(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return [tiny(group) for group in full_suite()]


@pytest.fixture(scope="module")
def jobs(groups: list[Group]) -> list[Job]:
    return suite.speed_jobs(groups)


@pytest.fixture(scope="module")
def results(jobs: list[Job], store: JobStore) -> dict[str, Any]:
    NotingWorker.made.clear()
    with mock.patch("vsm_lab.benchmarking.suite.Worker", NotingWorker):
        outcome = run_jobs(jobs, store, InProcess(store.root))
    assert outcome.failed == []
    return suite.collect_results(jobs, store)


PROMISED_RATIOS = {
    *(f"vsm_step_vs_backbone_{size}" for size in SIZES),
    *(
        "vsm_step_vs_reference_protonet",
        "vsm_step_vs_reference_protonet_28",
        "vsm_step_vs_reference_protonet_32",
    ),
    *("backbone_vs_reference_protonet_28", "backbone_vs_reference_protonet_32"),
    *("vsm_conjugate_step_vs_reference_protonet_28", "vsm_conjugate_step_vs_reference_protonet_32"),
    *("evaluation_2k_vs_reference_600", "evaluation_2k_vs_reference_600_1shot"),
    "evaluation_2k_vs_reference_600_5shot",
    *("classifying_vs_embedding", "classifying_vs_embedding_glyphs-5w1s_100"),
    *("explaining_vs_predicting", "explaining_vs_predicting_photos-vsm_75"),
    "pretraining_bfloat16_vs_float32",
    "using_together_vs_embedding",
}


def test_results_have_the_promised_ratios_and_each_is_the_median_of_its_pairs(
    results: dict[str, Any],
) -> None:
    found, spans = results["ratios"], results["quartiles"]
    assert set(found) >= PROMISED_RATIOS
    assert set(found) == set(spans)
    for name, ratio in found.items():
        assert 0 < spans[name]["low"] <= ratio == spans[name]["median"] <= spans[name]["high"]
        assert spans[name]["count"] == (1 if "evaluation" in name else 2)
    assert {f"recall_{slots}" for slots in (100, 100_000)} <= results["milliseconds"].keys()
    sizes = [found[f"vsm_step_vs_reference_protonet_{size}"] for size in (28, 32)]
    assert found["vsm_step_vs_reference_protonet"] == max(sizes)
    shots = [found[f"evaluation_2k_vs_reference_600_{shot}shot"] for shot in (1, 5)]
    assert found["evaluation_2k_vs_reference_600"] == max(shots)


@pytest.mark.usefixtures("results")
def test_a_process_in_which_the_reference_trains_does_nothing_else() -> None:
    training = [one for one in NotingWorker.made if "reference_steps" in one.prepared]
    assert all(one.prepared == ["reference_steps"] and not one.keeps for one in training)
    assert len(training) == 2  # sizes of images


def test_warming_up_does_not_count_and_processes_of_the_reference_share_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[NotingWorker]()
    monkeypatch.setattr(NotingWorker, "made", made)
    monkeypatch.setattr("vsm_lab.benchmarking.suite.Worker", NotingWorker)
    reference, ours = (
        {"theirs": ("reference_steps", TINY)},
        {"ours": ("backbone_pass", TINY)},
    )
    group = Group("group", ours, reference, rounds=3, warm_up=4, processes=2)
    times = group.measure()
    assert {name: len(values) for name, values in times.items()} == {"ours": 3, "theirs": 3}
    assert [one.done for one in made] == [
        ["backbone_pass"] * (4 + 3),
        ["reference_steps"] * (2 + 2),
        ["reference_steps"] * (2 + 1),
    ]


def test_results_have_times_and_the_machine_but_not_whose_machine(
    results: dict[str, Any],
) -> None:
    assert all(one["median"] > 0 for one in results["milliseconds"].values())
    assert results["machine"]["torch"] == torch.__version__
    assert results["machine"]["cores"] >= 1
    written = json.dumps(results)
    assert os.uname().nodename not in written
    assert str(Path.home()) not in written
    assert str(Path.cwd()) not in written


def test_results_are_written_as_json_and_a_page(results: dict[str, Any], tmp_path: Path) -> None:
    suite.write_results(results, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == results
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in (*results["quartiles"], *results["milliseconds"]))
    assert "≤ 1.35" in page


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    stored = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    page = suite.write_results(stored, tmp_path)
    assert page.read_bytes() == (folder / page.name).read_bytes()


# One engine: jobs, their store, and what names them


def pretend_to_measure(monkeypatch: pytest.MonkeyPatch, fail_after: int = 1000) -> list[Group]:
    """Run no benchmark; return what was measured, and stop by a signal after so many groups."""
    measured: list[Group] = []

    def measure(group: Group, stop: StopRequest) -> dict[str, list[float]]:
        if len(measured) == fail_after:
            signal.raise_signal(signal.SIGINT)
            raise Interrupted(stop.signal_number or 0, "stopped")
        measured.append(group)
        return {name: [1.0 + len(measured)] for name in (*group.ours, *group.reference)}

    monkeypatch.setattr(Group, "measure", measure)
    return measured


def test_a_benchmark_that_is_stopped_goes_on_from_what_was_measured(
    groups: list[Group], jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, launcher = JobStore(tmp_path), InProcess(tmp_path)
    first = pretend_to_measure(monkeypatch, fail_after=4)
    with pytest.raises(Interrupted, match="stopped and saved after 4 jobs; the same command goes"):
        run_jobs(jobs, store, launcher)
    left = len(jobs) - 4
    assert [store.state(job) for job in jobs] == ["done"] * 4 + ["waiting"] * left
    kept = [store.outcome(job) for job in jobs[:4]]
    second = pretend_to_measure(monkeypatch)
    outcome = run_jobs(jobs, store, launcher)
    assert (len(outcome.skipped), len(outcome.done), outcome.failed) == (4, left, [])
    assert first + second == groups
    assert [store.outcome(job) for job in jobs[:4]] == kept
    assert suite.collect_results(jobs, store)["ratios"].keys() >= PROMISED_RATIOS


@pytest.mark.parametrize(
    "changed",
    [
        {"machine": {"cores": 3}},
        {"machine": {"vector_instructions": "AVX1024"}},
        {"machine": {"threads": 7}},
        {"machine": {"torch": "0.4"}},
        {"commit": "another"},
        {"source": "edited since"},
    ],
)
def test_times_of_another_machine_or_commit_are_not_reused(
    changed: dict[str, Any],
    groups: list[Group],
    jobs: list[Job],
    results: dict[str, Any],
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"commit": jobs[0].recipe["commit"], "source": jobs[0].recipe["source"]}
    machine = results["machine"]
    monkeypatch.setattr(suite, "describe_machine", lambda _: machine)
    monkeypatch.setattr(suite, "measured_code", lambda: here)
    assert all(store.is_done(job) for job in suite.speed_jobs(groups))
    there = {**here, **{k: v for k, v in changed.items() if k != "machine"}}
    elsewhere = {**machine, **changed.get("machine", {})}
    monkeypatch.setattr(suite, "describe_machine", lambda _: elsewhere)
    monkeypatch.setattr(suite, "measured_code", lambda: there)
    assert not any(store.is_done(job) for job in suite.speed_jobs(groups))


def test_nothing_is_timed_while_another_process_times(jobs: list[Job], tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with store.timing_lock():
        outcome = run_jobs(jobs[:1], store, InProcess(tmp_path))
    [(_, why)] = outcome.failed
    assert why.startswith("another process is timing for")


def test_bench_full_writes_a_page_and_measures_again_only_when_asked(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "describe_machine", lambda _: jobs[0].recipe["machine"])
    measured = pretend_to_measure(monkeypatch)
    for words, total in (([], 1), ([], 1), (["--again"], 2)):
        with redirect_stdout(io.StringIO()) as output:
            assert main(["bench", "--full", "--output", str(tmp_path), "--json", *words]) == 0
        assert len(measured) == total * len(jobs)
        assert json.loads(output.getvalue()).keys() == {
            *("ratios", "quartiles", "milliseconds", "machine", "commit"),
        }
    assert (tmp_path / "results.md").is_file()


def test_the_measured_code_is_known_by_its_commit_and_a_hash() -> None:
    found = measured_code()
    assert len(found["source"] or "") == 64
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) == 40


def test_every_target_is_a_promised_ratio() -> None:
    assert set(suite.TARGETS) <= PROMISED_RATIOS


@pytest.fixture(scope="module")
def printed_json() -> str:
    """What a short ``vsm bench --json`` prints."""
    with redirect_stdout(io.StringIO()) as output:
        arguments = ["--channels", "2", "--repeats", "1", "--threads", "1", "--json"]
        assert main(["bench", *arguments]) == 0
    return output.getvalue()


def test_bench_prints_one_json_object(printed_json: str) -> None:
    [line] = printed_json.splitlines()
    printed = json.loads(line)
    assert set(printed["ratios"]) == {
        *("vsm_step_vs_backbone", "vsm_conjugate_step_vs_backbone"),
        *(
            f"{name}_vs_reference_protonet"
            for name in ("vsm_step", "vsm_conjugate_step", "backbone")
        ),
    }
    for name, found in printed["quartiles"].items():
        assert 0 < found["low"] <= printed["ratios"][name] == found["median"] <= found["high"]
        assert found["count"] == 1
    assert printed["machine"]["threads"] == 1
    assert printed["workload"] == asdict(Sizes(channels=2))


def test_bench_prints_a_table_for_people(
    printed_json: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads(printed_json)
    monkeypatch.setattr("vsm_lab.benchmarking.suite.measure_briefly", lambda *_: result)
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    for name, ratio in result["ratios"].items():
        assert re.search(rf"{name} .* {ratio:.2f} \(", printed)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--repeats", "0"], "repeats: must be at least 1, got 0"),
        (["--threads", "0"], "threads: must be at least 1, got 0"),
        (["--full", "--repeats", "3"], "repeats: has no meaning with --full"),
        (["--again"], "again: has no meaning without --full"),
    ],
)
def test_mistakes_are_named_with_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"vsm bench: {named}\n"


def test_asking_for_help_or_planning_needs_no_torch() -> None:
    script = (
        "import sys; from vsm.cli import main\n"
        "import vsm_lab.benchmarking.suite\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--repeats" in done.stdout


def test_benchmarks_of_one_process_alternate_call_by_call() -> None:
    runner, calls = BenchmarkRunner(), list[str]()

    def noting(name: str, seconds: float) -> Callable[[], None]:
        def benchmark() -> None:
            calls.append(name)
            time.sleep(seconds)

        return benchmark

    with mock.patch.object(runner_module, "find", return_value=noting):
        places = [
            runner.prepare("noting", {"name": name, "seconds": seconds})
            for name, seconds in (("slow", 0.02), ("fast", 0.005))
        ]
    slow, fast = runner.run(places)
    assert calls == ["slow", "fast"] * (len(calls) // 2)
    assert len(calls) > 2
    assert slow >= 0.02 > fast >= 0.005


def test_benchmarks_of_one_process_are_measured_in_one_call(process: Worker) -> None:
    asked: list[str] = []

    def call(method: str, *arguments: Any) -> Any:
        asked.append(method)
        return [float(len(asked)), -1.0] if method == "run" else 0

    with mock.patch.object(process, "call", call):
        timed = process.prepare({"a": ("training_step", TINY), "b": ("backbone_pass", TINY)})
        times = interleave(timed, rounds=2)
    assert asked == ["prepare", "prepare", "run", "run"]
    assert times == {"a": [3.0, 4.0], "b": [-1.0, -1.0]}


def test_benchmarks_draw_memories_with_the_network_alone() -> None:
    sizes = replace(TINY_SIZES, memory_samples=7)
    assert build_model(sizes, "vsm").settings.sampling.train_memory == 7
    assert build_model(sizes, "vsm", "conjugate").settings.sampling.train_memory == 150
