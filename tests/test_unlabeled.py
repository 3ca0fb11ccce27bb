"""Images without labels help the classifier of a few: from Python, and on the command line."""

import csv
import importlib.util
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from torch import Tensor

from classify_helpers import clustered_features, examples, write_folders, write_run
from vsm import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.cli import main
from vsm.data import ImageDataset, open_images
from vsm.data.folder import images_below, labeled_images
from vsm.errors import ClassifierError, DataError, RunError
from vsm.evaluation.calibration import Calibration, Thresholds
from vsm.memory import Observations, Transduction
from vsm.memory.named import trained_memory
from vsm.memory.transduction import COVERAGE, FEW, STEPS
from vsm.model import FewShotModel
from vsm.nn.distributions import DiagonalGaussian
from vsm.runs.trained_model import TrainedModel, made_in_memory
from vsm.settings import BASELINE_NAMES, Method, ModelSettings, RunSettings
from vsm.system.tensor_files import load_tensors, save_tensors

MODEL = "glyphs-5w1s"
USED = Transduction(weight=0.45, prior=1.0, temperatures={1: 1.3, 5: 1.2})
CLASSES, EACH = 5, 30


@cache
def learned(normalize: bool = True) -> TrainedModel:
    """A model of class statistics over features; its way of using unlabeled images is ``USED``."""
    features, class_ids, names = clustered_features(40, 20)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EPSILONS", "BETAS", "RHOS", "SCALES"):  # one way to read it, quickly found
            value = {"EPSILONS": 3.0, "BETAS": 1.0, "RHOS": 0.5, "SCALES": 5.0}[name]
            patch.setattr(f"vsm.evaluation.memory_choice.{name}", (value,))
        patch.setattr("vsm.evaluation.calibration.choose_transduction", lambda *_: USED)
        labels = [names[c] for c in class_ids]
        found = FewShotClassifier().learn_memory(features, labels, normalize=normalize).encoder
    assert found is not None
    return found


@cache
def conjugate() -> TrainedModel:
    """A model of conjugate inference over the same features, without thresholds."""
    features, class_ids, names = clustered_features(40, 20)
    settings = RunSettings(data="features:x", model=ModelSettings(inference="conjugate"))
    model = FewShotModel(settings, (features.shape[1],)).eval()
    with torch.no_grad():
        memory = model.consolidate(model.empty_memory(), Observations(features, class_ids), 0)
    assert memory is not None
    named = trained_memory(settings, model.encoder.identity, memory, tuple(names), 0)
    return made_in_memory(model, named, Calibration({1: 100.0}, transduction=USED))


BOTH = pytest.mark.parametrize("model", [learned, conjugate])
Opener = Callable[[], TrainedModel]


class Task(NamedTuple):
    """Rows with labels, and others without."""

    rows: Tensor
    labels: list[int]
    others: Tensor
    truth: list[int]

    def fit(
        self, trained: TrainedModel, unlabeled: Any = None, **options: Any
    ) -> FewShotClassifier:
        return FewShotClassifier(trained, **options).fit(self.rows, self.labels, unlabeled)

    @property
    def names(self) -> list[str]:
        return [f"new{label}" for label in self.labels]


def task(seed: int = 0, shots: tuple[int, ...] = (1,) * CLASSES) -> Task:
    """Some classes that the memory does not hold, with so many labeled rows of each."""
    features, class_ids, _ = clustered_features(len(shots), EACH, seed=100 + seed)
    labeled = np.arange(len(features)) % EACH < np.asarray(shots)[class_ids]
    labels, truth = (class_ids[rows].tolist() for rows in (labeled, ~labeled))
    return Task(features[labeled], labels, features[~labeled], truth)


def same(one: FewShotClassifier, other: FewShotClassifier, rows: Any) -> None:
    """Assert that two classifiers say the same of rows, to the bit."""
    np.testing.assert_array_equal(one.predict_proba(rows), other.predict_proba(rows))
    np.testing.assert_array_equal(one.predict(rows), other.predict(rows))
    assert one.explain(rows[0]).unlabeled == other.explain(rows[0]).unlabeled


def differs(one: FewShotClassifier, other: FewShotClassifier, rows: Any) -> bool:
    return not np.allclose(one.predict_proba(rows), other.predict_proba(rows), atol=1e-3)


@BOTH
def test_argument_none_and_minus_one_are_the_same_to_the_bit(model: Opener) -> None:
    rows, labels, others, _ = one = task()
    expected = one.fit(model(), others)
    assert differs(expected, one.fit(model()), others)
    both, count = torch.cat([rows, others]), len(others)
    for given in (
        [*labels, *[-1] * count],
        [*labels, *[None] * count],
        [*labels, None, *[-1] * (count - 1)],
        np.asarray([*labels, *[-1] * count]),
        np.asarray([*labels, *[-1.0] * count]),
        np.asarray([*labels, *[None] * count], object),
        torch.tensor([*labels, *[-1] * count]),
    ):
        found = FewShotClassifier(model()).fit(both, given)
        assert found.classes_.tolist() == [0, 1, 2, 3, 4]
        assert found.classes_.dtype.kind == "i"
        same(found, expected, others)
    # Unlabeled ones may lie anywhere, and be given in both ways at once.
    mixed = torch.cat([others[:2], rows[:3], others[2:9], rows[3:]])
    answers = [-1, -1, *labels[:3], *[-1] * 7, *labels[3:]]
    same(FewShotClassifier(model()).fit(mixed, answers, others[9:]), expected, others)
    # Arrays, lists and what is embedded are as good as tensors.
    for kind in (others.numpy(), others.tolist(), expected.embed(others)):
        same(one.fit(model(), kind), expected, others)


