"""Stored features: read from two forms, refused by name, and trained on as they are."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from run_helpers import train_run
from tiny import variant
from vsm.cli import main
from vsm.data import EpisodeSampler, FeatureDataset, ImageDataset, Split, features, open_dataset
from vsm.data.dataset import random_split
from vsm.errors import DataError, EpisodeError, SettingsError
from vsm.evaluation.evaluator import evaluate
from vsm.memory import MEMORIES, Memory, Observations
from vsm.model import FewShotModel, objective
from vsm.runs.loading import load
from vsm.seeding import generator, task_generators
from vsm.settings import (
    METHODS,
    Method,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    SamplingSettings,
    ValidationSettings,
)
from vsm.system.progress import Progress
from vsm.training import build_optimizer, set_learning_rate

Floats = npt.NDArray[np.floating[Any]]
NUM_CLASSES, PER_CLASS, WIDTH = 25, 6, 5
NAMES = [f"bird{number:02}" for number in range(NUM_CLASSES)]
SPLIT_OF: dict[str, Split] = {
    name: "train" if i < 15 else "validation" if i < 20 else "test" for i, name in enumerate(NAMES)
}


def drawn(seed: int = 0, width: int = WIDTH) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Features around a center of each class, class after class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(NUM_CLASSES), PER_CLASS)
    centers = 2 * rng.standard_normal((NUM_CLASSES, width))
    noise = rng.standard_normal((len(labels), width))
    return (centers[labels] + 0.5 * noise).astype(np.float32), labels


def write_folder(folder: Path, **parts: Any) -> Path:
    """Write arrays as .npy and everything else as .json."""
    folder.mkdir(exist_ok=True)
    for part, value in parts.items():
        if isinstance(value, np.ndarray):
            np.save(folder / f"{part}.npy", value)
        else:
            (folder / f"{part}.json").write_text(json.dumps(value))
    return folder


def contents(dataset: FeatureDataset) -> dict[str, list[list[float]]]:
    """The rows of every class by name, in an order of their own."""
    return {
        name: sorted(dataset.features[dataset.image_ids(class_id)].tolist())
        for class_id, name in enumerate(dataset.class_names)
    }


def split_names(dataset: FeatureDataset) -> dict[str, list[str]]:
    return {
        split: [dataset.class_names[class_id] for class_id in class_ids]
        for split, class_ids in dataset.splits.items()
    }


# What is written is read.


def test_a_safetensors_file_survives_a_round_trip(tmp_path: Path) -> None:
    values, labels = drawn()
    features.write(
        tmp_path / "birds.safetensors", values, labels, class_names=NAMES, splits=SPLIT_OF
    )
    dataset = features.read(tmp_path / "birds.safetensors")
    assert dataset.name == "features:birds"
    assert dataset.class_names == tuple(NAMES)
    assert dataset.input_shape == (WIDTH,)
    assert dataset.num_samples == NUM_CLASSES * PER_CLASS
    assert dataset.class_sizes.tolist() == [PER_CLASS] * NUM_CLASSES
    np.testing.assert_array_equal(dataset.features, values)
    assert {name: split for split, names in split_names(dataset).items() for name in names} == (
        SPLIT_OF
    )
    assert "150 rows of 25 classes" in dataset.origin


def test_both_forms_and_all_ways_to_say_names_and_splits_agree(tmp_path: Path) -> None:
    values, labels = drawn()
    texts = np.asarray(NAMES)[labels]
    features.write(tmp_path / "a.safetensors", values, labels, class_names=NAMES, splits=SPLIT_OF)
    safetensors.torch.save_file(
        {
            "features": torch.from_numpy(values),
            "labels": torch.from_numpy(labels),
        },
        tmp_path / "b.safetensors",
        {"class_names": json.dumps(NAMES), "splits": json.dumps(SPLIT_OF)},
    )
    forms = [
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        write_folder(tmp_path / "c", features=values, labels=texts, splits=SPLIT_OF),
        write_folder(
            tmp_path / "e", features=values, labels=labels, class_names=NAMES, splits=SPLIT_OF
        ),
    ]
    read = [features.read(form) for form in forms]
    for dataset in read[1:]:
        assert contents(dataset) == contents(read[0])
        assert split_names(dataset) == split_names(read[0])


def test_permuted_rows_give_the_same_dataset_up_to_their_order(tmp_path: Path) -> None:
    values, labels = drawn()
    order = np.random.default_rng(1).permutation(len(labels))
    one = features.read(write_folder(tmp_path / "a", features=values, labels=labels))
    two = features.read(write_folder(tmp_path / "b", features=values[order], labels=labels[order]))
    assert contents(one) == contents(two)
    assert one.class_names == two.class_names
    assert one.class_starts.tolist() == two.class_starts.tolist()
    assert split_names(one) == split_names(two)


def test_rows_of_a_class_keep_their_order_and_labels_are_ordered_as_numbers(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float64).reshape(6, 2)
    labels = np.asarray([10, 9, 10, -3, 9, 10])
    dataset = features.read(write_folder(tmp_path / "x", features=values, labels=labels))
    assert dataset.class_names == ("-3", "9", "10")
    assert dataset.features[:, 0].tolist() == [6, 2, 8, 0, 4, 10]
    assert dataset.class_starts.tolist() == [0, 1, 3, 6]


def test_rows_that_lie_class_after_class_stay_on_disk(tmp_path: Path) -> None:
    values, labels = drawn()
    sorted_rows = write_folder(tmp_path / "a", features=values, labels=labels)
    others = write_folder(tmp_path / "b", features=values, labels=labels[::-1].copy())
    assert isinstance(features.read(sorted_rows).features, np.memmap)
    assert not getattr(features.read(others).features, "filename", None)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_kind_of_float_is_loaded_as_float32(kind: torch.dtype, tmp_path: Path) -> None:
    values, labels = drawn()
    stored = torch.from_numpy(values).to(kind)
    safetensors.torch.save_file(
        {"features": stored, "labels": torch.from_numpy(labels)}, tmp_path / "x.safetensors"
    )
    dataset = features.read(tmp_path / "x.safetensors")
    ids = torch.tensor([[3, 20], [7, 7]])
    loaded = dataset.load(ids)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, stored.float()[ids])
    assert torch.equal(dataset.normalize(dataset.augment(loaded, torch.Generator())), loaded)


def test_classes_without_splits_are_split_as_those_of_folders_are(tmp_path: Path) -> None:
    values, labels = drawn()
    dataset = features.read(
        write_folder(tmp_path / "x", features=values, labels=labels, class_names=NAMES)
    )
    assert split_names(dataset) == random_split(NAMES)
    assert [len(ids) for ids in dataset.splits.values()] == [16, 4, 5]


def test_splits_may_leave_one_out(tmp_path: Path) -> None:
    values, labels = drawn()
    splits = {str(number): "train" if number < 20 else "test" for number in range(NUM_CLASSES)}
    dataset = features.read(
        write_folder(tmp_path / "x", features=values, labels=labels, splits=splits)
    )
    with pytest.raises(DataError, match="has the splits train, test; got 'validation'"):
        dataset.classes("validation")


# What cannot work is refused by name.


def damage(part: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    values, labels = drawn()
    parts: dict[str, Any] = {"features": values, "labels": labels}
    return parts | {part: change(parts.get(part))}


def put(row: int, value: float) -> Callable[[Floats], Floats]:
    def change(values: Floats) -> Floats:
        values = values.astype(np.float64)
        values[row, 2] = value
        return values

    return change


SPLITS_OF_NUMBERS = {str(number): "train" for number in range(25)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (damage("features", put(77, np.nan)), r"x/features: row 77 holds NaN, infinity or"),
        (damage("features", put(3, -np.inf)), r"x/features: row 3 holds NaN"),
        (damage("features", put(9, 1e300)), r"row 9 holds .* too large for float32"),
        (damage("features", lambda v: v[0]), r"x/features: expected floats \[n, D\].* got flo"),
        (damage("features", lambda v: v.astype(int)), r"expected floats .* got int64 \[150, 5\]"),
        (damage("features", lambda v: v[:0]), r"with at least one row, got .*\[0, 5\]"),
        (damage("features", lambda v: v[:, :0]), r"x/features: .* got .*\[150, 0\]"),
        (damage("labels", lambda v: v[:149]), r"x/labels: expected .*\[150\], got .*\[149\]"),
        (damage("labels", lambda v: v * 1.0), r"x/labels: expected integers .* got f"),
        (damage("labels", lambda v: v > 3), r"x/labels: expected integers .* bool"),
        (damage("labels", lambda v: v % 2), "2 classes found, but at least 3 are needed, one"),
        (damage("class_names", lambda _: NAMES[:20]), "labels 0 to 19, but row 144 has label 24"),
        (damage("class_names", lambda _: "ab"), r"x/class_names: expected a list of strings"),
        (damage("class_names", lambda _: ["a"] * 25), r"x/class_names: the name 'a' appears"),
        (damage("splits", lambda _: {"0": "train"}), r"x/splits: class '1' has no split"),
        (damage("splits", lambda v: {**SPLITS_OF_NUMBERS, "99": "test"}), "class '99' has no rows"),
        (damage("splits", lambda _: {"0": "dev"}), "class '0' has split 'dev'; known: train, val"),
        (damage("splits", lambda _: np.zeros(150, int)), "x/splits: an array; store a JSON object"),
        (damage("splits", lambda _: ["train"]), r"x/splits: expected an object from class na"),
    ],
)
def test_damage_is_named_with_its_file_and_row_or_class(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        features.read(write_folder(tmp_path / "x", **parts))
    assert "\n" not in str(refused.value)


def test_names_given_twice_are_refused(tmp_path: Path) -> None:
    values, labels = drawn()
    texts = np.asarray(NAMES)[labels]
    named = write_folder(tmp_path / "a", features=values, labels=texts, class_names=NAMES)
    with pytest.raises(DataError, match="labels are names already"):
        features.read(named)


def test_pickled_arrays_are_not_opened(tmp_path: Path) -> None:
    values, labels = drawn()
    folder = write_folder(tmp_path / "x", features=values, labels=labels)
    np.save(folder / "labels.npy", labels.astype(object), allow_pickle=True)
    with pytest.raises(DataError, match=r"labels\.npy: cannot be read as an array of numbers"):
        features.read(folder)


def test_what_is_missing_or_something_else_is_named(tmp_path: Path) -> None:
    values, labels = drawn()
    with pytest.raises(DataError, match=r"nowhere does not exist; give a \.safetensors file"):
        features.read(tmp_path / "nowhere")
    np.save(tmp_path / "x.npy", values)
    with pytest.raises(DataError, match=r"x\.npy is not a folder or a \.safetensors file"):
        features.read(tmp_path / "x.npy")
    folder = write_folder(tmp_path / "folder", features=values)
    with pytest.raises(DataError, match=r"holds no labels; add .*labels\.npy"):
        features.read(folder)
    (tmp_path / "x.safetensors").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"x\.safetensors: cannot be read as safetensors"):
        features.read(tmp_path / "x.safetensors")
    safetensors.torch.save_file({"features": torch.rand(3, 2)}, tmp_path / "y.safetensors")
    with pytest.raises(DataError, match=r"holds no labels; add labels\.npy or a tensor"):
        features.read(tmp_path / "y.safetensors")
    features.write(tmp_path / "z.safetensors", values, labels, splits={"0": "train"})
    with pytest.raises(DataError, match=r"z\.safetensors/splits: class '1' has no split"):
        features.read(tmp_path / "z.safetensors")
    (folder / "labels.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"labels\.npy: cannot be read"):
        features.read(folder)
    np.save(folder / "labels.npy", labels)
    (folder / "splits.json").write_text("{")
    with pytest.raises(DataError, match=r"splits: is not JSON"):
        features.read(folder)
    with pytest.raises(DataError, match="features: needs a path"):
        open_dataset("features:")


def test_a_class_with_too_few_rows_is_named(tmp_path: Path) -> None:
    values, labels = drawn()
    kept = np.delete(np.arange(len(labels)), [0, 1, 2])
    parts = {"features": values[kept], "labels": labels[kept]}
    folder = write_folder(tmp_path / "x", **parts, class_names=NAMES, splits=SPLIT_OF)
    with pytest.raises(EpisodeError, match=r"'bird00' of the train split of features:x holds 3"):
        EpisodeSampler(open_dataset(f"features:{folder}"), "train", 3, 1, 4)


# The model on features.


def small_settings(method: Method = "vsm", **model: Any) -> RunSettings:
    return variant(
        RunSettings(),
        method=method,
        way=3,
        shot=2,
        queries=3,
        tasks=2,
        steps=8,
        checkpoint_every=4,
        model=ModelSettings(hidden_units=8, **model),
        sampling=SamplingSettings(train_prototypes=4, evaluation_prototypes=4),
        validation=ValidationSettings(every=4, episodes=5),
    )


def test_a_model_of_features_has_no_backbone_and_takes_features_of_its_width_alone() -> None:
    model = FewShotModel(small_settings(), (WIDTH,))
    assert model.backbone is None
    assert model.num_features == WIDTH
    inputs = torch.rand(4, WIDTH)
    assert torch.equal(model.embed(inputs), inputs)
    with pytest.raises(ValueError, match=r"inputs: expected features \[B, 5\], got \[4, 6\]"):
        model.embed(torch.rand(4, 6))
    with pytest.raises(ValueError, match=r"inputs: expected features \[B, 5\], got \[4, 1,"):
        model.embed(torch.rand(4, 1, 28, 28))


@pytest.mark.parametrize("adapter", ["none", "linear"])
@pytest.mark.parametrize("normalize", [False, True])
def test_features_pass_by_the_backbone_of_a_model_that_has_one(
    adapter: str, normalize: bool
) -> None:
    settings = small_settings(channels=4, adapter=adapter, normalize_features=normalize)
    model = FewShotModel(settings, (1, 28, 28)).eval()
    if model.adapter is not None:
        torch.nn.init.normal_(model.adapter.weight)
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(model.embed(model.encoder.encode(images)), model.embed(images))


def test_the_adapter_starts_as_the_identity_and_leaves_all_other_weights_alone() -> None:
    plain = FewShotModel(small_settings(), (WIDTH,))
    adapted = FewShotModel(small_settings(adapter="linear"), (WIDTH,))
    inputs = torch.rand(4, WIDTH)
    assert torch.equal(adapted.embed(inputs), inputs)
    for name, weight in plain.state_dict().items():
        assert torch.equal(adapted.state_dict()[name], weight), name


def test_features_are_normalized_after_the_adapter() -> None:
    model = FewShotModel(small_settings(adapter="linear", normalize_features=True), (WIDTH,))
    assert model.adapter is not None
    torch.nn.init.normal_(model.adapter.weight)
    torch.nn.init.normal_(model.adapter.bias)
    inputs = torch.rand(4, WIDTH)
    expected = F.normalize(inputs @ model.adapter.weight.T + model.adapter.bias, dim=1)
    torch.testing.assert_close(model.embed(inputs), expected)


# Training on features.


class Losses(Progress):
    """Keeps the loss that is shown beside the bar after every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def advance(self, count: int = 1, note: str = "") -> None:
        self.seen += [float(note.removeprefix("loss "))] if note else []


