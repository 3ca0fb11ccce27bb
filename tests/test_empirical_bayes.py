"""A memory over features in one call: its estimates against plain loops, and what it is worth."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from classify_helpers import clustered_features
from vsm import FewShotClassifier
from vsm.classify.empirical_bayes import LEAST_SHARE, HeldOut, _about_recollection
from vsm.data import EpisodeSampler, FeatureDataset
from vsm.errors import ClassifierError, MemoryFileError
from vsm.evaluation.evaluator import evaluate
from vsm.memory import SlotMemory
from vsm.memory.conjugate import ConjugateInference
from vsm.model import FewShotModel
from vsm.settings import MemorySettings, ModelSettings, RunSettings

NUM_CLASSES, PER_CLASS = 48, 16


def learn(seed: int = 0, **options: object) -> FewShotClassifier:
    features, class_ids, names = clustered_features(NUM_CLASSES, PER_CLASS, seed=seed)
    labels = [names[class_id] for class_id in class_ids]
    return FewShotClassifier().learn_memory(features, labels, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def learned() -> FewShotClassifier:
    return learn()


def slots_of(classifier: FewShotClassifier) -> SlotMemory:
    assert classifier.memory is not None
    return classifier.memory.slots


def test_there_is_one_slot_per_class_and_it_holds_the_mean(learned: FewShotClassifier) -> None:
    features, class_ids, names = clustered_features(NUM_CLASSES, PER_CLASS)
    assert learned.memory is not None
    assert learned.memory.names == tuple(names)
    rows = F.normalize(features, dim=-1)
    for class_id in range(NUM_CLASSES):
        mean = rows[class_ids == class_id].mean(0)
        torch.testing.assert_close(slots_of(learned).content[class_id], mean)
    assert slots_of(learned).counts.tolist() == [PER_CLASS] * NUM_CLASSES


def test_the_noise_is_the_pooled_variance_within_classes(learned: FewShotClassifier) -> None:
    features, class_ids, _ = clustered_features(NUM_CLASSES, PER_CLASS)
    rows = F.normalize(features, dim=-1).double().numpy()
    per_class = [np.var(rows[class_ids == c], axis=0, ddof=1) for c in range(NUM_CLASSES)]
    assert learned.encoder is not None
    inference = learned.encoder.model.inference
    assert isinstance(inference, ConjugateInference)
    noise = inference.noise().detach().exp().numpy()
    np.testing.assert_allclose(noise, np.mean(per_class, axis=0), rtol=1e-3)


@pytest.mark.parametrize(
    ("variance", "slot_std", "noise"),
    [(0.3, 0.0, 0.0), (0.3, 1.5, 0.0), (0.3, 0.0, 2.0), (0.3, 1.5, 2.0), (0.0, 1.5, 2.0)],
    ids=["alone", "slots that differ", "means that are noisy", "both", "none"],
)
def test_the_variance_about_a_recalled_slot_is_the_one_that_classes_were_made_with(
    variance: float, slot_std: float, noise: float
) -> None:
    """Class means lie ±σ about a slot, and ±s/√n about that: σ² is asked for.

    Every slot with every sign and every n occurs once, so moments are exact and nothing is left to
    chance.
    """
    width, sizes, signs = 3, (2, 10), (-1.0, 1.0)
    random = torch.Generator().manual_seed(0)
    slots = slot_std * torch.randn(8, width, generator=random).double()
    means, counts = [], []
    for slot, n, of_class, of_rows in product(slots, sizes, signs, signs):
        means.append(slot + of_class * variance**0.5 + of_rows * (noise / n) ** 0.5)
        counts.append(n)
    ids = torch.arange(len(slots) + len(means))
    memory = SlotMemory(
        torch.cat([slots, torch.stack(means)]).float(), ids, torch.tensor([1] * 8 + counts), ids
    )
    # Every new class sees the known ones alone, and a scale of almost zero makes these equal.
    new = ids[8:].view(-1, 4)
    support = memory.content[new].unsqueeze(2)
    held_out = HeldOut(support, support, (ids >= 8).expand(*new.shape, -1), new)
    settings = RunSettings(
        method="vsm",
        model=ModelSettings(inference="conjugate", hidden_units=1),
        memory=MemorySettings(learn_addressing_scale=False),
    )
    with torch.no_grad():
        model = FewShotModel(settings, (width,)).eval()
        found = _about_recollection(model, memory, held_out, torch.full((width,), noise), 1e-7)
    squared = slots.var(0, correction=0) + variance + (noise / 2 + noise / 10) / 2
    expected = [max(variance, LEAST_SHARE * error) for error in squared.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def test_a_memory_is_worth_less_than_one_image_where_classes_differ_more_than_their_rows() -> None:
    random = torch.Generator().manual_seed(0)
    means = 2.0 + torch.randn(400, 6, generator=random) * torch.tensor([0.2, 0.5, 1, 1, 2, 3.0])
    rows = means.repeat_interleave(30, 0)
    rows = rows + 0.1 * torch.randn(len(rows), 6, generator=random)
    labels = torch.arange(400).repeat_interleave(30)
    classifier = FewShotClassifier().learn_memory(rows, labels, normalize=False)
    told = classifier.fit(rows[:60:30], labels[:60:30]).explain(rows[0])
    assert told.memory_strength is not None
    assert 0 < told.memory_strength[0] < 1


def test_a_memory_of_related_classes_helps_with_new_ones(learned: FewShotClassifier) -> None:
    features, _, names = clustered_features(64, 20, seed=5)
    dataset = FeatureDataset(
        name="new",
        features=features.numpy(),
        class_names=tuple(names),
        class_starts=np.arange(0, 64 * 20 + 1, 20),
        splits={"test": np.arange(64)},
    )
    sampler = EpisodeSampler(dataset, "test", 5, 1, 10)
    assert learned.encoder is not None
    model, memory = learned.encoder.model, slots_of(learned)
    with_memory = evaluate(model, memory, sampler, 200, 0)
    without = evaluate(model, memory.first(0), sampler, 200, 0)
    assert with_memory.accuracy.mean > without.accuracy.mean + 0.02
    assert with_memory.nll < without.nll
    assert with_memory.reliability.expected_calibration_error < 0.1


def test_the_same_rows_give_the_same_model_whatever_their_order(learned: FewShotClassifier) -> None:
    features, class_ids, names = clustered_features(NUM_CLASSES, PER_CLASS)
    again = learn()
    assert again.encoder is not None
    assert learned.encoder is not None
    for name, tensor in learned.encoder.model.state_dict().items():
        assert torch.equal(again.encoder.model.state_dict()[name], tensor), name
    # Classes in another order have the same slots under the same names.
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    shuffled = FewShotClassifier().learn_memory(
        features[order], [names[class_ids[row]] for row in order]
    )
    assert shuffled.memory is not None
    assert learned.memory is not None
    assert shuffled.memory.names == learned.memory.names
    torch.testing.assert_close(slots_of(shuffled).content, slots_of(learned).content)


def test_a_memory_of_other_features_is_refused_by_name(tmp_path: Path) -> None:
    one, other = learn(encoder_name="clip"), learn(encoder_name="dino")
    assert one.memory is not None
    assert other.encoder is not None
    one.memory.write(tmp_path / "clip.safetensors")
    with pytest.raises(MemoryFileError, match=r"encoder features:clip \[.*features:dino \["):
        other.encoder.with_memory(one.memory, "clip.safetensors")


def test_learning_anew_forgets_what_was_fitted_and_remembered(learned: FewShotClassifier) -> None:
    features, class_ids, _ = clustered_features(8, 4, seed=9)
    classifier = FewShotClassifier(learned.encoder).fit(features, class_ids)
    classifier.remember()
    assert classifier.memory is not None
    assert len(classifier.memory.names) == NUM_CLASSES + 8
    classifier.learn_memory(features, class_ids)
    assert classifier.memory.names == tuple(map(str, range(8)))
    with pytest.raises(ClassifierError, match="call fit first"):
        classifier.predict(features)


def test_too_few_classes_are_refused() -> None:
    rows = torch.eye(5)
    message = "at least 3 classes with at least 2 rows each, got 1"
    with pytest.raises(ClassifierError, match=message):
        FewShotClassifier().learn_memory(rows, [0, 0, 1, 2, 3])