def test_names_are_unlabeled_by_none_and_no_name_means_it() -> None:
    rows, _, others, _ = one = task()
    expected = FewShotClassifier(learned()).fit(rows, one.names, others)
    for nothing in (None, -1):
        labels = [*one.names, *[nothing] * len(others)]
        same(FewShotClassifier(learned()).fit(torch.cat([rows, others]), labels), expected, others)
    spelled = FewShotClassifier(learned()).fit(rows, ["-1", "None", "nan", "", "x"])
    assert spelled.classes_.tolist() == ["", "-1", "None", "nan", "x"]
    assert spelled.explain(rows[0]).unlabeled is None


@BOTH
def test_unlabeled_images_make_answers_more_accurate(model: Opener) -> None:
    gains = []
    for seed in range(20):
        one = task(seed)
        before = one.fit(model()).score(one.others, one.truth)
        gains.append(one.fit(model(), one.others).score(one.others, one.truth) - before)
    assert np.mean(gains) > 3 * np.std(gains) / np.sqrt(20)
    assert np.mean(gains) > 0.05


def by_loops(
    one: Task, shots: tuple[int, ...], calibrated: TrainedModel
) -> tuple[Tensor, Tensor, Tensor]:
    """Prototypes, log shares and counts by loops over images and classes in float64.

    How well an image fits a class is its rejection score, computed anew for every prototype.
    """
    plain = one.fit(calibrated)
    fitted = plain._fitted
    assert fitted is not None
    posterior: Any = fitted.posterior
    images = plain.coordinates(one.others)
    thresholds = calibrated.thresholds().at(COVERAGE, shots).double()
    start, variance = posterior.gaussian.mean[0].double(), posterior.gaussian.variance[0].double()
    way, number = len(start), len(images)
    expected = USED.prior * number / way + FEW
    prototypes, weights = start, torch.ones(way + 1, dtype=torch.float64)
    near = (fitted.inductive.rejection_scores(images.unsqueeze(0), None)[0] <= thresholds).any(-1)
    for _ in range(STEPS):
        gaussian = DiagonalGaussian(
            prototypes.float().unsqueeze(0), posterior.gaussian.log_variance
        )
        scores = replace(posterior, gaussian=gaussian).rejection_scores(images.unsqueeze(0), None)
        counts, sums = torch.zeros(way + 1).double(), torch.zeros_like(start)
        for image, score, is_near in zip(images.double(), scores[0].double(), near, strict=True):
            odds = [*(weights[:way] * (thresholds - score).exp() * is_near), weights[way]]
            for n in range(way):
                counts[n] += odds[n] / sum(odds)
                sums[n] += odds[n] / sum(odds) * image
            counts[way] += odds[way] / sum(odds)
        moved = [
            (start[n] / variance[n] + USED.weight * sums[n])
            / (1 / variance[n] + USED.weight * counts[n])
            for n in range(way)
        ]
        prototypes, weights = torch.stack(moved), counts + expected
    shares = (weights[:way] / weights[:way].mean()).log()
    return prototypes, shares, counts


@pytest.mark.parametrize("shots", [(1,) * 5, (3, 1, 2, 5, 1), (2, 2)])
def test_what_is_inferred_equals_plain_loops(shots: tuple[int, ...]) -> None:
    one = task(3, shots)
    prototypes, shares, counts = by_loops(one, shots, learned())
    found = one.fit(learned(), one.others, temperature=1.0)
    torch.testing.assert_close(found.prototypes().double(), prototypes, rtol=1e-4, atol=1e-4)
    told = found.explain(one.others[0]).unlabeled
    assert told is not None
    assert [one.images for one in told.values()] == pytest.approx(counts[:-1].tolist(), abs=1e-3)
    # The prototypes are those of new classes with these shares, examples' variances and no more.
    posterior: Any = found._fitted and found._fitted.posterior
    chances = torch.from_numpy(found.predict_proba(one.others)).double()
    images, variance = (
        found.coordinates(one.others).double(),
        posterior.gaussian.variance[0].double(),
    )
    squares = (images.unsqueeze(1) - prototypes).square() / (1 + variance)
    determinants = (1 + variance).log().sum(-1) * posterior.reader.noise
    scores = shares - 0.5 * (squares.sum(-1) + determinants)
    torch.testing.assert_close(chances, scores.softmax(-1), rtol=1e-3, atol=1e-5)


@BOTH
def test_the_order_of_unlabeled_images_does_not_matter(model: Opener) -> None:
    one = task(1)
    expected = one.fit(model(), one.others).predict_proba(one.others)
    for seed in range(3):
        order = torch.randperm(len(one.others), generator=torch.Generator().manual_seed(seed))
        found = one.fit(model(), one.others[order]).predict_proba(one.others)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@BOTH
