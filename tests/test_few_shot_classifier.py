"""The classifier of a few images: what it answers is what the model computes, and it lasts."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from torch import Tensor

from classify_helpers import (
    CLASSES,
    clustered_features,
    examples,
    tiny_model,
    write_run,
)
from vsm import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.data import ImageDataset, open_images
from vsm.data.images import Preprocessing
from vsm.encoders import Encoder
from vsm.errors import ClassifierError, DataError, MemoryFileError, RunError, VsmError
from vsm.evaluation.calibration import Calibration
from vsm.memory.posterior import split_uncertainty
from vsm.model import FewShotModel
from vsm.nn.layers import predictive
from vsm.runs.loading import load, read_memory
from vsm.runs.trained_model import TrainedModel, made_in_memory
from vsm.seeding import generator
from vsm.settings import METHODS, Method, RunSettings
from vsm.system.tensor_files import load_tensors, save_tensors

EVEN = dict.fromkeys(CLASSES, 2)
UNEVEN = dict(zip(CLASSES, (1, 4, 2, 1, 3), strict=True))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., FewShotClassifier]:
    """Open an untrained run of a method, with names of the tiny dataset in its memory."""

    def open_(method: Method = "vsm", **parameters: Any) -> FewShotClassifier:
        return FewShotClassifier.from_pretrained(write_run(tmp_path / method, method), **parameters)

    return open_


def queries_of(dataset: ImageDataset) -> tuple[list[Any], list[str]]:
    return examples(dataset, dict.fromkeys(CLASSES, 4), first=8)


def embedded(
    dataset: ImageDataset, method: Method, shots: dict[int, int], first: int = 0
) -> Tensor:
    """Embed images as training does: ``[n, D]``."""
    ids = np.concatenate([dataset.image_ids(c)[first : first + k] for c, k in shots.items()])
    with torch.no_grad():
        features: Tensor = tiny_model(method).embed(dataset.normalize(dataset.load(ids)))
    return features


@pytest.mark.parametrize("method", METHODS)
def test_probabilities_are_those_of_the_models_forward_pass(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset, method: Method
) -> None:
    classifier = opened(method).fit(*examples(tiny_dataset, EVEN))
    ours = classifier.predict_proba(queries_of(tiny_dataset)[0])

    model, memory = tiny_model(method), classifier.memory
    support = embedded(tiny_dataset, method, EVEN).view(1, 5, 2, -1)
    queries = embedded(tiny_dataset, method, dict.fromkeys(CLASSES, 4), 8).view(1, 5, 4, -1)
    with torch.no_grad():
        random = generator(0, "classify")
        prediction = model(support, queries, memory and memory.memory, random)
    expected = predictive(prediction.log_probabilities).exp()[0]
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=1e-5, atol=1e-6)


def test_classes_are_inferred_once_and_when_they_are_asked_for(
    opened: Callable[..., FewShotClassifier],
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    infer, calls = FewShotModel.infer, 0

    def counting(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return infer(*given)

    monkeypatch.setattr(FewShotModel, "infer", counting)
    images = queries_of(tiny_dataset)[0]
    expected = opened("vsm").fit(*examples(tiny_dataset, EVEN)).predict_proba(images)
    classifier = opened("vsm").fit(*examples(tiny_dataset, EVEN))
    assert calls == 1
    classifier.remember()  # what is fitted goes on recalling the memory without it
    np.testing.assert_array_equal(classifier.predict_proba(images), expected)
    classifier.predict(images)
    classifier.explain_all(images)
    classifier.remember()
    np.testing.assert_array_equal(classifier.predict_proba(images), expected)
    assert calls == 2


def test_features_of_another_width_are_refused_before_anything_changes(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    classifier = opened("vsm").fit(*examples(tiny_dataset, EVEN))
    images = queries_of(tiny_dataset)[0]
    before = classifier.predict_proba(images)
    width = classifier.encoder.model.num_features if classifier.encoder else 0
    others = Embedded(torch.ones(2, width + 1))
    message = rf"images: expected what embed .* features \[n, {width}\], got \[2, {width + 1}\]"
    for ask in (
        lambda: classifier.fit(others, ["a", "b"]),
        lambda: classifier.partial_fit(others, ["a", "b"]),
        lambda: classifier.predict(others),
        lambda: classifier.predict_proba(others),
    ):
        with pytest.raises(ClassifierError, match=message):
            ask()
    np.testing.assert_array_equal(classifier.predict_proba(images), before)


def test_classes_of_different_sizes_are_told_by_their_means(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    classifier = opened("vsm").fit(*examples(tiny_dataset, UNEVEN))
    ours = classifier.predict_proba(queries_of(tiny_dataset)[0])

    parts = embedded(tiny_dataset, "vsm", UNEVEN).split(list(UNEVEN.values()))
    means = torch.stack([part.mean(0) for part in parts]).view(1, 5, 1, -1)
    queries = embedded(tiny_dataset, "vsm", dict.fromkeys(CLASSES, 4), 8).view(1, 5, 4, -1)
    memory = classifier.memory
    assert memory is not None
    with torch.no_grad():  # the paper's network sees a class's mean alone
        prediction = tiny_model("vsm")(means, queries, memory.memory, generator(0, "classify"))
    expected = predictive(prediction.log_probabilities).exp()[0]
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=1e-5, atol=1e-6)


def test_new_images_of_easy_classes_are_recognized(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    for shots in (dict.fromkeys(CLASSES, 1), UNEVEN):
        classifier = opened("protonet").fit(*examples(tiny_dataset, shots))
        assert (
            classifier.score(*queries_of(tiny_dataset)) > 0.5
        )  # of an untrained network; chance is 0.2


def test_images_of_every_kind_are_the_same_image(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    classifier = opened().fit(*examples(tiny_dataset, EVEN))
    arrays, _ = queries_of(tiny_dataset)
    images = [Image.fromarray(array[..., 0]) for array in arrays]
    paths = []
    for number, image in enumerate(images):
        paths.append(tmp_path / f"{number}.png")
        image.save(paths[-1])
    stacked = np.stack(arrays)
    kinds: list[Any] = [
        paths,
        [str(path) for path in paths],
        np.asarray([str(path) for path in paths]),
        images,
        stacked,
        stacked[..., 0],
        stacked.astype(np.float32) / 255,
        stacked.astype(np.float64) / 255,
        torch.from_numpy(stacked).permute(0, 3, 1, 2),
        torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255,
        [image.convert("RGB") for image in images],
        [paths[0], images[1], arrays[2], torch.from_numpy(arrays[3])[..., 0], *images[4:]],
    ]
    expected = classifier.predict_proba(arrays)
    for kind in kinds:
        np.testing.assert_array_equal(classifier.predict_proba(kind), expected)


def test_images_are_prepared_as_the_dataset_was(tiny_dataset: ImageDataset) -> None:
    form = Preprocessing.of(tiny_dataset)
    assert form is not None
    assert form.input_shape == tiny_dataset.input_shape
    assert Preprocessing.from_dict(json.loads(json.dumps(asdict(form)))) == form
    ids = np.arange(10, 30)
    pixels = form.pixels(list(tiny_dataset.images[ids]))
    assert torch.equal(pixels, tiny_dataset.load(ids))
    assert torch.equal(form.normalize(pixels), tiny_dataset.normalize(tiny_dataset.load(ids)))


def test_ink_is_ink_on_light_and_on_dark_paper(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    light_on_dark = (255 * (random.random((105, 105)) < 0.1)).astype(np.uint8)
    form = Preprocessing(28, 1, True, mean=(0.5,), std=(0.5,))
    one, other = form.pixels([light_on_dark, 255 - light_on_dark])
    assert torch.equal(one, other)
    assert one.float().mean() < 127
    plain = Preprocessing(28, 1, mean=(0.5,), std=(0.5,))
    assert not torch.equal(*plain.pixels([light_on_dark, 255 - light_on_dark]))


def test_other_sizes_and_colors_are_made_to_fit(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    images, labels = examples(tiny_dataset, EVEN)
    large = [
        Image.fromarray(image[..., 0]).resize((56, 56), Image.Resampling.NEAREST).convert("RGBA")
        for image in images
    ]
    classifier = opened("protonet").fit(large, labels)
    assert (
        classifier.score(*queries_of(tiny_dataset)) > 0.5
    )  # of an untrained network; chance is 0.2


def test_labels_may_be_integers_and_classes_are_sorted(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    images, names = examples(tiny_dataset, EVEN)
    numbers = [9 - 2 * int(name[-1]) for name in names]
    kinds: list[Any] = [numbers, np.asarray(numbers), torch.tensor(numbers)]
    for labels in kinds:
        classifier = opened("protonet").fit(images, labels)
        assert classifier.classes_.tolist() == sorted(set(numbers))
        answers = classifier.predict(images)
        assert answers.dtype.kind == "i"
        assert (answers == np.asarray(numbers)).all()


def test_more_examples_are_as_good_as_all_at_once(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    images, labels = examples(tiny_dataset, UNEVEN)
    asked = queries_of(tiny_dataset)[0]
    expected = opened().fit(images, labels).predict_proba(asked)
    at_once = opened().partial_fit(images, labels)
    np.testing.assert_array_equal(at_once.predict_proba(asked), expected)
    # Another class first, then more of an old one together with new ones.
    by_parts = opened().fit(images[5:], labels[5:]).partial_fit(images[:5], labels[:5])
    assert by_parts.classes_.tolist() == sorted(set(labels))
    np.testing.assert_allclose(by_parts.predict_proba(asked), expected, rtol=1e-4, atol=1e-5)
    # Fitting again begins anew.
    by_parts.fit(images[:5], labels[:5])
    assert by_parts.classes_.tolist() == sorted(set(labels[:5]))


def test_the_same_inputs_give_the_same_answers(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    asked = queries_of(tiny_dataset)[0]
    first, second = (opened().fit(*examples(tiny_dataset, EVEN)) for _ in range(2))
    expected = first.predict_proba(asked)
    torch.manual_seed(3)  # the global generator has no say
    np.testing.assert_array_equal(second.predict_proba(asked), expected)
    np.testing.assert_array_equal(first.predict_proba(asked), expected)
    other = opened(seed=1).fit(*examples(tiny_dataset, EVEN))
    assert not np.array_equal(other.predict_proba(asked), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_classifier_is_the_same_to_the_bit(
    opened: Callable[..., FewShotClassifier],
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    method: Method,
) -> None:
    classifier = opened(method, temperature=1.5, seed=4).fit(*examples(tiny_dataset, UNEVEN))
    if classifier.memory is not None:
        classifier.remember()
    asked = queries_of(tiny_dataset)[0]
    classifier.save(tmp_path / "shapes.vsm")
    loaded = FewShotClassifier.load(tmp_path / "shapes.vsm")
    expected = classifier.predict_proba(asked)
    np.testing.assert_array_equal(loaded.predict_proba(asked), expected)
    assert loaded.explain(asked[0]) == classifier.explain(asked[0])
    assert loaded.classes_.tolist() == classifier.classes_.tolist()
    # It goes on as the other does, also with its memory.
    more = examples(tiny_dataset, {43: 2, 38: 1}, first=5)
    for one in (loaded, classifier):
        one.partial_fit(*more)
    np.testing.assert_array_equal(loaded.predict_proba(asked), classifier.predict_proba(asked))
    if classifier.memory is not None:
        assert loaded.remember() == classifier.remember()
    loaded.save(tmp_path / "again.vsm")
    again = FewShotClassifier.load(tmp_path / "again.vsm")
    np.testing.assert_array_equal(again.predict_proba(asked), loaded.predict_proba(asked))


def test_a_classifier_file_that_is_none_or_was_changed_is_refused(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    path = tmp_path / "shapes.vsm"
    classifier = opened()
    with pytest.raises(ClassifierError, match="knows no classes yet; call fit first"):
        classifier.save(path)
    assert not path.exists()
    classifier.fit(*examples(tiny_dataset, EVEN)).save(path)
    tensors, metadata = load_tensors(path)
    name = next(name for name in tensors if name.startswith("model.backbone"))
    save_tensors(path, tensors | {name: tensors[name] + 1}, metadata)
    with pytest.raises(RunError, match=r"says that its encoder is conv4 of tiny \[.*but it holds"):
        FewShotClassifier.load(path)
    save_tensors(path, tensors, metadata | {"format": 99})
    with pytest.raises(RunError, match="has format 99, but this version reads 4"):
        FewShotClassifier.load(path)
    save_tensors(path, tensors, {name: metadata[name] for name in metadata if name != "labels"})
    with pytest.raises(RunError, match=r"damaged: its parts do not fit \(KeyError\('labels'"):
        FewShotClassifier.load(path)
    for changed in (
        {"support.sizes": tensors["support.sizes"].double()},
        {"support.sizes": tensors["support.sizes"] + 1},
        {"support.remembered": tensors["support.sizes"] + 1},
        {"support.remembered": tensors["support.remembered"].double()},
        {"support.features": tensors["support.features"].double()},
        {"support.features": tensors["support.features"][:, 1:]},
    ):
        save_tensors(path, tensors | changed, metadata)
        with pytest.raises(RunError, match=r"is damaged: its parts do not fit"):
            FewShotClassifier.load(path)
    with pytest.raises(RunError, match="does not hold a classifier"):
        FewShotClassifier.load(tmp_path / "vsm" / "memory.safetensors")
    (tmp_path / "pickle.vsm").write_bytes(b"\x80\x04.")
    with pytest.raises(RunError, match="is damaged"):
        FewShotClassifier.load(tmp_path / "pickle.vsm")


@pytest.mark.parametrize("method", ["rote", "vsm", "kanerva"])
def test_remembering_leaves_answers_as_they_are_and_reading_leaves_the_memory(
    opened: Callable[..., FewShotClassifier],
    tiny_dataset: ImageDataset,
    tmp_path: Path,
    method: Method,
) -> None:
    classifier = opened(method).fit(*examples(tiny_dataset, UNEVEN))
    on_disk = (tmp_path / method / "memory.safetensors").read_bytes()
    asked = queries_of(tiny_dataset)[0]
    assert classifier.memory is not None
    before = {name: t.clone() for name, t in classifier.memory.memory.tensors().items()}
    expected = classifier.predict_proba(asked)
    classifier.explain(asked[0])
    for name, tensor in classifier.memory.memory.tensors().items():
        assert torch.equal(tensor, before[name])
    held = classifier.memory
    classifier.remember()
    np.testing.assert_array_equal(classifier.predict_proba(asked), expected)
    for name, tensor in held.memory.tensors().items():
        assert torch.equal(tensor, before[name]), "a memory is a value"
    assert any(
        tensor.shape != before[name].shape or not torch.equal(tensor, before[name])
        for name, tensor in classifier.memory.memory.tensors().items()
    )
    assert (tmp_path / method / "memory.safetensors").read_bytes() == on_disk


def test_every_example_is_remembered_once_under_its_label(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    classifier = opened("rote").fit(*examples(tiny_dataset, UNEVEN))
    names = tuple(tiny_dataset.class_names[c] for c in CLASSES)
    assert classifier.remember() == (names, (), ())
    assert classifier.remember() == ((), (), ())
    assert classifier.memory is not None
    assert classifier.memory.names[-5:] == names
    assert classifier.memory.slots.counts[-5:].tolist() == list(UNEVEN.values())
    for features, content in zip(
        embedded(tiny_dataset, "rote", UNEVEN).split(list(UNEVEN.values())),
        classifier.memory.slots.content[-5:],
        strict=True,
    ):
        torch.testing.assert_close(content, features.mean(0))
    classifier.partial_fit(*examples(tiny_dataset, {38: 2, 43: 1}, first=5))
    assert classifier.remember() == ((tiny_dataset.class_names[43],), (names[0],), ())
    assert classifier.memory.slots.counts[-6:].tolist() == [3, 4, 2, 1, 3, 1]
    assert [event["action"] for event in classifier.memory.provenance] == [
        "trained",
        "added",
        "added",
    ]


def state_of(trained: TrainedModel) -> dict[str, Tensor]:
    """A copy of all numbers of a trained model."""
    assert trained.memory is not None
    tensors = {**trained.model.state_dict(), **trained.memory.memory.tensors()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("method", ["rote", "vsm", "kanerva"])
def test_a_trained_model_is_shared_by_classifiers_and_never_changed(
    tiny_dataset: ImageDataset, tmp_path: Path, method: Method
) -> None:
    trained = load(write_run(tmp_path / method, method))
    assert trained.memory is not None
    before, metadata = state_of(trained), trained.memory.metadata()
    asked = queries_of(tiny_dataset)[0]
    one, other = FewShotClassifier(trained), FewShotClassifier(trained)
    expected = other.fit(*examples(tiny_dataset, EVEN, first=2)).predict_proba(asked)
    one.fit(*examples(tiny_dataset, UNEVEN)).predict(asked)
    one.explain(asked[0])
    one.remember()
    one.partial_fit(*examples(tiny_dataset, {43: 2})).remember()
    one.fit(*examples(tiny_dataset, EVEN)).predict(asked)
    assert one.encoder is other.encoder is trained
    after = state_of(trained)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not trained.model.training
    assert trained.memory.metadata() == metadata
    again = FewShotClassifier(trained).fit(*examples(tiny_dataset, EVEN, first=2))
    np.testing.assert_array_equal(again.predict_proba(asked), expected)


def test_images_that_were_embedded_once_serve_every_method(
    opened: Callable[..., FewShotClassifier],
    tiny_dataset: ImageDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classifier = opened().fit(*examples(tiny_dataset, UNEVEN))
    asked, truth = queries_of(tiny_dataset)
    answers, chances = classifier.predict(asked), classifier.predict_proba(asked)
    explained, score = classifier.explain_all(asked), classifier.score(asked, truth)
    embedded_once = classifier.embed(asked)
    assert embedded_once.features.shape == (len(asked), tiny_model().num_features)
    monkeypatch.setattr(Encoder, "embed", None)
    np.testing.assert_array_equal(classifier.predict(embedded_once), answers)
    np.testing.assert_array_equal(classifier.predict_proba(embedded_once), chances)
    assert classifier.explain_all(embedded_once) == explained
    assert classifier.score(embedded_once, truth) == score
    assert [one.prediction for one in explained] == answers.tolist()


def new_classes(seed: int) -> tuple[Tensor, list[str]]:
    """Five classes that were not there when the memory was learned: features and labels."""
    features, class_ids, names = clustered_features(5, 40, seed=100 + seed)
    return features, [f"new-{names[c]}" for c in class_ids]


def test_what_was_remembered_never_lowers_accuracy_and_helps_with_fewer_examples() -> None:
    features, class_ids, names = clustered_features(64, 20)
    learned = FewShotClassifier().learn_memory(features, [names[c] for c in class_ids])
    fresh, same, before, after = [], [], [], []
    for seed in range(20):
        classifier = FewShotClassifier(learned.encoder)
        rows, labels = new_classes(seed)
        where = np.arange(200).reshape(5, 40)
        few, others, asked = where[:, 0], where[:, 1:9].ravel(), where[:, 9:].ravel()
        of = [labels[row] for row in asked]
        before.append(
            classifier.fit(rows[few], [labels[row] for row in few]).score(rows[asked], of)
        )
        classifier.remember()
        after.append(classifier.score(rows[asked], of))
        same.append(classifier.fit(rows[few], [labels[row] for row in few]).score(rows[asked], of))
        classifier.fit(rows[others], [labels[row] for row in others]).remember()
        fresh.append(classifier.fit(rows[few], [labels[row] for row in few]).score(rows[asked], of))
    assert after == before
    assert abs(np.mean(same) - np.mean(before)) < 0.005
    assert np.mean(fresh) > np.mean(before) + 0.05


@pytest.mark.usefixtures("all_glyphs")
def test_a_shipped_model_never_does_worse_on_classes_that_it_remembers() -> None:
    glyphs = open_images("glyphs")
    learner, control = (FewShotClassifier.from_pretrained("glyphs-5w1s") for _ in range(2))
    order = np.random.default_rng(0).permutation(glyphs.classes("test"))
    tasks = [chosen.tolist() for chosen in order[:150].reshape(30, 5)]  # no class twice

    def of(chosen: list[int], first: int, count: int) -> tuple[list[Any], list[str]]:
        return examples(glyphs, dict.fromkeys(chosen, count), first)

    before = []
    for number, chosen in enumerate(tasks):
        few, asked = of(chosen, 0, 1), of(chosen, 6, 6)
        before.append(control.fit(*few).score(*asked))
        if number % 3 == 0:  # the examples that will be met again
            learner.fit(*few).remember()
        else:  # one other example, or five
            learner.fit(*of(chosen, 1, 1 if number % 3 == 1 else 5)).remember()
    after = [learner.fit(*of(chosen, 0, 1)).score(*of(chosen, 6, 6)) for chosen in tasks]
    gain = np.subtract(after, before).reshape(10, 3)
    assert abs(gain[:, 0].mean()) < 0.02, "evidence that was met before counts once"
    assert gain[:, 1].mean() > 0.01
    assert gain[:, 2].mean() > 0.03
    assert gain.min() > -0.1, "of thirty questions, one or two more answers may be bad luck"


def test_one_image_is_no_batch_and_a_saved_classifier_no_run(tmp_path: Path) -> None:
    glyphs = open_images("glyphs")
    images, labels = examples(glyphs, {0: 1, 1: 1})
    classifier = FewShotClassifier.from_pretrained("glyphs-5w1s").fit(images, labels)
    with pytest.raises(ClassifierError, match="got one; use a list"):
        classifier.predict(np.zeros((28, 28, 3), np.uint8))
    classifier.save(tmp_path / "mine.vsm")
    with pytest.raises(RunError, match=r"mine\.vsm is a file; .* FewShotClassifier\.load"):
        FewShotClassifier.from_pretrained(tmp_path / "mine.vsm")


def test_remembering_under_the_name_of_a_trained_class_never_does_harm() -> None:
    glyphs = open_images("glyphs")
    learner = FewShotClassifier.from_pretrained("glyphs-5w1s")
    assert learner.encoder is not None
    assert learner.encoder.memory is not None
    names = learner.encoder.memory.names[:25]  # whose slots are made of other characters
    before, after = [], []
    for number, chosen in enumerate(np.split(np.asarray(glyphs.classes("test"))[:25], 5)):
        shots = dict.fromkeys(chosen.tolist(), 2)
        taken = [names[5 * number + n] for n in range(5) for _ in range(2)]
        asked = examples(glyphs, shots, 6)[0]
        before.append(learner.fit(examples(glyphs, shots, 2)[0], taken).score(asked, taken))
        learner.fit(examples(glyphs, shots)[0], taken).remember()
        again = learner.fit(examples(glyphs, shots, 2)[0], taken)
        told = again.explain(asked[0])
        assert set(told.shots.values()) == {2}
        assert set(told.remembered.values()) == {0}, "the slot is not made of these images"
        after.append(again.score(asked, taken))
    assert np.mean(after) > np.mean(before) - 0.05


def test_an_explanation_says_what_the_model_computed(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    classifier = opened().fit(*examples(tiny_dataset, UNEVEN))
    [asked, *_] = queries_of(tiny_dataset)[0]
    told = classifier.explain(asked, num_recalled=3)
    labels = classifier.classes_.tolist()
    [expected] = classifier.predict_proba([asked])
    assert list(told.probabilities.values()) == pytest.approx(expected.tolist())
    assert told.prediction == labels[expected.argmax()]
    assert told.shots == dict(zip(labels, UNEVEN.values(), strict=True))

    model, memory = tiny_model(), classifier.memory
    assert memory is not None
    parts = embedded(tiny_dataset, "vsm", UNEVEN).split(list(UNEVEN.values()))
    means = torch.stack([part.mean(0) for part in parts]).unsqueeze(0)
    query = embedded(tiny_dataset, "vsm", {38: 1}, first=8)
    with torch.no_grad():
        prediction = model(
            means.unsqueeze(2), query.view(1, 1, 1, -1), memory.memory, generator(0, "classify")
        )
    per_sample = prediction.log_probabilities.exp()[0, 0]  # [N, L]
    for n, label in enumerate(labels):
        drawn = prediction.posterior.prototypes[0, n]
        distances = [(query[0] - z).square().sum().item() for z in drawn]
        assert told.distances[label] == pytest.approx(np.mean(distances), rel=1e-4)
        assert told.std[label] == pytest.approx(np.std(per_sample[n].numpy()), abs=1e-5)
        weights = prediction.posterior.recollection.weights[0, n]
        ranked = sorted(zip(memory.names, weights.tolist(), strict=True), key=lambda one: -one[1])
        assert [one.name for one in told.recalled[label]] == [name for name, _ in ranked[:3]]
        for one, (_, weight) in zip(told.recalled[label], ranked, strict=False):
            assert one.weight == pytest.approx(weight, rel=1e-3, abs=1e-6)

    total, aleatoric, epistemic = told.uncertainty
    assert total == pytest.approx(-np.sum(expected * np.log(expected)), abs=1e-5)
    entropies = -(per_sample * per_sample.log()).nan_to_num().sum(0)
    assert aleatoric == pytest.approx(entropies.mean().item(), abs=1e-5)
    assert total == pytest.approx(aleatoric + epistemic, abs=1e-5)
    assert epistemic > 0
    plain = told.as_dict()
    assert plain["recalled"][labels[0]][0]["name"] == told.recalled[labels[0]][0].name
    assert plain["uncertainty"]["total"] == total


def test_prototypes_that_agree_leave_no_uncertainty_to_remove() -> None:
    certain = torch.log_softmax(torch.tensor([0.3, 1.2, -0.5]), 0)
    agreeing = certain.view(1, 1, 3, 1).expand(1, 1, 3, 7)
    _, total, aleatoric, epistemic = split_uncertainty(agreeing)
    torch.testing.assert_close(total, aleatoric)
    assert epistemic.item() == pytest.approx(0, abs=1e-6)
    sure_but_different = torch.full((1, 1, 2, 2), -1e4)
    sure_but_different[0, 0, 0, 0] = sure_but_different[0, 0, 1, 1] = 0.0
    _, total, aleatoric, epistemic = split_uncertainty(sure_but_different)
    assert aleatoric.item() == pytest.approx(0)
    assert epistemic.item() == pytest.approx(np.log(2))


@pytest.mark.parametrize("method", ["vpn", "vsm"])
def test_a_temperature_is_a_power_of_the_averaged_probabilities_and_no_answer_changes(
    method: Method, opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    asked = queries_of(tiny_dataset)[0]
    plain = opened(method).fit(*examples(tiny_dataset, EVEN)).predict_proba(asked)
    same = opened(method, temperature=1.0).fit(*examples(tiny_dataset, EVEN)).predict_proba(asked)
    np.testing.assert_array_equal(plain, same)  # this run was not calibrated
    warm = opened(method, temperature=3.0).fit(*examples(tiny_dataset, EVEN))
    expected = np.power(plain.astype(np.float64), 1 / 3)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(warm.predict_proba(asked), expected, rtol=1e-4, atol=1e-6)
    told = warm.explain(asked[0])
    assert list(told.probabilities.values()) == pytest.approx(expected[0].tolist(), rel=1e-4)
    assert (
        warm.predict(asked).tolist()
        == opened(method).fit(*examples(tiny_dataset, EVEN)).predict(asked).tolist()
    )
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        warm.set_params(temperature=nonsense)
        wrong("temperature: expected a number above 0", lambda: warm.predict_proba(asked))


def test_the_temperature_of_classes_that_differ_in_size_is_that_of_their_geometric_mean() -> None:
    features, class_ids, _ = clustered_features(2, 8)
    model = FewShotModel(RunSettings(data="features:any", method="protonet"), (24,))
    plain = replace(made_in_memory(model), calibration=Calibration({1: 1.6, 4: 0.4}))
    fitted = torch.cat(
        [torch.arange(1), torch.arange(8, 12)]
    )  # one of the first, four of the other
    own, given = (
        FewShotClassifier(plain, temperature=temperature).fit(features[fitted], class_ids[fitted])
        for temperature in (None, 0.8)
    )
    np.testing.assert_allclose(
        own.predict_proba(features), given.predict_proba(features), rtol=1e-5, atol=1e-7
    )


def test_a_memory_of_another_encoder_is_refused_with_both_names(
    opened: Callable[..., FewShotClassifier], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", seed=1) / "memory.safetensors"
    expected = [str(read_memory(tmp_path / "other").encoder)]
    opened()
    expected.append(str(read_memory(tmp_path / "vsm").encoder))
    with pytest.raises(MemoryFileError) as refused:
        opened(memory=other)
    assert all(name in str(refused.value) for name in expected)
    # Also where it lies in the place of the run's own.
    (tmp_path / "vsm" / "memory.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(RunError, match="was one of the two exchanged") as exchanged:
        FewShotClassifier.from_pretrained(tmp_path / "vsm")
    assert all(name in str(exchanged.value) for name in expected)


def test_a_memory_file_takes_the_place_of_the_runs_own(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    classifier = opened().fit(*examples(tiny_dataset, EVEN))
    classifier.remember()
    assert classifier.memory is not None
    classifier.memory.write(tmp_path / "grown.safetensors")
    grown = opened(memory=tmp_path / "grown.safetensors")
    assert grown.memory is not None
    assert grown.memory.names == classifier.memory.names
    asked = queries_of(tiny_dataset)[0]
    again = examples(tiny_dataset, EVEN, first=4)
    np.testing.assert_array_equal(
        grown.fit(*again).predict_proba(asked), classifier.fit(*again).predict_proba(asked)
    )


def test_what_has_a_label_is_recalled_by_no_other_class(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset
) -> None:
    classifier = opened().fit(*examples(tiny_dataset, EVEN))
    classifier.remember()
    classifier.fit(*examples(tiny_dataset, EVEN, first=4))
    told = classifier.explain(queries_of(tiny_dataset)[0][0], num_recalled=99)
    fitted = set(classifier.classes_.tolist())
    assert told.remembered == dict.fromkeys(fitted, 2)
    assert not fitted & {one.name for recalled in told.recalled.values() for one in recalled}
    # What training left under a label may be recalled by that class, and by no other.
    learned = {"pattern01": 1, "pattern02": 1}
    images, _ = examples(tiny_dataset, {1: 1, 2: 1})
    told = classifier.fit(images, list(learned)).explain(images[0], num_recalled=99)
    for label in learned:
        assert learned.keys() & {one.name for one in told.recalled[label]} == {label}
    assert not any(told.remembered.values())


def wrong(message: str, do: Callable[[], object], kind: type[VsmError] = ClassifierError) -> None:
    with pytest.raises(kind, match=message) as error:
        do()
    assert "\n" not in str(error.value)


def test_mistakes_are_named_in_one_line(
    opened: Callable[..., FewShotClassifier], tiny_dataset: ImageDataset, tmp_path: Path
) -> None:
    images, labels = examples(tiny_dataset, EVEN)
    classifier = opened()
    gray = images[0].astype(np.float32)
    (tmp_path / "letter.png").write_text("not an image")
    wrong("call fit first", lambda: classifier.predict(images))
    wrong("call fit first", lambda: classifier.explain(images[0]))
    wrong("call fit first", classifier.remember)
    wrong(
        "labels: expected one for each of 10 examples, got", lambda: classifier.fit(images, ["a"])
    )
    mixed = ["a", 1, *labels[2:]]
    wrong("all strings or all integers", lambda: classifier.fit(images, mixed))
    wrong("all strings or all integers", lambda: classifier.fit(images, [0.5] * 10))
    wrong("at least one example, got none", lambda: classifier.fit([], []))
    wrong("several images, got one", lambda: classifier.fit("a.png", ["a"]))
    wrong(r"a tensor \[n, C, H, W\], got \[28, 28\]", lambda: classifier.fit(gray[..., 0], labels))
    wrong(
        r"floats from 0 to 1, got \d+ to \d+; do not normalize",
        lambda: classifier.fit([gray], ["a"]),
        DataError,
    )
    wrong("image 1: expected floats", lambda: classifier.fit([gray * 0, -gray], [1, 2]), DataError)
    wrong("got nan to nan", lambda: classifier.fit([gray * np.nan], ["a"]), DataError)
    wrong(
        "floats from 0 to 1, got int64", lambda: classifier.fit([gray.astype(int)], [1]), DataError
    )
    wrong(r"got \[28, 28, 2\]", lambda: classifier.fit([np.zeros((28, 28, 2))], [1]), DataError)
    wrong("a tensor, got dict", lambda: classifier.fit([{}], [1]), DataError)
    missing = tmp_path / "absent.png"
    wrong("absent.png: cannot be read", lambda: classifier.fit([missing], ["a"]), DataError)
    letter = [tmp_path / "letter.png", images[0]]
    wrong("letter.png: unreadable", lambda: classifier.fit(letter, ["a", "b"]), DataError)
    wrong("letter.png: unreadable", lambda: classifier.fit(letter[:1], ["a"]), DataError)
    classifier.fit(images, labels)
    wrong("use strings or integers throughout", lambda: classifier.partial_fit(images[:1], [1]))
    wrong("way: is not a parameter", lambda: classifier.set_params(way=5))
    wrong("has no long-term memory", opened("vpn").fit(images, labels).remember)
    wrong("absent.png is not a run", lambda: FewShotClassifier.from_pretrained(missing), RunError)
    wrong("has none; leave it out", lambda: opened("vpn", memory=tmp_path / "vsm"))
    expected = opened().fit(images, labels).predict_proba(images)
    np.testing.assert_array_equal(classifier.predict_proba(images), expected)


def test_features_of_any_encoder_are_classified_by_their_means() -> None:
    features, class_ids, _ = clustered_features(6, 12)
    classifier = FewShotClassifier().fit(features, class_ids)
    means = torch.stack([features[class_ids == c].mean(0) for c in range(6)])
    expected = torch.cdist(features, means).argmin(1)
    np.testing.assert_array_equal(classifier.predict(features.numpy()), expected)
    np.testing.assert_array_equal(classifier.predict(features.double().tolist()), expected)
    told = classifier.explain(features[0])
    assert told.recalled == {label: [] for label in range(6)}
    assert told.uncertainty.epistemic == pytest.approx(0, abs=1e-6)
    wrong(
        "X has 3 features, but FewShotClassifier is expecting 24",
        lambda: classifier.predict(np.zeros((2, 3))),
    )
    wrong("features, not images", lambda: classifier.predict(["a.png"]))
    wrong("row 1 holds NaN", lambda: FewShotClassifier().fit([[1.0], [np.nan]], [0, 1]))


def test_plain_features_are_saved_too(tmp_path: Path) -> None:
    features, class_ids, _ = clustered_features(6, 12)
    classifier = FewShotClassifier(temperature=20.0).fit(features, class_ids)
    classifier.save(tmp_path / "plain.vsm")
    loaded = FewShotClassifier.load(tmp_path / "plain.vsm")
    assert loaded.encoder is None
    np.testing.assert_array_equal(
        loaded.predict_proba(features), classifier.predict_proba(features)
    )
    loaded.partial_fit(features[:3], class_ids[:3])


def test_scikit_learn_can_use_it() -> None:
    features, class_ids, names = clustered_features(8, 12)
    rows, labels = features.numpy(), np.asarray(names)[class_ids]
    learned = FewShotClassifier(seed=2).learn_memory(rows, labels)
    assert is_classifier(learned)
    copied = clone(learned)
    assert copied.get_params() == learned.get_params()
    assert cross_val_score(learned, rows, labels, cv=3).mean() > 0.5
    search = GridSearchCV(learned, {"temperature": [0.5, 2.0]}, cv=2, scoring="neg_log_loss")
    assert search.fit(rows, labels).best_params_["temperature"] in (0.5, 2.0)


def test_a_shipped_model_is_opened_by_its_name() -> None:
    classifier = FewShotClassifier.from_pretrained("glyphs-5w1s")
    glyphs = open_images("glyphs")
    chosen = glyphs.classes("test")[:5].tolist()
    support, labels = examples(glyphs, dict.fromkeys(chosen, 5))
    queries, truth = examples(glyphs, dict.fromkeys(chosen, 10), first=5)
    assert classifier.fit(support, labels).score(queries, truth) > 0.8
    assert len(classifier.explain(queries[0]).recalled) == 5


def test_a_name_that_is_no_model_is_told_which_there_are() -> None:
    with pytest.raises(RunError, match=r"known: .*glyphs-5w1s"):
        FewShotClassifier.from_pretrained("glyphs-99w1s")
