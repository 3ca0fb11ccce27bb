"""How class statistics are read is chosen: gains are found, noise is not, and nothing is harmed."""

import io
import math
import zipfile
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import vsm
from data_layouts import shared_data
from vsm import FewShotClassifier
from vsm.encoders import Encoder
from vsm.errors import ClassifierError, MemoryFileError, SettingsError
from vsm.evaluation.memory_choice import (
    Candidate,
    Choice,
    ClassFeatures,
    _best,
    choose_read_settings,
    held_out_trials,
)
from vsm.learning import gaussian_model, learn_statistics
from vsm.memory import GaussianMemory, ReadSettings, SupportSet
from vsm.seeding import generator
from vsm.settings import GaussianSettings, ModelSettings

WIDTH, PER_CLASS = 8, 7
OBLIQUE = torch.linalg.qr(
    torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
).Q.float()
ANISOTROPIC = torch.linspace(0.1, 2.2, WIDTH)
Array = npt.NDArray[np.float64]


def classes_of(
    num_classes: int, noise: Tensor | float = ANISOTROPIC, seed: int = 0, per_class: int = PER_CLASS
) -> ClassFeatures:
    """Isotropic class means; members that differ by ``noise`` along oblique directions."""
    random = generator(seed, "classes")
    means = torch.randn(num_classes, WIDTH, generator=random)
    members = torch.randn(num_classes, per_class, WIDTH, generator=random)
    rows = (means.unsqueeze(1) + noise * members).flatten(0, 1) @ OBLIQUE
    return ClassFeatures(rows, [per_class] * num_classes)


def accuracy(known: ClassFeatures, reading: ReadSettings, new: ClassFeatures, shot: int) -> Tensor:
    """Accuracy of every one of 600 episodes of new classes, 5-way, two queries each ``[E]``."""
    memory = GaussianMemory.fit(known.features, known.class_ids, known.center, reading)
    rows = memory.reader.project(memory.normalize(new.features))
    support, queries = new.episodes(5, shot, 2, 0, 600)
    found = memory.reader.infer(SupportSet.of(rows[support]))
    answers = found.scores(rows[queries].flatten(1, 2)).argmax(-1)
    return (answers == torch.arange(5).repeat_interleave(2)).double().mean(-1)


@pytest.mark.parametrize("validation", [None, 12])
def test_the_gain_of_anisotropic_noise_is_found(validation: int | None) -> None:
    known, new = classes_of(24), classes_of(60, seed=2)
    others = None if validation is None else classes_of(validation, seed=1)
    choice = choose_read_settings(known, others, GaussianSettings())
    assert choice.read_settings.uses_memory
    assert choice.read_settings.epsilon < math.inf
    assert "against no memory" in choice.reason
    assert ("validation classes" in choice.episodes_of) == (validation is not None)
    for shot in (1, 5):
        ours, plain = (
            accuracy(known, one, new, shot) for one in (choice.read_settings, ReadSettings("l2n"))
        )
        gain = ours - plain
        assert gain.mean() > 0.03 + 2 * gain.std() / math.sqrt(len(gain))


@pytest.mark.parametrize("num_classes", [6, 16])
def test_where_noise_is_isotropic_the_choice_costs_nothing(num_classes: int) -> None:
    new = classes_of(60, 0.8, seed=100)
    known = classes_of(num_classes, 0.8)
    choice = choose_read_settings(known, None, GaussianSettings())
    for shot in (1, 5):
        ours, plain = (
            accuracy(known, one, new, shot) for one in (choice.read_settings, ReadSettings("l2n"))
        )
        assert (plain - ours).mean() < 0.015


def candidate(nll: Tensor, *reading: float) -> Candidate:
    return Candidate(ReadSettings("l2n", *reading), nll, {1: 0.5, 5: 0.6})