def test_none_or_no_unlabeled_images_change_nothing_to_the_bit(model: Opener) -> None:
    one = task(2)
    expected = one.fit(model())
    for nothing in (None, one.others[:0], np.zeros((0, 24)), Embedded(torch.zeros(0, 24))):
        found = one.fit(model(), nothing)
        same(found, expected, one.others)
        assert found.explain(one.others[0]) == expected.explain(one.others[0])
    assert expected.explain(one.others[0]).unlabeled is None
    # A model without a use for them is not refused if there are none.
    plain = FewShotClassifier().fit(one.rows, one.labels, one.others[:0])
    same(plain, FewShotClassifier().fit(one.rows, one.labels), one.others)


def test_a_model_that_uses_none_answers_as_without() -> None:
    one = task(2)
    unused = replace(learned().calibration, transduction=Transduction(0.0, 1.0, {1: 1.0}))
    found = one.fit(replace(learned(), calibration=unused), one.others)
    expected = one.fit(learned())
    np.testing.assert_array_equal(
        found.predict_proba(one.others), expected.predict_proba(one.others)
    )
    told = found.explain(one.others[0]).unlabeled
    assert told is not None
    assert all((one.images, one.moved) == (0, 0) for one in told.values())


def test_probabilities_are_calibrated_by_the_temperature_of_unlabeled_images() -> None:
    one = task(2, (1, 2, 5, 5, 5))
    own = one.fit(learned(), one.others).predict_proba(one.others)
    raw = one.fit(learned(), one.others, temperature=1.0).predict_proba(one.others)
    shot = np.exp(np.log([1, 2, 5, 5, 5]).mean())
    share = np.log(shot) / np.log(5)
    expected = raw.astype(np.float64) ** (1 / (1.3 ** (1 - share) * 1.2**share))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-6)


@BOTH
def test_partial_fit_keeps_unlabeled_images_and_takes_more(model: Opener) -> None:
    one = task(4, (2, 2, 2, 2, 2))
    rows, others, labels = one.rows, one.others, np.asarray(one.labels)
    expected = one.fit(model(), others)
    first, later = (np.arange(10) % 2 == parity for parity in (0, 1))

    def begun(unlabeled: Tensor) -> FewShotClassifier:
        return FewShotClassifier(model()).fit(rows[first], labels[first], unlabeled)

    by_parts = begun(others[:20]).partial_fit(rows[later], labels[later])
    assert differs(by_parts, expected, others), "most unlabeled images are still to come"
    by_parts.partial_fit(others[20:70], [-1] * 50).partial_fit(others[70:], [None] * 70)
    same(by_parts, expected, others)
    at_once = FewShotClassifier(model()).partial_fit(
        torch.cat([rows, others]), [*labels, *[-1] * len(others)]
    )
    same(at_once, expected, others)
    together = begun(others[:0]).partial_fit(
        torch.cat([others, rows[later]]), [*[-1] * len(others), *labels[later]]
    )
    same(together, expected, others)
    # A class may come late, and a new fit knows nothing of what was there.
    late = FewShotClassifier(model()).fit(rows[:8], labels[:8], others)
    same(late.partial_fit(rows[8:], labels[8:]), expected, others)
    same(late.fit(rows, labels), one.fit(model()), others)
    assert late.explain(others[0]).unlabeled is None


def as_stored() -> TrainedModel:
    """The model of ``learned`` as a file holds it: thresholds are stored with five digits."""
    calibration = learned().calibration
    assert calibration.thresholds is not None
    rounded = Thresholds.from_dict(calibration.thresholds.as_dict())
    return replace(learned(), calibration=replace(calibration, thresholds=rounded))


@pytest.mark.parametrize("model", [as_stored, conjugate])
def test_a_saved_classifier_answers_the_same_to_the_bit(model: Opener, tmp_path: Path) -> None:
    rows, labels, others, _ = one = task(5, (1, 2, 1, 3, 1))
    fitted = one.fit(model(), others[:80], seed=3)
    fitted.save(tmp_path / "task.vsm")
    loaded = FewShotClassifier.load(tmp_path / "task.vsm")
    same(loaded, fitted, others)
    assert loaded.explain_all(others[:9]) == fitted.explain_all(others[:9])
    same(pickle.loads(pickle.dumps(fitted)), fitted, others)
    for classifier in (loaded, fitted):  # both go on as before
        classifier.partial_fit(others[80:], [-1] * len(others[80:]))
        classifier.partial_fit(rows[:1] + 1, labels[:1])
    same(loaded, fitted, others)
    assert differs(loaded, FewShotClassifier.load(tmp_path / "task.vsm"), others)
    # Without unlabeled images nothing of them is in a file.
    one.fit(model()).save(tmp_path / "plain.vsm")
    assert not len(load_tensors(tmp_path / "plain.vsm")[0]["unlabeled.features"])
    same(FewShotClassifier.load(tmp_path / "plain.vsm"), one.fit(model()), others)