@pytest.fixture
def birds(tmp_path: Path) -> str:
    values, labels = drawn()
    features.write(
        tmp_path / "birds.safetensors", values, labels, class_names=NAMES, splits=SPLIT_OF
    )
    return f"features:{tmp_path / 'birds.safetensors'}"


def train_by_hand(
    settings: RunSettings, values: Tensor, sampler: EpisodeSampler
) -> tuple[FewShotModel, Memory | None, list[float]]:
    """The training loop on a plain tensor of features: no dataset, no backbone, no run."""
    model = FewShotModel(settings, (WIDTH,)).train()
    optimizer = build_optimizer(model, settings.optimizer)
    memory = model.empty_memory()
    pending: Observations | None = None
    losses = []
    for step in range(1, settings.steps + 1):
        batch = sampler.draw(settings.tasks, generator(settings.seed, "episodes", step))
        random = task_generators(settings.seed, "noise", step, range(settings.tasks))
        chosen = values[batch.image_ids]  # [T, N, K + Q, D]
        memory = model.consolidate(memory, pending, step - 1)
        hidden = None if memory is None else memory.slot_mask(batch.class_ids, "task")
        support, queries = chosen[:, :, : settings.shot], chosen[:, :, settings.shot :]
        prediction = model(support, queries, memory, random, hidden)
        prior = None if settings.method == "protonet" else model.prior(queries)
        loss = objective(prediction, prior, settings.objective).total
        set_learning_rate(optimizer, settings.optimizer, step, settings.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if memory is not None:
            memory = memory.detach()
            labels = batch.class_ids.unsqueeze(-1).expand(batch.image_ids.shape)
            pending = Observations(chosen.flatten(0, 2), labels.flatten())
    with torch.no_grad():
        memory = model.consolidate(memory, pending, settings.steps)
    return model, memory, losses


@pytest.mark.parametrize("method", ["vpn", *MEMORIES])
def test_a_memory_trained_on_stored_features_equals_one_trained_by_hand_step_by_step(
    method: Method, birds: str, tmp_path: Path
) -> None:
    settings = replace(small_settings(method), data=birds)
    watched = Losses()
    train_run(settings, tmp_path / "run", progress=watched)
    dataset = open_dataset(birds)
    sampler = EpisodeSampler(dataset, "train", 3, 2, 3)
    model, memory, losses = train_by_hand(settings, torch.from_numpy(drawn()[0]), sampler)
    assert watched.seen == pytest.approx(losses, abs=5.1e-4)  # three digits are shown
    last = load(tmp_path / "run", checkpoint="last")
    for name, weight in last.model.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], msg=name)
    if memory is not None:
        assert last.memory is not None
        torch.testing.assert_close(last.memory.memory.tensors(), memory.tensors())
        assert last.memory.names == tuple(NAMES[i] for i in memory.slot_classes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_resumes_and_is_measured_on_features(
    method: Method, birds: str, tmp_path: Path
) -> None:
    settings = replace(small_settings(method, adapter="linear"), data=birds)
    train_run(settings, tmp_path / "run")
    train_run(settings, tmp_path / "run", resume=True)
    dataset = open_dataset(birds)
    trained = load(tmp_path / "run")
    sampler = EpisodeSampler(dataset, "test", 3, 2, 3)
    result = evaluate(trained.model, trained.state, sampler, 20, 0)
    assert result.accuracy.mean > 0.6  # chance is a third


def test_protonet_has_nothing_to_train_on_fixed_features(birds: str, tmp_path: Path) -> None:
    settings = replace(small_settings("protonet"), data=birds)
    with pytest.raises(SettingsError, match=r"nothing to train; give it --model\.adapter linear"):
        train_run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_linear_adapter_learns_which_features_matter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(60), 10)
    telling = rng.standard_normal((60, 3))[labels] + 0.3 * rng.standard_normal((600, 3))
    misleading = 6 * rng.standard_normal((600, 9))  # larger, and the same for every class
    features.write(tmp_path / "x.safetensors", np.concatenate([telling, misleading], 1), labels)
    settings = replace(
        small_settings("protonet", adapter="linear", temperature=10.0),
        data=f"features:{tmp_path / 'x.safetensors'}",
        steps=60,
        tasks=8,
        optimizer=OptimizerSettings(learning_rate=0.03),
    )
    dataset = open_dataset(settings.data)
    train_run(settings, tmp_path / "run")
    sampler = EpisodeSampler(dataset, "test", 3, 2, 3)
    start = FewShotModel(settings, dataset.input_shape)
    learned = load(tmp_path / "run").model
    before, after = (evaluate(m, None, sampler, 200, 0).accuracy.mean for m in (start, learned))
    assert after > before + 0.1


