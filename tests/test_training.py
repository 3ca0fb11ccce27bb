"""Training: it learns, memory grows and is taught, and nothing is lost by stopping."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from run_helpers import assert_same_run, power_cut_at, rows, signal_at, train_run
from tiny import RecordedProgress, variant
from vsm.data import EpisodeSampler, ImageDataset
from vsm.data.images import Preprocessing
from vsm.errors import RunError
from vsm.evaluation.calibration import Calibration
from vsm.evaluation.evaluator import evaluate
from vsm.memory import MEMORIES, SlotConsolidation, SlotMemory
from vsm.memory.slots.recall import VariationalRecall
from vsm.model import FewShotModel
from vsm.runs.checkpoints import TrainingState, apply_pending
from vsm.runs.directory import RunDirectory
from vsm.runs.loading import Checkpoint, load
from vsm.runs.trained_model import save_best
from vsm.seeding import generator
from vsm.settings import (
    METHODS,
    MannSettings,
    MemorySettings,
    Method,
    OptimizerSettings,
    RunSettings,
)
from vsm.system.interruption import Interrupted
from vsm.system.tensor_files import load_tensors, save_tensors
from vsm.training import (
    build_optimizer,
    load_inputs,
    set_learning_rate,
    training_step,
)


@pytest.fixture(autouse=True)
def _tiny_data(monkeypatch: pytest.MonkeyPatch, tiny_dataset: ImageDataset) -> None:
    monkeypatch.setattr("vsm.training.open_dataset", lambda name: tiny_dataset)


FILES = ("model.safetensors", "memory.safetensors", "calibration.json", "resume.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_a_directory_that_loads(
    method: Method, tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, method=method)
    run = train_run(settings, tmp_path / "run")
    assert run.settings() == settings
    trained = load(run.path)
    assert trained.settings == settings
    assert not trained.model.training
    assert run.memory.exists() == settings.uses_memory
    if settings.uses_memory:
        assert trained.memory is not None
        memory, names = trained.memory.memory, tiny_dataset.class_names
        assert len(memory) > 3
        assert trained.memory.names == tuple(names[i] for i in memory.slot_classes)
        assert not any(part.requires_grad for part in memory.tensors().values())
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    evaluate(trained.model, trained.state, sampler, 3, 0)


@pytest.mark.parametrize("method", ["protonet", "vsm", "rote", "mann", "kanerva"])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    method: Method, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, method=method, steps=8)
    if method == "mann":
        settings = replace(settings, mann=MannSettings(slots=16, width=8, controller_units=16))
    train_run(settings, tmp_path / "whole")
    for stop_at in (1, 3, 4):
        parts = tmp_path / f"stopped-at-{stop_at}"
        told = f"stopped and saved at step {stop_at} of 8"
        with pytest.raises(Interrupted, match=told) as stopped:
            train_run(settings, parts, progress=signal_at(stop_at))
        assert stopped.value.exit_code == 130
        train_run(settings, parts, resume=True)
        assert_same_run(tmp_path / "whole", parts, *FILES)


def test_a_refreshed_memory_holds_features_as_they_are_at_test(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    memory = replace(tiny_settings.memory, refresh_steps=3)
    run = train_run(variant(tiny_settings, memory=memory), tmp_path / "run")
    trained = load(run.path)
    model, stored = trained.model, trained.state
    assert isinstance(stored, SlotMemory)
    sampler = EpisodeSampler(
        tiny_dataset, "train", tiny_settings.way, tiny_settings.shot, tiny_settings.queries
    )
    content: dict[int, torch.Tensor] = {}
    for step in (1, 2, 3):
        batch = sampler.draw(tiny_settings.tasks, generator(tiny_settings.seed, "refresh", step))
        features: dict[int, list[torch.Tensor]] = {}
        for images, classes in zip(batch.image_ids, batch.class_ids, strict=True):
            for ids, class_id in zip(images, classes.tolist(), strict=True):
                with torch.no_grad():
                    seen = model.eval().embed(tiny_dataset.normalize(tiny_dataset.load(ids)))
                features.setdefault(class_id, []).append(seen)
        for class_id, parts in features.items():
            nodes = torch.cat(parts)
            if class_id not in content:
                content[class_id] = nodes.mean(0)
                continue
            consolidation, old = model.consolidation, content[class_id]
            assert isinstance(consolidation, SlotConsolidation)
            nodes = torch.cat([old.unsqueeze(0), nodes])
            scores = old @ consolidation.attention_memory + nodes @ consolidation.attention_sample
            weights = torch.nn.functional.leaky_relu(scores, 0.2).softmax(0)
            new = weights @ nodes
            content[class_id] = (memory.retention * old + (1 - memory.retention) * new).detach()
    assert set(stored.slot_classes) == set(content)
    for slot, class_id in enumerate(stored.slot_classes):
        torch.testing.assert_close(stored.content[slot], content[class_id])


def test_refreshing_leaves_the_run_as_it_was(tiny_settings: RunSettings, tmp_path: Path) -> None:
    train_run(tiny_settings, tmp_path / "plain")
    memory = replace(tiny_settings.memory, refresh_steps=2)
    train_run(variant(tiny_settings, memory=memory), tmp_path / "refreshed")
    losses = [
        [row["loss"] for row in rows(tmp_path / name) if "loss" in row]
        for name in ("plain", "refreshed")
    ]
    assert losses[0] == losses[1]
    stored = [
        (tmp_path / name / "memory.safetensors").read_bytes() for name in ("plain", "refreshed")
    ]
    assert stored[0] != stored[1]


def test_termination_is_honored_too(tiny_settings: RunSettings, tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as stopped:
        train_run(tiny_settings, tmp_path / "run", progress=signal_at(2, signal.SIGTERM))
    assert stopped.value.exit_code == 143


def test_progress_counts_all_steps_and_tells_of_every_validation(
    tiny_settings: RunSettings, tmp_path: Path
) -> None:
    before, after = RecordedProgress(), RecordedProgress()
    with pytest.raises(Interrupted):
        train_run(tiny_settings, tmp_path / "run", progress=signal_at(4))
    train_run(tiny_settings, tmp_path / "whole", progress=before)
    train_run(tiny_settings, tmp_path / "run", resume=True, progress=after)
    assert before.shown == [("vsm", step, 6) for step in range(7)]
    assert after.shown == [("vsm", step, 6) for step in range(4, 7)]
    assert [text.split(":")[0] for text in before.messages] == ["step 3", "step 6"]
    assert before.messages[0].endswith("(best so far)")
    assert after.messages == before.messages[1:]


def test_signal_handlers_are_put_back(tiny_settings: RunSettings, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    train_run(tiny_settings, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_crash_after_a_checkpoint_repeats_the_lost_steps_exactly(
    tiny_settings: RunSettings, tmp_path: Path
) -> None:
    settings = variant(tiny_settings, steps=14)
    train_run(settings, tmp_path / "whole")
    with pytest.raises(OSError, match="power cut"):
        # The last checkpoint is of step 10, and so is the last log line.
        train_run(settings, tmp_path / "parts", progress=power_cut_at(11))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "half a li')
    train_run(settings, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", *FILES)


def test_resuming_a_finished_run_changes_nothing(
    tiny_settings: RunSettings, tmp_path: Path
) -> None:
    train_run(tiny_settings, tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    train_run(tiny_settings, tmp_path / "run", resume=True)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == before


@pytest.mark.parametrize("stopped", [True, False])
def test_a_finished_run_goes_on_to_a_better_model_and_is_calibrated_anew(
    stopped: bool, tiny_settings: RunSettings, tmp_path: Path
) -> None:
    quick = OptimizerSettings(learning_rate=5e-3, schedule="constant")
    settings = variant(tiny_settings, tasks=4, steps=3, optimizer=quick)
    run = train_run(settings, tmp_path / "run")
    before = run.calibration.read_text()
    longer = replace(settings, steps=24)
    if stopped:  # of the better model nothing was measured yet
        with pytest.raises(Interrupted):
            train_run(longer, run.path, resume=True, progress=signal_at(23))
        assert load(run.path).step > 3
        assert load(run.path).calibration == Calibration()
    train_run(longer, run.path, resume=True)
    trained = load(run.path)
    assert trained.step > 3
    assert trained.thresholds() == trained.calibration.thresholds
    assert run.calibration.read_text() != before


def test_an_existing_run_is_not_overwritten(tiny_settings: RunSettings, tmp_path: Path) -> None:
    train_run(tiny_settings, tmp_path / "run")
    with pytest.raises(RunError, match=r"already holds a run; go on with --resume, replace it"):
        train_run(tiny_settings, tmp_path / "run")


def step_through(
    settings: RunSettings, dataset: ImageDataset, num_steps: int
) -> tuple[FewShotModel, TrainingState, list[dict[str, float]]]:
    model = FewShotModel(settings, dataset.image_shape)
    optimizer = build_optimizer(model, settings.optimizer)
    sampler = EpisodeSampler(dataset, "train", settings.way, settings.shot, settings.queries)
    state = TrainingState(0, model.empty_memory(), None)
    measured = []
    for step in range(1, num_steps + 1):
        state.step = step
        batch = sampler.draw(settings.tasks, torch.Generator().manual_seed(step))
        inputs = load_inputs(dataset, batch, settings, step)
        measured.append(training_step(model, optimizer, inputs, batch.class_ids, state))
    return model, state, measured


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss(
    method: Method, tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    quick = OptimizerSettings(learning_rate=5e-3)
    settings = variant(tiny_settings, method=method, tasks=4, steps=25, optimizer=quick)
    _, _, measured = step_through(settings, tiny_dataset, 25)
    losses = [row["cross_entropy"] for row in measured]
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_the_attention_vector_receives_gradient_and_moves(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    settings = variant(tiny_settings, model=replace(tiny_settings.model, residual=False))
    start = FewShotModel(settings, tiny_dataset.image_shape).consolidation
    model, _, measured = step_through(settings, tiny_dataset, 8)
    assert measured[0]["attention_gradient_norm"] == 0  # nothing was pending
    assert all(row["attention_gradient_norm"] > 1e-6 for row in measured[3:])
    assert isinstance(start, SlotConsolidation)
    assert isinstance(model.consolidation, SlotConsolidation)
    assert not torch.equal(start.attention_sample, model.consolidation.attention_sample)


def test_without_delayed_gradient_the_attention_vector_stays_as_it_began(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    settings = variant(
        tiny_settings,
        model=replace(tiny_settings.model, residual=False),
        memory=replace(tiny_settings.memory, delayed_gradient=False),
    )
    start = FewShotModel(settings, tiny_dataset.image_shape).consolidation
    model, state, measured = step_through(settings, tiny_dataset, 8)
    assert all(row["attention_gradient_norm"] == 0 for row in measured)
    assert isinstance(start, SlotConsolidation)
    assert isinstance(model.consolidation, SlotConsolidation)
    assert torch.equal(start.attention_sample, model.consolidation.attention_sample)
    assert state.memory is not None
    assert len(state.memory) > 0


def test_what_writes_a_kanerva_memory_learns(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    settings = variant(tiny_settings, method="kanerva")
    start = dict(FewShotModel(settings, tiny_dataset.image_shape).named_parameters())
    model, _, _ = step_through(settings, tiny_dataset, 3)
    machine = {k: v for k, v in model.named_parameters() if ".machine." in k}
    assert len(machine) == 4 + 6  # addresses, prior and noise; three layers of the key
    for name, parameter in machine.items():
        assert not torch.equal(parameter, start[name]), name


@pytest.mark.parametrize("method", MEMORIES)
def test_a_step_recalls_what_the_previous_steps_saw_and_nothing_of_its_own_queries(
    method: Method, tiny_settings: RunSettings
) -> None:
    settings = variant(tiny_settings, method=method)

    def recollected(step: int = 0, changed: slice = slice(0, 0)) -> list[torch.Tensor]:
        """Return m of two steps, with other features at ``changed`` [K + Q] of one of them."""
        model = FewShotModel(settings, (16,))
        nothing_learns = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        state = TrainingState(0, model.empty_memory(), None)
        samples: list[torch.Tensor] = []
        assert model.recall is not None
        model.recall.register_forward_hook(
            lambda _recall, _inputs, found: samples.append(found.samples.detach())
        )
        class_ids = torch.arange(12).view(2, 2, 3)  # no class twice, so that none is hidden
        random = torch.Generator().manual_seed(0)
        inputs = torch.rand(2, 2, 3, 3, 16, generator=random)  # features, no backbone
        inputs[step - 1, :, :, changed] += 1
        for state.step in (1, 2):
            at = state.step - 1
            training_step(model, nothing_learns, inputs[at], class_ids[at], state)
        return samples

    support, queries = slice(0, 1), slice(1, 3)
    first, second = recollected()
    assert torch.equal(recollected(1, queries)[0], first)
    assert torch.equal(recollected(2, queries)[1], second)
    assert not torch.equal(recollected(2, support)[1], second)
    # What the first step saw, its queries too, is in memory at the second, if there is one.
    assert torch.equal(recollected(1, queries)[1], second) != settings.uses_memory


@pytest.mark.parametrize("method", ["vsm", "kanerva"])
def test_observations_wait_one_step_before_they_reach_the_memory(
    method: Method, tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    tiny_settings = variant(tiny_settings, method=method)
    _, state, measured = step_through(tiny_settings, tiny_dataset, 1)
    assert state.memory is not None
    assert len(state.memory) == 0
    assert state.pending is not None
    assert len(state.pending.features) == 2 * 3 * 3
    model, state, measured = step_through(tiny_settings, tiny_dataset, 2)
    assert measured[1]["slots"] > 0
    assert state.memory is not None
    assert state.pending is not None
    settled = apply_pending(model, state)
    assert settled is not None
    assert len(settled) >= len(state.memory)
    assert not any(part.requires_grad for part in settled.tensors().values())
    assert set(state.pending.class_ids.tolist()) <= set(range(30))


def test_memory_holds_training_classes_alone_and_one_slot_for_each(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    _, state, _ = step_through(tiny_settings, tiny_dataset, 12)
    assert state.memory is not None
    ids = state.memory.slot_classes
    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(tiny_dataset.classes("train").tolist())


@pytest.mark.parametrize("mask", ["none", "own", "task"])
def test_training_hides_the_slots_that_the_mask_names(
    mask: str,
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = variant(tiny_settings, memory=MemorySettings(mask=mask))  # type: ignore[arg-type]
    seen: list[tuple[SlotMemory, torch.Tensor]] = []
    forward = VariationalRecall.forward

    def watched(self: VariationalRecall, *arguments: Any) -> Any:
        recollection = forward(self, *arguments)
        seen.append((arguments[1], recollection.weights))
        return recollection

    monkeypatch.setattr(VariationalRecall, "forward", watched)
    step_through(settings, tiny_dataset, 6)
    sampler = EpisodeSampler(tiny_dataset, "train", 3, 1, 2)
    hidden_weight = shown_weight = 0.0
    for step, (memory, weights) in enumerate(seen, start=1):
        batch = sampler.draw(settings.tasks, torch.Generator().manual_seed(step))
        own = batch.class_ids.unsqueeze(-1) == memory.class_ids
        hidden = own if mask == "own" else own.any(1, keepdim=True).expand_as(own)
        hidden_weight += weights[hidden].sum().item()
        shown_weight += weights[~hidden].sum().item()
    assert shown_weight > 0
    assert (hidden_weight > 0) == (mask == "none")


def test_capacity_bounds_the_memory(tiny_settings: RunSettings, tiny_dataset: ImageDataset) -> None:
    settings = variant(tiny_settings, memory=MemorySettings(capacity=4))
    _, state, _ = step_through(settings, tiny_dataset, 6)
    assert state.memory is not None
    assert len(state.memory) == 4


def test_every_term_is_logged(tiny_settings: RunSettings, tmp_path: Path) -> None:
    train_run(variant(tiny_settings, steps=10), tmp_path / "run")
    logged = rows(tmp_path / "run")
    step = next(row for row in logged if "loss" in row)
    assert {
        "cross_entropy",
        "kl_z",
        "kl_m",
        "address_entropy",
        "slots",
        "attention_gradient_norm",
        "learning_rate",
    } <= set(step)
    assert logged[-1]["validation"].keys() == {"way", "accuracy", "ci95", "nll"}


def test_the_best_validated_model_is_kept(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    train_run(variant(tiny_settings, steps=15), tmp_path / "run")
    seen = [(row["step"], row["validation"]) for row in rows(tmp_path / "run") if "loss" not in row]
    assert [step for step, _ in seen] == [3, 6, 9, 12, 15]
    best = max(score["accuracy"] for _, score in seen)
    first_best = next(step for step, score in seen if score["accuracy"] == best)
    trained = load(tmp_path / "run")
    assert trained.step == first_best
    assert load(tmp_path / "run", checkpoint="last").step == 15
    again = evaluate(
        trained.model, trained.state, EpisodeSampler(tiny_dataset, "validation", 3, 1, 2), 5, 0
    )
    assert again.accuracy.mean == pytest.approx(best)


@pytest.mark.parametrize("method", ["vsm", "kanerva"])
def test_the_last_state_loads_with_pending_observations_applied(
    method: Method, tiny_settings: RunSettings, tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    train_run(
        variant(tiny_settings, method=method, steps=3), tmp_path / "run"
    )  # validated once, at the last step
    checkpoints: tuple[Checkpoint, ...] = ("best", "last")
    best, last = (load(tmp_path / "run", checkpoint=which) for which in checkpoints)
    assert best.memory is not None
    assert last.memory is not None
    torch.testing.assert_close(best.memory.memory.tensors(), last.memory.memory.tensors())
    assert best.memory.metadata() == last.memory.metadata()
    assert bool(last.memory.names) == (method == "vsm")
    assert best.encoder.identity == last.encoder.identity


def test_a_run_that_was_cut_off_between_its_two_files_is_to_be_resumed(
    tiny_settings: RunSettings,
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(tiny_settings)

    def save_memory(path: Path, *contents: Any) -> None:
        if path == run.memory:
            save_tensors(path, *contents)

    for step, seed in ((3, 0), (6, 1)):
        model = FewShotModel(variant(tiny_settings, seed=seed), tiny_dataset.image_shape)
        model.encoder.preprocessing = Preprocessing.of(tiny_dataset)
        save_best(run, model, model.empty_memory(), step, tiny_dataset)
        monkeypatch.setattr("vsm.runs.trained_model.save_tensors", save_memory)
    with pytest.raises(RunError, match=r"of step 3 but .* of step 6; .* resume it with --resume"):
        load(run.path)


def test_an_exchanged_memory_and_a_damaged_file_are_named(
    tiny_settings: RunSettings, tmp_path: Path
) -> None:
    run = train_run(tiny_settings, tmp_path / "run")
    other = train_run(variant(tiny_settings, method="kanerva"), tmp_path / "other")
    metadata = load_tensors(run.memory)[1]
    save_tensors(run.memory, load_tensors(other.memory)[0], metadata | {"class_names": []})
    with pytest.raises(
        RunError, match=r"does not hold a memory of the method vsm .* KanervaMemory; was it"
    ):
        load(run.path)
    run.model.write_bytes(b"not weights")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        load(run.path)
    run.model.unlink()
    with pytest.raises(RunError, match=r"model\.safetensors is missing"):
        load(run.path)
    with pytest.raises(RunError, match="is not a run directory"):
        RunDirectory(tmp_path / "nowhere").settings()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0.0]), ("step", [1, 0.5, 0.25])],
)
def test_schedules_follow_their_names(schedule: str, expected: list[float]) -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, halve_every=50)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = []
    for step in (1, 51, 101):
        set_learning_rate(optimizer, settings, step, 100)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, abs=1e-6)


def test_warm_up_rises_linearly() -> None:
    settings = OptimizerSettings(learning_rate=1.0, schedule="constant", warmup_steps=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = []
    for step in range(1, 6):
        set_learning_rate(optimizer, settings, step, 100)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_clipping_bounds_the_gradient(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset
) -> None:
    settings = variant(tiny_settings, optimizer=OptimizerSettings(clip_norm=1e-3))
    model, _, measured = step_through(settings, tiny_dataset, 2)
    assert measured[-1]["gradient_norm"] > 1e-3
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm() <= 1.01e-3


def test_training_images_are_augmented_and_test_images_never(
    tiny_settings: RunSettings, tiny_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    tiny_settings = variant(tiny_settings, augment_affine=0.1)

    def augment(
        self: ImageDataset,
        pixels: torch.Tensor,
        random: list[torch.Generator],
        colors: bool,
        affine: float,
    ) -> torch.Tensor:
        assert colors == tiny_settings.augment_colors
        assert affine == 0.1
        seeds.extend(one.initial_seed() for one in random)
        return pixels

    monkeypatch.setattr(ImageDataset, "augment", augment)
    model, state, _ = step_through(tiny_settings, tiny_dataset, 3)
    assert len(set(seeds)) == 3 * tiny_settings.tasks  # every task of every step anew
    sampler = EpisodeSampler(tiny_dataset, "test", 3, 1, 2)
    evaluate(model, state.memory, sampler, 2, seed=0)
    without = variant(tiny_settings, augment=False, augment_affine=0.0)
    step_through(without, tiny_dataset, 2)
    assert len(seeds) == 3 * tiny_settings.tasks