def test_a_classifier_that_was_not_loaded_is_saved_to_the_bit_too(tmp_path: Path) -> None:
    one = task(5)
    fitted = one.fit(learned(), one.others)
    fitted.save(tmp_path / "task.vsm")
    same(FewShotClassifier.load(tmp_path / "task.vsm"), fitted, one.others)


def test_a_file_whose_unlabeled_images_do_not_fit_is_damaged(tmp_path: Path) -> None:
    one, path = task(), tmp_path / "task.vsm"
    one.fit(learned(), one.others).save(path)
    tensors, metadata = load_tensors(path)
    unlabeled = tensors.pop("unlabeled.features")
    assert torch.equal(unlabeled, one.others)
    for changed in (
        {},
        {"unlabeled.features": unlabeled[:, 1:].contiguous()},
        {"unlabeled.features": unlabeled.double()},
        {"unlabeled.features": unlabeled.flatten()},
    ):
        save_tensors(path, tensors | changed, metadata)
        with pytest.raises(RunError, match="is damaged: its parts do not fit") as error:
            FewShotClassifier.load(path)
        assert "\n" not in str(error.value)


def test_estimators_are_cloned_without_what_they_were_fitted_to() -> None:
    one = task()
    fitted = one.fit(learned(), one.others, temperature=1.5, seed=2)
    assert fitted.get_params() == {"encoder": learned(), "temperature": 1.5, "seed": 2}
    copied = clone(fitted)
    assert copied.get_params() == fitted.get_params()
    with pytest.raises(ClassifierError, match="call fit first"):
        copied.predict(one.others)
    same(copied.fit(one.rows, one.labels, one.others), fitted, one.others)
    semi = clone(fitted).fit(
        torch.cat([one.rows, one.others]), [*one.labels, *[-1] * len(one.others)]
    )
    same(semi, fitted, one.others)


@pytest.mark.parametrize("shots", [(1,) * 5, (3, 1, 2, 5, 1)])
def test_the_same_images_are_rejected_as_without_unlabeled_ones(shots: tuple[int, ...]) -> None:
    one = task(6, shots)
    apart, together = one.fit(learned()), one.fit(learned(), one.others)
    strange, _, _ = clustered_features(8, 5, seed=77)
    asked = torch.cat([one.others, strange])
    answers = together.predict(asked)
    assert (answers != apart.predict(asked)).any()
    for coverage in (0.3, 0.6, 0.9):
        rejected, expected = (one.predict(asked, coverage) == -1 for one in (together, apart))
        np.testing.assert_array_equal(rejected, expected)
        assert 0 < rejected.mean() < 1
        given = together.predict(asked, coverage)[~rejected]
        np.testing.assert_array_equal(given, answers[~rejected])
    told = together.explain_all(asked, reject=0.6)
    assert [one.prediction for one in told] == together.predict(asked, 0.6).tolist()


@BOTH
def test_unlabeled_images_are_not_remembered(model: Opener) -> None:
    one = task(7, (2, 1, 1, 1, 1))
    apart, together = one.fit(model()), one.fit(model(), one.others)
    before, explained = together.predict_proba(one.others), together.explain(one.others[0])
    assert together.memory is not None
    held = together.memory.names
    expected, changes = apart.remember(), together.remember()
    assert changes == expected
    assert together.memory is not None
    assert apart.memory is not None
    assert together.memory.names == (*held, *map(str, range(5)))
    assert together.memory.slots.counts[-5:].tolist() == [2, 1, 1, 1, 1]
    for name, tensor in together.memory.memory.tensors().items():
        assert torch.equal(tensor, apart.memory.memory.tensors()[name]), name
    # The answers stay those of before, and the next fit knows what the other one does.
    np.testing.assert_array_equal(together.predict_proba(one.others), before)
    assert together.explain(one.others[0]) == explained
    assert together.remember() == ((), (), ())
    again = task(8)
    for classifier in (apart, together):
        classifier.fit(again.rows, again.labels)
    same(together, apart, again.others)


@BOTH
def test_an_explanation_says_how_many_images_a_class_was_assigned_and_how_far_it_moved(
    model: Opener,
) -> None:
    one = task(9, (2, 1, 3, 1, 1))
    apart, together = one.fit(model()), one.fit(model(), one.others)
    told = together.explain(one.others[0])
    assert told.unlabeled is not None
    assert list(told.unlabeled) == [0, 1, 2, 3, 4]
    assigned = [of_class.images for of_class in told.unlabeled.values()]
    assert min(assigned) > 0
    assert max(assigned) <= sum(assigned) <= len(one.others) + 1e-3
    rows = apart.coordinates(one.rows).double()
    change = (together.prototypes() - apart.prototypes()).double().norm(dim=-1)
    for n, of_class in told.unlabeled.items():
        mean = rows[np.asarray(one.labels) == n].mean(0)
        assert of_class.moved == pytest.approx((change[n] / mean.norm()).item(), rel=1e-3)
        assert of_class.moved > 0.005
    everything = together.explain_all(one.others)
    assert {id(one.unlabeled) for one in everything} == {id(everything[0].unlabeled)}
    plain = told.as_dict()["unlabeled"]
    assert plain == {str(n): one._asdict() for n, one in told.unlabeled.items()}
    # What the memory did is told of the examples alone.
    expected = apart.explain(one.others[0])
    assert (told.moved, told.recalled, told.shots) == (
        expected.moved,
        expected.recalled,
        expected.shots,
    )