@pytest.mark.parametrize("gain", [0.001, 0.05])
def test_no_memory_is_taken_unless_another_is_better_by_more_than_the_noise(gain: float) -> None:
    random = torch.Generator().manual_seed(0)
    without = torch.randn(100, generator=random).double() + 2
    difference = torch.randn(100, generator=random).double()
    difference = gain + 0.1 * (difference - difference.mean()) / difference.std()
    found = [
        candidate(without - difference, 3.0, 1.0),
        candidate(without),
        candidate(without + 0.1, 10.0, 1.0),
    ]
    choice = _best(found, "some classes")
    clear = gain > 1.96 * 0.1 / math.sqrt(100)
    assert choice.read_settings.uses_memory == clear
    assert choice.read_settings == found[0 if clear else 1].read_settings
    assert choice.reason.startswith("most likely" if clear else "no memory")
    assert f"{gain:+.4f} ± 0.0196 nats per query against no memory" in choice.reason


@pytest.mark.parametrize("num_classes", [1, 2, 3])
def test_too_few_classes_leave_no_memory(num_classes: int) -> None:
    choice = choose_read_settings(classes_of(num_classes), None, GaussianSettings())
    assert not choice.read_settings.uses_memory
    assert choice.read_settings == ReadSettings()
    assert choice.table == []
    assert choice.reason == "too few classes or images to try anything"


def test_classes_of_one_image_leave_no_memory_unless_there_are_validation_classes() -> None:
    known = classes_of(20, per_class=1)
    assert choose_read_settings(known, None, GaussianSettings()).table == []
    assert choose_read_settings(known, classes_of(10, seed=1), GaussianSettings()).table


def test_classes_of_one_image_do_not_keep_others_from_being_tried() -> None:
    known = classes_of(16)
    some = ClassFeatures(
        torch.cat([known.features, known.features[:3] + 1]), [*known.sizes, 1, 1, 1]
    )
    assert choose_read_settings(some, None, GaussianSettings(normalization="un")).table


@pytest.mark.parametrize(
    "given",
    [
        {"normalization": "un"},
        {"normalization": "cl2n", "epsilon": 7.0},
        {"epsilon": 3.0, "beta": 1.0},
        {"beta": math.inf},
        {"rho": 0.4},
        {"addressing_scale": 13.0},
        {"epsilon": math.inf, "beta": math.inf, "rho": 0.0},
        {"normalization": "l2n", "epsilon": 2.0, "beta": 0.5, "rho": 0.1, "addressing_scale": 3.0},
    ],
)
def test_what_is_set_is_kept(given: dict[str, object]) -> None:
    settings = replace(GaussianSettings(), **given)  # type: ignore[arg-type]
    for num_classes in (2, 8):
        choice = choose_read_settings(classes_of(num_classes), None, settings)
        rows = [choice.read_settings._asdict(), *choice.table]
        assert len(rows) > 1 or num_classes == 2
        for name, value in given.items():
            for row in rows:
                assert row[name] in (value, "inf" if value == math.inf else value)


@pytest.fixture(scope="module")
def chosen() -> Choice:
    return choose_read_settings(classes_of(16), None, GaussianSettings())


def test_the_table_is_sorted_by_likelihood_and_has_no_memory_in_it(chosen: Choice) -> None:
    nll = [row["nll"] for row in chosen.table]
    assert nll == sorted(nll)
    assert {row["normalization"] for row in chosen.table} <= {"l2n", "cl2n"}
    plain = [
        row for row in chosen.table if row["epsilon"] == row["beta"] == "inf" and not row["rho"]
    ]
    assert len(plain) >= 1
    readings = [tuple(row[name] for name in ReadSettings._fields[:5]) for row in chosen.table]
    assert len(set(readings)) == len(readings)
    best = chosen.table[0]
    told = {
        name: "inf" if v == math.inf else v for name, v in chosen.read_settings._asdict().items()
    }
    assert {name: best[name] for name in told} == told
    assert set(chosen.as_dict()) == {"episodes_of", "reason", "table"}