# What is only for images says so.


def test_images_are_not_features(birds: str, tiny_dataset: ImageDataset) -> None:
    dataset = open_dataset(birds)
    model = FewShotModel(small_settings("protonet"), dataset.input_shape)
    sampler = EpisodeSampler(dataset, "test", 3, 2, 3)
    with pytest.raises(EpisodeError, match="transductive needs a backbone with batch norm"):
        evaluate(model, None, sampler, 2, 0, "transductive")
    assert tiny_dataset.input_shape == tiny_dataset.image_shape


TINY = [
    *("--way", "3", "--queries", "2", "--tasks", "1", "--steps", "4", "--model.hidden-units", "8"),
    *("--sampling.train-prototypes", "4", "--sampling.evaluation-prototypes", "4"),
    *("--validation.every", "4", "--validation.episodes", "4"),
]


def test_the_command_line_trains_on_features_and_evaluates_from_anywhere(
    birds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--data", "features:birds.safetensors"]
    assert main(["train", *data, "--output", "run", *TINY, "--json"]) == 0
    learned = json.loads(capsys.readouterr().out)["gaussian"]
    assert learned["used"] == (learned["difference"]["mean"] >= 0) == Path("run/gaussian").is_dir()
    monkeypatch.chdir("/")
    run = str(tmp_path / "run")
    assert main(["evaluate", run, "--queries", "2", "--episodes", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == birds
    assert main(["evaluate", run, "--queries", "2", "--batch-norm", "transductive"]) == 2
    assert "transductive needs a backbone with batch norm" in capsys.readouterr().err
    assert main(["train", "--output", run, "--resume", "--json"]) == 0
    own = ["--backbone", "my:encoder", "--output", str(tmp_path / "other")]
    assert main(["train", "--data", birds, *own, *TINY]) == 2
    assert "model.backbone: has no effect on stored features" in capsys.readouterr().err


def test_the_command_line_describes_features(
    birds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "info", birds, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["rows"], described["num_features"], described["classes"]) == (150, WIDTH, 25)
    assert described["splits"] == {"train": 15, "validation": 5, "test": 5}
    assert main(["data", "info", birds]) == 0
    assert main(["data", "info", birds, "--verify"]) == 2
    assert "has no checksum" in capsys.readouterr().err
    assert main(["data", "prepare", birds]) == 2
    assert "needs no preparation; use it with --data features:" in capsys.readouterr().err