def wrong(message: str, do: Callable[[], object], kind: type[Exception] = ClassifierError) -> None:
    with pytest.raises(kind, match=message) as error:
        do()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(value: float) -> None:
    rows, labels, others, _ = one = task()
    broken = others.clone()
    broken[3, 2] = value
    fitted = one.fit(learned(), others)
    before = fitted.predict_proba(others)
    both = torch.cat([rows, broken])
    marked = [*labels, *[-1] * len(broken)]
    wrong("row 3 holds NaN, infinity or a", lambda: fitted.fit(rows, labels, broken))
    wrong("row 8 holds NaN, infinity or a", lambda: fitted.fit(both, marked))
    wrong("row 3 holds NaN", lambda: fitted.partial_fit(broken, [-1] * len(broken)))
    wrong(
        "unlabeled: image 3 has features that are infinite or not a number; leave it out",
        lambda: fitted.fit(rows, labels, Embedded(broken)),
    )
    np.testing.assert_array_equal(fitted.predict_proba(others), before)


def test_an_unlabeled_row_that_is_not_finite_is_counted_among_these() -> None:
    rows, labels, others, _ = one = task()
    broken = others[:9].clone()
    broken[3, 2] = np.nan
    fitted = one.fit(learned(), others[:10])
    wrong("image 3 has", lambda: fitted.partial_fit(Embedded(broken), [-1] * len(broken)))
    both = Embedded(torch.cat([rows, broken]))
    wrong("image 3 has", lambda: fitted.fit(both, [*labels, *[-1] * len(broken)]))


def test_mistakes_are_named_in_one_line() -> None:
    rows, labels, others, _ = one = task()
    open_ = FewShotClassifier(learned())
    narrow = Embedded(others[:, 1:])
    wrong("X has 3 features, but .* 24 features", lambda: open_.fit(rows, labels, others[:, :3]))
    wrong(r"expected what embed .* \[n, 24\], got", lambda: open_.fit(rows, labels, narrow))
    wrong(r"expected rows \[n, D\], got \[24\]", lambda: open_.fit(rows, labels, others[0]))
    wrong("features, not images", lambda: open_.fit(rows, labels, ["a.png"]))
    for nothing in ([-1] * 5, [None] * 5, np.full(5, -1), np.full(5, None)):
        wrong("expected at least one example, got none", partial(open_.fit, rows, nothing))
        wrong("expected at least one example, got none", partial(open_.partial_fit, rows, nothing))
    wrong("labels: expected one for each of 5", lambda: open_.fit(rows, [0, 1, -1]))
    wrong("labels: expected one for each of 5", lambda: open_.fit(rows, [*labels, -1]))
    wrong("the target y is None", lambda: open_.fit(rows, None))  # type: ignore[arg-type]
    wrong("Unknown label type", lambda: open_.fit(rows, [0, 1, "a", -1, -1]))
    wrong("Unknown label type", lambda: open_.fit(rows, [0, 1, np.nan, -1, -1]))
    wrong("call fit first", lambda: open_.predict(rows))
    expected = one.fit(learned(), others)
    same(open_.fit(rows, labels, others), expected, others)
    for nothing in ([-1] * 3, [None] * 3):  # no labels are needed once there are examples
        open_.partial_fit(others[:3], nothing)


def test_labels_of_two_dimensions_are_refused_with_unlabeled_ones_too() -> None:
    wrong(
        r"expected one for each of 4 examples, got \[2, 2\]",
        lambda: FewShotClassifier(learned()).fit(task().rows[:4], [[1, -1], [2, 3]]),
    )


def test_a_model_without_class_statistics_says_what_to_do(
    tmp_path: Path, tiny_dataset: ImageDataset
) -> None:
    rows, labels, others, _ = task()
    message = "needs Gaussian inference, or conjugate inference .*; leave it out, or use another"
    plain = FewShotClassifier()
    wrong(message, lambda: plain.fit(rows, labels, others))
    wrong(message, lambda: plain.fit(torch.cat([rows, others[:1]]), [*labels, -1]))
    plain.fit(rows, labels)
    before = plain.predict_proba(others)
    wrong(message, lambda: plain.partial_fit(others, [-1] * len(others)))
    np.testing.assert_array_equal(plain.predict_proba(others), before)
    images, names = examples(tiny_dataset, {38: 1, 39: 1})
    methods: tuple[Method, ...] = ("protonet", "vsm")  # the latter infers by a network
    for method in methods:
        opened = FewShotClassifier.from_pretrained(write_run(tmp_path / method, method))
        assert opened.encoder is not None
        assert not opened.encoder.can_use_unlabeled
        wrong(message, partial(opened.fit, images, names, images))
        opened.fit(images, names)
    assert learned().can_use_unlabeled
    assert conjugate().can_use_unlabeled