def test_the_same_seed_makes_the_same_choice_and_rows_may_come_in_any_order() -> None:
    known, settings = classes_of(16), GaussianSettings(normalization="l2n", rho=0.0)
    chosen = choose_read_settings(known, None, settings)
    assert choose_read_settings(known, None, settings) == chosen
    assert choose_read_settings(known, None, settings, seed=1).table != chosen.table
    order = torch.stack(
        [
            PER_CLASS * c + torch.randperm(PER_CLASS, generator=torch.Generator().manual_seed(c))
            for c in range(16)
        ]
    ).flatten()
    shuffled = choose_read_settings(
        ClassFeatures(known.features[order], known.sizes), None, settings
    )
    # Episodes are of other images then, so what they measure differs a little.
    assert shuffled.read_settings.uses_memory == chosen.read_settings.uses_memory
    assert shuffled.read_settings.epsilon == chosen.read_settings.epsilon
    assert shuffled.table[0]["nll"] == pytest.approx(chosen.table[0]["nll"], abs=0.05)


def test_episodes_are_of_classes_that_the_statistics_do_not_know() -> None:
    known = ClassFeatures(torch.arange(90.0).view(45, 2), [9, 3, 7, 12, 8, 6])
    trials = held_out_trials(known, None, (1, 5), seed=3)
    assert len(trials) == 2
    row_classes = known.class_ids.tolist()
    parts = []
    for trial in trials:
        mine = {row_classes[int(row[0]) // 2] for row in trial.known.features}
        theirs = {row_classes[int(row[0]) // 2] for row in trial.others.features}
        assert mine | theirs == set(range(6))
        assert not mine & theirs
        parts.append((mine, theirs))
        for shot, (support, queries) in trial.episodes.items():
            assert support.shape[1:] == (support.shape[1], shot)
            own = trial.others.class_ids
            for one, asked in zip(support, queries, strict=True):
                assert len({own[rows[0]].item() for rows in one}) == len(one), "different classes"
                for rows, others in zip(one, asked, strict=True):
                    members = torch.cat([rows, others])
                    assert len(set(members.tolist())) == len(members)
                    assert len(set(own[members].tolist())) == 1
    assert parts[0] == parts[1][::-1]


class Oracle(NamedTuple):
    """Logits of all episodes of one K by dense Gaussians ``[P, N]``, and labels ``[P]``."""

    logits: Array
    labels: list[int]


def dense_logits(known: ClassFeatures, reading: ReadSettings, shot: int, seed: int = 0) -> Oracle:
    """Log densities of queries with noise scale 1, episode by episode, in double precision."""
    logits, labels = [], []
    for trial in held_out_trials(known, None, (1, 5), seed):
        memory = trial.memory(reading)
        within, means = memory.within.numpy(), memory.content.numpy()
        flat = np.trace(within) / WIDTH * np.eye(WIDTH)
        w = flat if math.isinf(reading.epsilon) else within + reading.epsilon * flat
        center = means.mean(0)  # classes are of one size, so all count alike
        spread = (means - center).T @ (means - center) / len(means)
        share = np.trace(spread) / np.trace(w)
        b = share * w if math.isinf(reading.beta) else spread + reading.beta * share * w
        precision = np.linalg.inv(w)
        gain = b @ np.linalg.inv(b + w / shot)
        spread_of_query = np.linalg.inv(w + b - gain @ b)
        rows = memory.normalize(trial.others.features.double()).numpy()
        for support, queries in zip(*trial.episodes[shot], strict=True):
            prototypes = []
            for members in support.numpy():
                own = rows[members].mean(0) - center
                slots = means - center
                lengths = np.sqrt(own @ precision @ own) * np.sqrt(
                    np.einsum("ad,de,ae->a", slots, precision, slots)
                )
                scores = np.exp(reading.addressing_scale * (slots @ precision @ own) / lengths)
                prior = reading.rho * (scores @ slots) / scores.sum()
                prototypes.append(center + prior + gain @ (own - prior))
            for n, asked in enumerate(queries.numpy()):
                for query in rows[asked]:
                    apart = query - np.stack(prototypes)
                    logits.append(-0.5 * np.einsum("nd,de,ne->n", apart, spread_of_query, apart))
                    labels.append(n)
    return Oracle(np.stack(logits), labels)


def oracle_nll(oracles: list[Oracle], noise_scale: float) -> float:
    """Mean over shots of the mean NLL of all queries."""
    found = []
    for logits, labels in oracles:
        scaled = logits / noise_scale
        top = scaled.max(1)
        log_total = top + np.log(np.exp(scaled - top[:, None]).sum(1))
        found.append(float(np.mean(log_total - scaled[np.arange(len(labels)), labels])))
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("normalization", "epsilon", "beta", "rho"),
    [("l2n", 1.0, 0.3, 0.0), ("cl2n", 3.0, math.inf, 0.5), ("un", math.inf, 1.0, 0.25)],
)
def test_likelihood_accuracy_and_noise_scale_are_those_of_dense_gaussians(
    normalization: str, epsilon: float, beta: float, rho: float
) -> None:
    known = classes_of(12)
    asked = GaussianSettings(
        normalization=normalization,  # type: ignore[arg-type]
        epsilon=epsilon,
        beta=beta,
        rho=rho,
        addressing_scale=6.0,
    )
    choice = choose_read_settings(known, None, asked)
    (row,) = choice.table
    oracles = [
        dense_logits(known, choice.read_settings._replace(noise_scale=1.0), shot) for shot in (1, 5)
    ]
    assert row["nll"] == pytest.approx(oracle_nll(oracles, row["noise_scale"]), abs=2e-5)
    for shot, (logits, labels) in zip((1, 5), oracles, strict=True):
        right = np.mean(logits.argmax(1) == labels)
        assert row[f"accuracy_{shot}_shot"] == pytest.approx(right, abs=2e-3)
    # The noise scale makes all predictions together most likely, each counting the same.
    together = Oracle(
        np.concatenate([one.logits for one in oracles]),
        [label for one in oracles for label in one.labels],
    )
    near = row["noise_scale"] * np.geomspace(0.9, 1 / 0.9, 61)
    found = [oracle_nll([together], scale) for scale in near]
    assert abs(int(np.argmin(found)) - 30) <= 1, "to a third of a percent"
    anywhere = min(oracle_nll([together], scale) for scale in np.geomspace(0.05, 1000, 60))
    assert oracle_nll([together], row["noise_scale"]) <= anywhere


def test_the_center_of_another_memory_is_used_where_one_is_given() -> None:
    known = classes_of(12)
    settings = GaussianSettings(normalization="cl2n", epsilon=3.0, beta=1.0, rho=0.0)
    center = F.normalize(torch.ones(WIDTH), dim=-1)
    for trial in held_out_trials(known, None, (1,), 0, center):
        memory = trial.memory(ReadSettings("cl2n"))
        torch.testing.assert_close(memory.center, center.double())
    other = choose_read_settings(known, None, settings, center=center)
    assert other.table[0]["nll"] != choose_read_settings(known, None, settings).table[0]["nll"]


def test_what_cannot_be_learned_is_refused_in_one_line() -> None:
    model = gaussian_model(
        Encoder(ModelSettings(), (WIDTH,), "features:x"), "features:x", GaussianSettings(), 0
    )
    nothing = ClassFeatures(torch.zeros(0, WIDTH), [])
    with pytest.raises(MemoryFileError, match="memory: there is no class to learn"):
        learn_statistics(model, nothing, torch.zeros(0, dtype=torch.int64), None)
    known = classes_of(3)
    known.features[4, 2] = torch.nan
    with pytest.raises(MemoryFileError, match="features: some are infinite or not a number"):
        learn_statistics(model, known, torch.arange(3), None)
    with pytest.raises(ClassifierError, match="features: row 4 holds NaN"):
        FewShotClassifier().learn_memory(known.features, known.class_ids.tolist())
    for name, value in (("epsilon", 0.0), ("beta", -1.0), ("rho", 1.5)):
        with pytest.raises(SettingsError, match=name):
            replace(GaussianSettings(), **{name: value})  # type: ignore[arg-type]


def test_about_the_asked_share_of_images_of_fitted_classes_is_answered() -> None:
    """Thresholds are of remembered classes, each half with the statistics of the other."""
    known, new = classes_of(60, per_class=12), classes_of(100, seed=5, per_class=12)
    classifier = FewShotClassifier().learn_memory(known.features, known.class_ids.tolist())
    rows = new.features.view(20, 5, 12, WIDTH)
    for shot, coverage in ((1, 0.8), (1, 0.95), (5, 0.8), (5, 0.95)):
        accepted, strangers = [], []
        for task in range(20):
            classifier.fit(rows[task, :, :shot].flatten(0, 1), np.repeat(np.arange(5), shot))
            answers = classifier.predict(rows[task, :, shot:].flatten(0, 1), reject=coverage)
            accepted.append(np.mean(answers != -1))
            others = rows[(task + 1) % 20, :, shot:].flatten(0, 1)
            strangers.append(np.mean(classifier.predict(others, reject=coverage) != -1))
        error = np.std(accepted) / math.sqrt(len(accepted))
        assert abs(np.mean(accepted) - coverage) < 0.02 + 3 * error
        assert np.mean(strangers) < np.mean(accepted) - 0.05


class Drawings(NamedTuple):
    """Normalized features of characters ``[C, 20, D]``: to remember, and to tell apart."""

    remembered: Tensor
    other: Tensor


@pytest.fixture(scope="module")
def drawings() -> Drawings:
    """Embed 60 characters of alphabets that the shipped encoder was hardly trained on."""
    archive = shared_data("omniglot", "images_evaluation.zip")
    encoder = vsm.load("omniglot-vsm")
    with zipfile.ZipFile(archive) as file:
        listed = sorted(name for name in file.namelist() if name.endswith(".png"))
        by_character: dict[str, list[str]] = {}
        for name in listed:
            by_character.setdefault(name.rpartition("/")[0], []).append(name)
        chosen = [by_character[one] for one in sorted(by_character)[::11]]
        images = [
            Image.open(io.BytesIO(file.read(name))).convert("L")
            for names in chosen
            for name in names
        ]
    features = F.normalize(encoder.embed(images), dim=-1).view(len(chosen), 20, -1)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    return Drawings(features[order[:20]], features[order[20:]])


@pytest.mark.parametrize("num_classes", [1, 2, 5, 20])
@pytest.mark.parametrize("per_class", [1, 2, 5])
def test_on_real_drawings_a_memory_never_does_harm(
    drawings: Drawings, num_classes: int, per_class: int
) -> None:
    known = drawings.remembered[:num_classes, :per_class].flatten(0, 1)
    labels = [f"old {c}" for c in range(num_classes) for _ in range(per_class)]
    learned = FewShotClassifier().learn_memory(known, labels)
    encoder = learned.encoder
    assert encoder is not None
    others = drawings.other
    random = torch.Generator().manual_seed(1)
    for shot in (1, 5):
        rows = []
        for _ in range(200):
            classes = torch.randperm(len(others), generator=random)[:5]
            members = torch.rand(5, 20, generator=random).argsort(1)[:, : shot + 5]
            rows.append(others[classes.unsqueeze(1), members])
        support, queries = torch.stack(rows).split([shot, 5], 2)
        truth = torch.arange(5).repeat_interleave(5)
        distances = torch.cdist(queries.flatten(1, 2), support.mean(2))
        plain = (distances.argmin(-1) == truth).double().mean(-1)
        with torch.no_grad():
            found = encoder.model(support, queries, encoder.state, generator(0, "unused"))
        ours = (found.log_probabilities[..., 0].argmax(-1) == truth).double().mean(-1)
        # The batch is what the classifiers answer.
        for classifier, expected in ((learned, ours), (FewShotClassifier(), plain)):
            classifier.fit(support[0].flatten(0, 1), np.repeat(np.arange(5), shot))
            score = classifier.score(queries[0].flatten(0, 1), truth.numpy())
            assert score == pytest.approx(expected[0].item())
        harm = plain - ours
        error = harm.std().item() / math.sqrt(len(harm))
        assert harm.mean().item() <= 2 * error + 0.005