def check(classifier: FewShotClassifier, given: int) -> npt.NDArray[np.float32]:
    """Assert that answers are probabilities, and that no more images are assigned than given."""
    one = task()
    chances = classifier.predict_proba(one.others)
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    told = classifier.explain(one.others[0]).unlabeled
    assert told is not None
    assert all(found.images >= 0 and np.isfinite(found.moved) for found in told.values())
    assert sum(found.images for found in told.values()) <= given * (1 + 1e-4)
    return chances


@BOTH
def test_few_or_equal_unlabeled_images_do_no_harm(model: Opener) -> None:
    one = task()
    expected = one.fit(model()).score(one.others, one.truth)
    for given in (1, 2, 3):  # fewer than there are classes
        classifier = one.fit(model(), one.others[:given])
        check(classifier, given)
        assert abs(classifier.score(one.others, one.truth) - expected) < 0.08
    same_image = one.fit(model(), one.others[:1].expand(100, -1))
    check(same_image, 100)
    assert len(np.unique(same_image.predict(one.others))) == 5, "every class is still there"
    check(one.fit(model(), one.rows[:1].expand(100, -1)), 100)
    check(one.fit(model(), torch.zeros(10, 24)), 10)


def test_a_single_class_can_be_fitted() -> None:
    one = task()
    classifier = FewShotClassifier(learned()).fit(one.rows[:1], ["only"], one.others)
    assert (classifier.predict_proba(one.others) == 1).all()
    told = classifier.explain(one.others[0]).unlabeled
    assert told is not None
    assert 0 < told["only"].images < len(one.others), "some are of no class"


@pytest.mark.parametrize("size", [1e3, 1e10, 1e20, 3e38])
def test_outliers_that_are_far_from_everything_change_no_answer(size: float) -> None:
    one = task()
    directions = torch.randn(60, 24, generator=torch.Generator().manual_seed(1))
    far = directions / directions.abs().amax(-1, keepdim=True) * size
    without, among = (torch.zeros(0, 24), one.others)
    for others in (without, among):
        expected = one.fit(learned(normalize=False), others, temperature=1.0)
        found = one.fit(learned(normalize=False), torch.cat([others, far]), temperature=1.0)
        if others is without:  # with others, the shares of classes are less certain
            chances = expected.predict_proba(one.others)
            np.testing.assert_allclose(found.predict_proba(one.others), chances, atol=1e-3)
        told = found.explain(one.others[0]).unlabeled
        assert told is not None
        assert sum(of_class.images for of_class in told.values()) <= len(others) + 1e-3
        assert found.score(one.others, one.truth) > expected.score(one.others, one.truth) - 0.03


@pytest.mark.parametrize(("shots", "is_linear"), [((2,) * 5, True), ((1, 2, 1, 1, 1), False)])
def test_later_images_are_classified_by_the_same_scores(
    shots: tuple[int, ...], is_linear: bool
) -> None:
    one = task(10, shots)
    given, later = one.others[::2], one.others[1::2]
    classifier = one.fit(learned(), given, temperature=1.0)
    fitted = classifier._fitted
    assert fitted is not None
    assert (fitted._linear is not None) == is_linear
    chances = classifier.predict_proba(later)
    scores = fitted.posterior.scores(classifier.coordinates(later).unsqueeze(0))[0]
    np.testing.assert_allclose(chances, scores.softmax(-1), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(classifier.predict(later), chances.argmax(1))
    for n in range(3):  # whoever else is asked about
        np.testing.assert_allclose(
            classifier.predict_proba(later[n : n + 1]), chances[n : n + 1], rtol=1e-5
        )
    truth = one.truth[1::2]
    gains = []
    for seed in range(10, 20):
        one = task(seed, shots)
        pair = (one.fit(learned(), unlabeled) for unlabeled in (None, one.others[::2]))
        apart, together = (fit.score(one.others[1::2], truth) for fit in pair)
        gains.append(together - apart)
    assert np.mean(gains) > 0.02, "they help with others of their kind"


# Images


class Drawings(NamedTuple):
    """Glyphs of five new characters."""

    support: list[Any]
    labels: list[str]
    queries: list[Any]
    truth: list[str]


def drawings(first: int = 0, shot: int = 1, asked: int = 8) -> Drawings:
    glyphs = open_images("glyphs")
    chosen = glyphs.classes("test")[first : first + 5].tolist()
    support = examples(glyphs, dict.fromkeys(chosen, shot))
    return Drawings(*support, *examples(glyphs, dict.fromkeys(chosen, asked), shot))


def test_unlabeled_drawings_help_a_shipped_model(tmp_path: Path) -> None:
    classifier = FewShotClassifier.from_pretrained(MODEL)
    before, after = [], []
    for first in range(0, 40, 5):
        support, labels, queries, truth = drawings(first)
        before.append(classifier.fit(support, labels).score(queries, truth))
        after.append(classifier.fit(support, labels, queries).score(queries, truth))
    assert np.mean(after) > np.mean(before) + 0.02
    # The same images as files, or embedded, or among the others without a label, or none.
    expected = classifier.predict_proba(queries)
    paths = []
    for number, image in enumerate(queries):
        paths.append(tmp_path / f"{number:02}.png")
        Image.fromarray(image[..., 0]).save(paths[-1])
    for kind in (paths, classifier.embed(queries), np.stack(queries)):
        found = classifier.fit(support, labels, kind).predict_proba(queries)
        np.testing.assert_array_equal(found, expected)
    mixed = classifier.fit([*support, *paths], [*labels, *[None] * len(paths)])
    np.testing.assert_array_equal(mixed.predict_proba(queries), expected)
    plain = classifier.fit(support, labels).predict_proba(queries)
    np.testing.assert_array_equal(classifier.fit(support, labels, []).predict_proba(queries), plain)
    (tmp_path / "bad.png").write_text("not an image")
    broken = [*paths, tmp_path / "bad.png"]
    wrong(r"bad\.png: unreadable", lambda: classifier.fit(support, labels, broken), DataError)
    np.testing.assert_array_equal(classifier.predict_proba(queries), plain)


def blank(number: int, random: np.random.Generator) -> list[Any]:
    return [np.zeros((28, 28, 1), np.uint8)] * number


def noise(number: int, random: np.random.Generator) -> list[Any]:
    return list(random.integers(0, 256, (number, 28, 28, 1)).astype(np.uint8))


def one_other_class(number: int, random: np.random.Generator) -> list[Any]:
    glyphs = open_images("glyphs")
    other = int(random.choice(glyphs.classes("validation")))
    return examples(glyphs, {other: 20})[0] * (number // 20)


@pytest.mark.parametrize("kind", [blank, noise, one_other_class])
def test_images_of_no_class_that_are_alike_do_no_harm(
    kind: Callable[[int, np.random.Generator], list[Any]],
) -> None:
    classifier, random = FewShotClassifier.from_pretrained(MODEL), np.random.default_rng(0)
    gains = []
    for first in range(0, 40, 5):
        support, labels, queries, truth = drawings(first)
        asked = classifier.embed(queries)
        before = classifier.fit(support, labels).score(asked, truth)
        among = classifier.embed([*queries, *kind(40, random)])
        gains.append(classifier.fit(support, labels, among).score(asked, truth) - before)
    assert np.mean(gains) > -0.02


# The command line


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> tuple[Path, Path]:
    """Drawings of five characters by folder, and others of them in one folder."""
    root = tmp_path_factory.mktemp("drawings")
    given = drawings(10, asked=4)
    for part, images, labels in (
        ("support", given.support, given.labels),
        ("query", given.queries, ["mixed"] * len(given.queries)),
    ):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = root / part / label.replace("/", " ")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).save(folder / f"{number:02}.png")
    return root / "support", root / "query"


def fitted_to(folders: tuple[Path, Path], *queries: Path) -> tuple[list[Path], FewShotClassifier]:
    """What Python says: the images, and the classifier that was fitted to all of them."""
    images = list(queries) or images_below(folders[1])
    classifier = FewShotClassifier.from_pretrained(MODEL)
    return images, classifier.fit(*labeled_images(folders[0]), unlabeled=images)


def classify(folders: tuple[Path, Path], *more: str, query: Path | None = None) -> list[str]:
    asked = str(query or folders[1])
    command = ["classify", "--support", str(folders[0]), "--query", asked, "--model", MODEL]
    return [*command, "--transductive", *more]


def test_programs_are_told_what_python_answers(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    images, classifier = fitted_to(folders)
    assert main(classify(folders, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == classifier.classes_.tolist()
    assert [one["image"] for one in told["answers"]] == [str(path) for path in images]
    assert [one["prediction"] for one in told["answers"]] == classifier.predict(images).tolist()
    chances = [list(one["probabilities"].values()) for one in told["answers"]]
    np.testing.assert_allclose(chances, classifier.predict_proba(images), rtol=1e-6)
    # Without the option the answers are others.
    inductive = [word for word in classify(folders, "--json") if word != "--transductive"]
    assert main(inductive) == 0
    apart = json.loads(capsys.readouterr().out)["answers"]
    others = [list(one["probabilities"].values()) for one in apart]
    assert not np.allclose(others, chances, atol=1e-2)
    # Rejection is that of Python, which is that without unlabeled images.
    assert main(classify(folders, "--json", "--reject", "0.4")) == 0
    careful = [one["prediction"] for one in json.loads(capsys.readouterr().out)["answers"]]
    assert careful == classifier.predict(images, 0.4).tolist()
    assert 0 < careful.count("none of these") < len(images)


def test_reasons_and_tables_are_those_of_python(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, classifier = fitted_to(folders)
    expected = classifier.explain_all(images)
    assert main(classify(folders, "--json", "--explain")) == 0
    told = json.loads(capsys.readouterr().out)["answers"]
    found = expected[0].unlabeled
    assert found is not None
    for one in told:
        for label, of_class in one["unlabeled"].items():
            assert of_class == pytest.approx(found[label]._asdict(), rel=1e-5, abs=1e-6)
    assert [one["uncertainty"] for one in told] == [
        pytest.approx(one.uncertainty._asdict(), rel=1e-4, abs=1e-6) for one in expected
    ]
    assert main(classify(folders, "--csv", str(tmp_path / "answers.csv"), "--reject", "0.4")) == 0
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["answer"] for row in rows] == classifier.predict(images, 0.4).tolist()
    chances = [[float(row[label]) for label in classifier.classes_] for row in rows]
    np.testing.assert_allclose(chances, classifier.predict_proba(images), atol=1e-6)
    capsys.readouterr()
    assert main(classify(folders, "--explain")) == 0
    table = capsys.readouterr().out
    assert "what unlabeled images added" in table
    first = next(iter(found.values()))
    [row] = [line for line in table.splitlines() if f" {first.images:.1f} │" in line][:1]
    assert f"{first.moved:.0%}" in row
    assert "what the memory recalled" in table


def test_one_query_is_a_set_too(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = images_below(folders[1])[0]
    images, classifier = fitted_to(folders, alone)
    assert main(classify(folders, "--json", "--explain", query=alone)) == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    [chances] = classifier.predict_proba(images)
    assert list(answer["probabilities"].values()) == pytest.approx(chances.tolist(), rel=1e-6)
    assert 0 < sum(one["images"] for one in answer["unlabeled"].values()) <= 1


KEYS = ("image", "gain", "novelty", "stands_for")


def test_suggestions_guess_by_what_was_inferred_together(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    support, query = folders
    command = ["suggest", "--support", str(support), "--unlabeled", str(query), str(support)]
    options = ["--number", "6", "--model", MODEL, "--json"]
    told = []
    for together in ([], ["--transductive"]):
        assert main([*command, *options, *together]) == 0
        told.append(json.loads(capsys.readouterr().out))
    images, classifier = fitted_to(folders)
    for found, fitted in (
        (told[1], classifier),
        (told[0], FewShotClassifier.from_pretrained(MODEL).fit(*labeled_images(support))),
    ):
        assert found["unlabeled"] == len(images), "images with a label are not among them"
        expected = fitted.suggest(images, 6)
        assert [one["image"] for one in found["suggestions"]] == [
            str(images[one.image]) for one in expected
        ]
        for one, other in zip(found["suggestions"], expected, strict=True):
            assert list(one["probabilities"].values()) == pytest.approx(
                list(other.probabilities), rel=1e-4
            )
            assert one["gain"] == pytest.approx(other.gain, rel=1e-4)
    # The same images are asked about, with other guesses.
    of_both = [[one[key] for one in found["suggestions"]] for found in told for key in KEYS]
    assert of_both[: len(KEYS)] == of_both[len(KEYS) :]
    guesses = [[one["probabilities"] for one in found["suggestions"]] for found in told]
    assert guesses[0] != guesses[1]


def test_a_run_that_cannot_is_refused_in_one_line(
    tmp_path: Path, tiny_dataset: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path / "run", "protonet"))
    images = str(write_folders(tmp_path / "images", tiny_dataset, 3))
    episodes = ["--split", "all", "--way", "3", "--queries", "2", "--episodes", "2", "--json"]
    for command in (
        ["evaluate", run, "--data", f"folder:{images}", *episodes],
        ["compare", run, "--baselines", "cosine", "--data", f"folder:{images}", *episodes],
        ["classify", "--support", images, "--query", images, "--model", run, "--json"],
    ):
        assert main([*command, "--transductive"]) == 2
        printed = capsys.readouterr()
        assert not printed.out
        [line] = printed.err.splitlines()
        assert line.startswith(f"vsm {command[0]}: transductive: needs Gaussian inference")
        assert "leave it out, or use another model" in line
        assert main(command) == 0
        capsys.readouterr()


def test_baselines_of_the_lab_are_compared_with_runs_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vsm.runs.trained_model.TUNING_EPISODES", 8)
    asked = ["compare", MODEL, "--queries", "5", "--episodes", "4", "--json", "--transductive"]
    assert main([*asked, "--baselines", "label-propagation,alpha-tim"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["run"] for one in told["runs"]] == [MODEL, f"{MODEL}, transductive"]
    assert [one["transductive"] for one in told["runs"]] == [False, True]
    assert [one["method"] for one in told["baselines"]] == ["label-propagation", "alpha-tim"]
    assert {one["features_of"] for one in told["baselines"]} == {MODEL}
    settings = [set(one["baseline_settings"]) for one in told["baselines"]]
    assert settings == [{"neighbors", "width", "alpha"}, {"sharpness", "alpha"}]
    assert len(told["differences"]) == 6
    assert {(one["a"], one["b"]) for one in told["differences"]} >= {
        (f"{MODEL}, transductive", MODEL),
        (f"{MODEL}, transductive", "alpha-tim"),
    }


def test_an_unknown_baseline_is_told_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", MODEL, "--baselines", "label-propagation,no-such"]
    assert main(asked) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vsm compare: baselines: unknown baseline 'no-such'; known: simpleshot")
    listed = line.split("known: ")[1].split(", ")
    of_the_lab = listed[len(BASELINE_NAMES) :]
    assert listed[: len(BASELINE_NAMES)] == [*BASELINE_NAMES]
    assert sorted(of_the_lab) == [
        "alpha-tim",
        "label-propagation",
        "laplacian-shot",
        "pt-map",
        "soft-kmeans",
        "stat-a",
        "tim",
    ]
    # What people install has no lab.
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "vsm_lab" else find(name)
    )
    assert main(asked) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"baseline 'label-propagation'; known: {', '.join(BASELINE_NAMES)}")
