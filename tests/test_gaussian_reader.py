"""Reading class statistics: against dense Gaussians, against quadrature, and where little is known.

The oracles never diagonalize anything: W and B are dense matrices made by plain loops in double
precision, and posteriors are blocks of the joint Gaussian of prototype, examples and query.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

import vsm
from vsm import FewShotClassifier
from vsm.classify.classifier import Embedded
from vsm.errors import ClassifierError
from vsm.memory import GaussianMemory, GaussianPosterior, ReadSettings, SupportSet
from vsm.memory.reader import FLAT, Decomposition, GaussianReader
from vsm.model import FewShotModel
from vsm.seeding import generator
from vsm.settings import ModelSettings, Normalization, RunSettings

WIDTH = 6
INFINITY = math.inf
Array = npt.NDArray[np.float64]


def values(*shape: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def log_density_of(posterior: GaussianPosterior, queries: Tensor) -> Tensor:
    """The predictive density itself: scores that are not tempered."""
    return replace(posterior, reader=posterior.reader._replace(noise=1.0)).scores(queries)


def classes_of(
    num_classes: int, width: int = WIDTH, seed: int = 0, largest: int = 7
) -> tuple[Tensor, Tensor]:
    """Classes of different sizes, means and scatter along different oblique directions."""
    sizes = torch.tensor([2 + (3 * c) % (largest - 1) for c in range(num_classes)])
    class_ids = torch.arange(num_classes).repeat_interleave(sizes)
    means = values(num_classes, width, seed=seed) @ values(width, width, seed=seed + 1) + 0.7
    noise = values(len(class_ids), width, seed=seed + 2) @ values(width, width, seed=seed + 3)
    return means[class_ids] + 0.6 * noise, class_ids


def class_weights(means: list[Array], counts: list[int], noise: float) -> list[float]:
    """How much each class counts: n/(n + w̄/b̄), with b̄ found in two rounds, class by class.

    ``noise`` is tr W; where classes do not seem to differ, all count alike.
    """
    weights = [n / (n + 1) for n in counts]
    for _ in range(2):
        total = sum(weights)
        center = sum(weight / total * mean for weight, mean in zip(weights, means, strict=True))
        apart = [float((mean - center) @ (mean - center)) for mean in means]
        signal = sum(
            weight / total * (square - noise / n)
            for weight, square, n in zip(weights, apart, counts, strict=True)
        )
        weights = [n / (n + noise / signal) if signal > 0 else 1.0 for n in counts]
    return [weight / sum(weights) for weight in weights]


class Dense(NamedTuple):
    """W and B ``[D, D]``, grand mean ``[D]``, class means ``[A, D]``, tr(S_w W⁻¹) / D."""

    within: Array
    between: Array
    grand_mean: Array
    means: Array
    noise: float

    @staticmethod
    def of(rows: Tensor, class_ids: Tensor, how: ReadSettings) -> "Dense":
        """Follow the definition in plain loops over normalized ``rows``."""
        width = rows.shape[1]
        scatter, freedom, means, counts = np.zeros((width, width)), 0, [], []
        for one in sorted(set(class_ids.tolist())):
            members = [
                row.double().numpy()
                for row, of in zip(rows, class_ids.tolist(), strict=True)
                if of == one
            ]
            mean = sum(members) / len(members)
            for member in members:
                scatter += np.outer(member - mean, member - mean)
            freedom += len(members) - 1
            means.append(mean)
            counts.append(len(members))
        within = scatter / freedom
        weights = class_weights(means, counts, float(np.trace(within)))
        pairs = list(zip(weights, means, strict=True))
        grand_mean = sum(weight * mean for weight, mean in pairs)
        spread = sum(weight * np.outer(m - grand_mean, m - grand_mean) for weight, m in pairs)
        flat = np.trace(within) / width * np.eye(width)
        shrunk = flat if math.isinf(how.epsilon) else within + how.epsilon * flat
        share = np.trace(spread) / np.trace(shrunk)
        between = share * shrunk if math.isinf(how.beta) else spread + how.beta * share * shrunk
        noise = np.trace(within @ np.linalg.inv(how.noise_scale * shrunk)) / width
        scaled = (how.noise_scale * shrunk, how.noise_scale * between)
        return Dense(*scaled, grand_mean, np.stack(means), float(noise))

    def prior_mean(self, examples: Array, how: ReadSettings, hidden: tuple[int, ...] = ()) -> Array:
        """π = (1 − ρ)g + ρ Σ λ_a M_a, with cosines where W is the identity."""
        precision = np.linalg.inv(self.within)
        own = examples.mean(0) - self.grand_mean
        weights = []
        for a, mean in enumerate(self.means):
            slot = mean - self.grand_mean
            lengths = math.sqrt(own @ precision @ own) * math.sqrt(slot @ precision @ slot)
            cosine = own @ precision @ slot / lengths
            weights.append(0.0 if a in hidden else math.exp(how.addressing_scale * cosine))
        recalled = sum(
            weight / sum(weights) * mean for weight, mean in zip(weights, self.means, strict=True)
        )
        return np.asarray((1 - how.rho) * self.grand_mean + how.rho * recalled)

    def conditioned(self, examples: Array, prior_mean: Array) -> tuple[Array, Array]:
        """Mean and covariance of (z, h) ``[2D]`` given ``examples [K, D]``, by blocks."""
        shot, width = examples.shape
        size = (2 + shot) * width  # z, the query h, h_1 … h_K
        joint = np.zeros((size, size))
        for i in range(2 + shot):
            for j in range(2 + shot):
                block = self.between + (self.within if i == j and i > 0 else 0)
                joint[i * width : (i + 1) * width, j * width : (j + 1) * width] = block
        asked, given = slice(0, 2 * width), slice(2 * width, size)
        gain = np.linalg.solve(joint[given, given], joint[given, asked]).T
        apart = examples.reshape(-1) - np.tile(prior_mean, shot)
        mean = np.tile(prior_mean, 2) + gain @ apart
        return mean, joint[asked, asked] - gain @ joint[given, asked]

    def log_density(self, query: Array, examples: Array, prior_mean: Array) -> float:
        mean, covariance = self.conditioned(examples, prior_mean)
        return density(query, mean[len(query) :], covariance[len(query) :, len(query) :])

    def score(self, query: Array, examples: Array, prior_mean: Array) -> float:
        """a·log N(h; m, a·C): the density of noise that is a times as wide as W, to the power a."""
        mean, covariance = self.conditioned(examples, prior_mean)
        width = len(query)
        wide = self.noise * covariance[width:, width:]
        return self.noise * density(query, mean[width:], wide)

    def log_marginal(self, query: Array) -> float:
        return density(query, self.grand_mean, self.within + self.between)


def density(point: Array, mean: Array, covariance: Array) -> float:
    gaussian = MultivariateNormal(torch.from_numpy(mean), torch.from_numpy(covariance))
    return float(gaussian.log_prob(torch.from_numpy(point)))


def normalized(rows: Tensor, normalization: Normalization, center: Tensor) -> Tensor:
    """SimpleShot's three normalizations, row by row."""
    found = []
    for row in rows.double():
        made = row
        if normalization != "un":
            made = made / made.square().sum().sqrt()
        if normalization == "cl2n":
            made = made - center.double()
            made = made / made.square().sum().sqrt()
        found.append(made)
    return torch.stack(found)


def read(features: Tensor, class_ids: Tensor, how: ReadSettings) -> tuple[GaussianMemory, Dense]:
    center = normalized(features, "l2n", features[0]).mean(0)
    memory = GaussianMemory.fit(features, class_ids, center, how)
    return memory, Dense.of(normalized(features, how.normalization, center), class_ids, how)


def log_determinant(reader: GaussianReader) -> float:
    """log |det A|, by which densities of projected features differ."""
    return float(torch.linalg.slogdet(reader.rotation.double()).logabsdet)


@pytest.mark.parametrize("num_classes", [2, 4, 6, 7, 15])
@pytest.mark.parametrize("epsilon", [0.05, 3.0, INFINITY])
def test_one_decomposition_makes_the_noise_white_and_the_signal_diagonal(
    num_classes: int, epsilon: float
) -> None:
    features, class_ids = classes_of(num_classes)
    memory, dense = read(features, class_ids, ReadSettings("un", epsilon, 0.0))
    found = Decomposition.of(memory.content, memory.counts, memory.within, epsilon)
    a = found.rotation.numpy()
    assert a.shape == (WIDTH, WIDTH)
    np.testing.assert_allclose(a @ dense.within @ a.T, np.eye(WIDTH), atol=1e-10)
    np.testing.assert_allclose(a @ dense.between @ a.T, np.diag(found.ratios), atol=1e-10)
    assert (found.ratios.diff() <= 1e-12).all(), "best directions first"
    np.testing.assert_allclose(found.slots, (dense.means - dense.grand_mean) @ a.T, atol=1e-10)
    np.testing.assert_allclose(found.grand_mean, dense.grand_mean, atol=1e-12)


@pytest.mark.parametrize("num_classes", [3, 6, 11])
@pytest.mark.parametrize(
    ("epsilon", "beta", "noise_scale"),
    [
        (0.05, 0.0, 1.0),
        (0.3, 0.1, 0.2),
        (3.0, 1.0, 7.0),
        (10.0, INFINITY, 2.0),
        (INFINITY, 0.3, 0.5),
        (INFINITY, INFINITY, 3.0),
    ],
)
@pytest.mark.parametrize("normalization", ["un", "l2n", "cl2n"])
def test_a_reader_sees_the_shrunk_covariances_of_its_classes(
    num_classes: int,
    epsilon: float,
    beta: float,
    noise_scale: float,
    normalization: Normalization,
) -> None:
    how = ReadSettings(normalization, epsilon, beta, noise_scale=noise_scale)
    features, class_ids = classes_of(num_classes)
    memory, dense = read(features, class_ids, how)
    reader = memory.reader
    a = reader.rotation.double().numpy()
    np.testing.assert_allclose(a @ dense.within @ a.T, np.eye(WIDTH), atol=3e-6)
    expected = np.diag(reader.ratios.double().numpy())
    scale = float(reader.ratios.max())
    np.testing.assert_allclose(a @ dense.between @ a.T, expected, atol=1e-5 * scale)
    slots = (dense.means - dense.grand_mean) @ a.T
    np.testing.assert_allclose(reader.slots, slots, rtol=1e-5, atol=1e-5)


READINGS = [
    ReadSettings("un", 0.1, 0.3),
    ReadSettings("un", 3.0, INFINITY, 0.4, 8.0, 2.0),
    ReadSettings("l2n", INFINITY, 0.3, 0.5, 5.0, 0.3),
    ReadSettings("cl2n", 1.0, 1.0, 0.75, 10.0, 1.7),
    ReadSettings("cl2n", INFINITY, INFINITY, 0.0, 10.0, 0.6),
]


@pytest.mark.parametrize("shots", [(1, 1, 1), (2, 2, 2), (5, 5, 5), (1, 5, 2)])
@pytest.mark.parametrize("how", READINGS)
def test_prototypes_and_densities_are_those_of_the_joint_gaussian(
    shots: tuple[int, ...], how: ReadSettings
) -> None:
    features, class_ids = classes_of(8)
    memory, dense = read(features, class_ids, how)
    reader = memory.reader
    new, _ = classes_of(3, seed=40)
    rows = normalized(new, how.normalization, memory.center)
    examples = [rows[n : n + shot] for n, shot in enumerate(shots)]
    queries = normalized(values(4, WIDTH, seed=50) + 0.5, how.normalization, memory.center)
    projected = reader.project(torch.cat(examples).float())
    found = reader.infer(SupportSet.of_classes(projected, shots))
    log_densities = log_density_of(found, reader.project(queries.float()).unsqueeze(0))[0]  # [B, N]
    a, shift = reader.rotation.double().numpy(), log_determinant(reader)
    probabilities = np.zeros((4, 3))
    for n, one in enumerate(examples):
        prior_mean = dense.prior_mean(one.numpy(), how)
        mean, covariance = dense.conditioned(one.numpy(), prior_mean)
        mean, covariance = mean[:WIDTH], covariance[:WIDTH, :WIDTH]
        np.testing.assert_allclose(
            found.prior_mean[0, n], a @ (prior_mean - dense.grand_mean), rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(
            found.gaussian.mean[0, n], a @ (mean - dense.grand_mean), rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(
            np.diag(found.gaussian.variance[0, n].numpy()), a @ covariance @ a.T, atol=1e-4
        )
        for b, query in enumerate(queries):
            expected = dense.log_density(query.numpy(), one.numpy(), prior_mean)
            probabilities[b, n] = math.exp(expected)
            assert log_densities[b, n].item() == pytest.approx(expected - shift, rel=1e-4, abs=2e-3)
    probabilities /= probabilities.sum(1, keepdims=True)
    np.testing.assert_allclose(log_densities.softmax(-1), probabilities, atol=1e-3)


@pytest.mark.parametrize("how", READINGS)
def test_a_class_never_met_is_as_wide_as_scatter_and_classes_together(how: ReadSettings) -> None:
    features, class_ids = classes_of(9)
    memory, dense = read(features, class_ids, how)
    queries = normalized(values(5, WIDTH, seed=51), how.normalization, memory.center)
    found = memory.reader._replace(noise=1.0).marginal_scores(
        memory.reader.project(queries.float())
    )
    shift = log_determinant(memory.reader)
    for b, query in enumerate(queries):
        expected = dense.log_marginal(query.numpy()) - shift
        assert found[b].item() == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_the_prior_recalls_classes_that_are_not_hidden() -> None:
    how = ReadSettings("un", 1.0, 1.0, 0.6, 4.0)
    features, class_ids = classes_of(7)
    memory, dense = read(features, class_ids, how)
    reader = memory.reader
    examples = values(1, 2, 3, WIDTH, seed=60)  # one task, two classes, K = 3
    hidden = torch.zeros(1, 2, 7, dtype=torch.bool)
    hidden[0, 0, [1, 4]] = True
    found = reader.infer(SupportSet.of(reader.project(examples.float())), hidden)
    assert (found.weights[0, 0, [1, 4]] == 0).all()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(1, 2))
    a = reader.rotation.double().numpy()
    for n, out in enumerate([(1, 4), ()]):
        expected = dense.prior_mean(examples[0, n].numpy(), how, out) - dense.grand_mean
        np.testing.assert_allclose(found.prior_mean[0, n], a @ expected, atol=1e-4)


def test_a_class_that_may_recall_nothing_expects_the_grand_mean() -> None:
    features, class_ids = classes_of(5)
    memory, _ = read(features, class_ids, ReadSettings("un", 1.0, 1.0, 0.8))
    support = SupportSet.of(memory.reader.project(values(1, 2, 1, WIDTH, seed=1).float()))
    blind = memory.reader.infer(support, torch.ones(1, 2, 5, dtype=torch.bool))
    without = memory.reader._replace(rho=0.0).infer(support)
    assert torch.equal(blind.weights, torch.zeros(1, 2, 5))
    torch.testing.assert_close(blind.gaussian.mean, without.gaussian.mean)
    assert torch.equal(blind.prior_mean, torch.zeros(1, 2, WIDTH))


@pytest.mark.parametrize("shot", [1, 2, 5])
def test_in_one_dimension_quadrature_gives_posterior_and_predictive(shot: int) -> None:
    how = ReadSettings("un", 0.5, 0.4, 0.5, 2.0, 1.5)
    features, class_ids = classes_of(4, width=1)
    memory, dense = read(features, class_ids, how)
    reader = memory.reader
    examples = values(shot, 1, seed=shot) + 1
    found = reader.infer(SupportSet.of(reader.project(examples.float()).view(1, 1, shot, 1)))
    z = torch.linspace(-40, 40, 40_001, dtype=torch.float64)
    noise, spread = math.sqrt(dense.within.item()), math.sqrt(dense.between.item())
    prior_mean = dense.prior_mean(examples.numpy(), how).item()
    log_posterior = Normal(prior_mean, spread).log_prob(z)
    for one in examples[:, 0]:
        log_posterior += Normal(z, noise).log_prob(one)
    posterior = log_posterior.softmax(0)
    mean = (posterior * z).sum().item()
    variance = (posterior * (z - mean).square()).sum().item()
    a, grand_mean = reader.rotation.item(), dense.grand_mean.item()
    assert found.gaussian.mean.item() == pytest.approx(a * (mean - grand_mean), abs=1e-5)
    assert found.gaussian.variance.item() == pytest.approx(a * a * variance, rel=1e-5)
    for query in (-3.0, 0.2, 4.0):
        asked = reader.project(torch.tensor([[[query]]]))
        expected = (posterior * Normal(z, noise).log_prob(torch.tensor(query)).exp()).sum().log()
        log_density = log_density_of(found, asked).item() + math.log(abs(a))
        assert log_density == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("shot", [1, 3])
def test_in_two_dimensions_quadrature_gives_posterior_and_predictive(shot: int) -> None:
    how = ReadSettings("un", 0.2, 0.3, 0.7, 3.0, 0.8)
    features, class_ids = classes_of(5, width=2)
    memory, dense = read(features, class_ids, how)
    reader = memory.reader
    examples = values(shot, 2, seed=70 + shot)
    found = reader.infer(SupportSet.of(reader.project(examples.float()).view(1, 1, shot, 2)))
    within, between = torch.from_numpy(dense.within), torch.from_numpy(dense.between)
    prior_mean = torch.from_numpy(dense.prior_mean(examples.numpy(), how))
    axis = torch.linspace(-14, 14, 501, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    log_posterior = MultivariateNormal(prior_mean, between).log_prob(z)
    noise = MultivariateNormal(torch.zeros(2).double(), within)
    for one in examples:
        log_posterior += noise.log_prob(one - z)
    posterior = log_posterior.softmax(0)
    mean = (posterior.unsqueeze(-1) * z).sum(0)
    covariance = ((z - mean) * posterior.unsqueeze(-1)).mT @ (z - mean)
    a = reader.rotation.double()
    torch.testing.assert_close(
        found.gaussian.mean[0, 0].double(), a @ (mean - torch.from_numpy(dense.grand_mean)),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    torch.testing.assert_close(
        torch.diag(found.gaussian.variance[0, 0]).double(), a @ covariance @ a.mT,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    query = torch.tensor([0.4, -0.9], dtype=torch.float64)
    expected = (posterior * noise.log_prob(query - z).exp()).sum().log().item()
    log_density = log_density_of(found, reader.project(query.float()).view(1, 1, 2)).item()
    assert log_density + log_determinant(reader) == pytest.approx(expected, abs=1e-3)


def feature_model(width: int = WIDTH) -> FewShotModel:
    settings = RunSettings(
        data="features:x", method="vsm", model=ModelSettings(inference="gaussian")
    )
    return FewShotModel(settings, (width,)).eval()


@pytest.mark.parametrize("how", READINGS)
def test_the_score_of_none_of_these_is_a_difference_of_dense_distances(how: ReadSettings) -> None:
    features, class_ids = classes_of(8)
    memory, dense = read(features, class_ids, how)
    model, shots = feature_model(), (1, 4)
    new = values(5, WIDTH, seed=80) + 0.4
    support = SupportSet.of_classes(model.project(new.float(), memory), shots)
    inferred = model.infer(support, memory, generator(0, "unused"))
    images = values(3, WIDTH, seed=81) + 0.3
    queries = model.project(images.float(), memory).unsqueeze(0)
    scores = inferred.rejection_scores(queries, None)
    rows = normalized(new, how.normalization, memory.center)
    asked = normalized(images, how.normalization, memory.center)
    for n, part in enumerate(rows.split(shots)):
        prior_mean = dense.prior_mean(part.numpy(), how)
        for b, query in enumerate(asked):
            mean, covariance = dense.conditioned(part.numpy(), prior_mean)
            apart = query.numpy() - mean[WIDTH:]
            expected = apart @ np.linalg.inv(covariance[WIDTH:, WIDTH:]) @ apart / 2
            apart = query.numpy() - dense.grand_mean
            expected -= apart @ np.linalg.inv(dense.within + dense.between) @ apart / 2
            assert scores[0, b, n].item() == pytest.approx(expected, rel=1e-3, abs=2e-3)


@pytest.mark.parametrize("shots", [[1, 4, 2], [2, 2, 2], [1, 1, 1]])  # equal ones: linear scores
def test_a_classifier_answers_with_the_probabilities_of_dense_gaussians(shots: list[int]) -> None:
    means = values(16, WIDTH, seed=1) * torch.linspace(2, 0.3, WIDTH)
    class_ids = torch.arange(16).repeat_interleave(6)
    features = means[class_ids] + values(96, WIDTH, seed=2) * torch.linspace(0.1, 1, WIDTH)
    classifier = FewShotClassifier().learn_memory(features, class_ids.tolist())
    assert classifier.memory is not None
    memory = classifier.memory.memory
    assert isinstance(memory, GaussianMemory)
    how = memory.read_settings
    assert how.uses_memory
    _, dense = read(features, class_ids, how)
    np.testing.assert_allclose(
        memory.center, normalized(features, "l2n", means[0]).mean(0), atol=1e-6
    )
    new, images = 2 * values(sum(shots), WIDTH, seed=3), 2 * values(5, WIDTH, seed=4)
    labels = [label for label, shot in zip("abc", shots, strict=True) for _ in range(shot)]
    found = classifier.fit(new, labels).predict_proba(images)
    rows = normalized(new, how.normalization, memory.center)
    asked = normalized(images, how.normalization, memory.center)
    answers = classifier.predict(images)
    for b, query in enumerate(asked):
        scores = []
        for part in rows.split(shots):
            prior_mean = dense.prior_mean(part.numpy(), how)
            scores.append(dense.score(query.numpy(), part.numpy(), prior_mean))
        expected = np.exp(np.array(scores) - max(scores))
        np.testing.assert_allclose(found[b], expected / expected.sum(), atol=2e-3)
        assert answers[b] == "abc"[expected.argmax()]
    damaged = Embedded(torch.full((2, WIDTH), torch.nan))
    for ask in (classifier.predict, classifier.predict_proba):
        with pytest.raises(ClassifierError, match="give NaN probabilities"):
            ask(damaged)


@pytest.mark.parametrize("distance", [0.0, 300.0])
def test_linear_scores_are_those_of_squares_and_have_their_gradient(distance: float) -> None:
    features, class_ids = classes_of(8)
    reader = read(features, class_ids, READINGS[0])[0].reader
    support = (values(2, 4, 3, WIDTH, seed=5) + distance).float().requires_grad_()
    queries = (values(2, 9, WIDTH, seed=6) + distance).float()
    found = reader.infer(SupportSet.of(support))
    assert found.linear() is not None
    exact = found.gaussian.mean.double(), found.gaussian.variance.double() + 1
    squares = (queries.double().unsqueeze(2) - exact[0].unsqueeze(1)).square()  # [T, B, N, D]
    expected = (-0.5 * squares / exact[1].unsqueeze(1)).sum(-1).log_softmax(-1)
    made = found.log_probabilities(queries).squeeze(-1)
    torch.testing.assert_close(made.double(), expected, rtol=1e-3, atol=1e-3)
    towards = values(*made.shape, seed=7)
    slopes = [
        torch.autograd.grad((one * towards).sum(), support, retain_graph=True)[0]
        for one in (made, expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("how", READINGS)
def test_linear_scores_of_queries_less_an_offset_are_those_of_the_queries(
    how: ReadSettings,
) -> None:
    reader = read(*classes_of(8), how)[0].reader
    found = reader.infer(SupportSet.of(values(2, 4, 3, WIDTH, seed=5).float()))
    offset, queries = values(WIDTH, seed=8).float(), values(2, 9, WIDTH, seed=6)
    made = found._linear(offset)
    assert made is not None
    weights, biases = (part.double() for part in made)
    scores = (queries - offset.double()) @ weights.mT + biases.unsqueeze(1)
    mean, variance = found.gaussian.mean.double(), found.gaussian.variance.double() + 1
    apart = queries.unsqueeze(2) - mean.unsqueeze(1)  # [T, B, N, D]
    expected = (-0.5 * apart.square() / variance.unsqueeze(1)).sum(-1)
    relative = [one - one[..., :1] for one in (scores, expected)]  # squares of queries cancel
    torch.testing.assert_close(*relative, atol=1e-4, rtol=1e-4)


def test_an_export_leaves_nothing_of_its_tracing_in_the_reader() -> None:
    reader = read(*classes_of(8), READINGS[0])[0].reader
    support = values(1, 4, 3, WIDTH, seed=5).float()
    expected = reader._replace(constants={}).infer(SupportSet.of(support)).gaussian.mean

    class ReadSettings(torch.nn.Module):
        def forward(self, support: Tensor) -> Tensor:
            return reader.infer(SupportSet.of(support)).gaussian.mean

    torch.export.export(ReadSettings(), (support,))
    torch.testing.assert_close(reader.infer(SupportSet.of(support)).gaussian.mean, expected)
    assert list(reader.constants) == [3]


@pytest.mark.parametrize("how", READINGS)
def test_the_noise_is_the_mean_variance_within_classes(how: ReadSettings) -> None:
    features, class_ids = classes_of(8)
    memory, dense = read(features, class_ids, how)
    assert memory.reader.noise == pytest.approx(dense.noise, rel=1e-4)
    projected = memory.reader.rotation.double() @ memory.within @ memory.reader.rotation.double().mT
    assert memory.reader.noise == pytest.approx(projected.trace().item() / WIDTH, rel=1e-4)


@pytest.mark.parametrize("shots", [(1, 1, 1, 1, 5), (1, 5, 5, 5, 5), (2, 3, 4, 5, 6)])
def test_classes_of_more_examples_do_not_win_by_their_number(shots: tuple[int, ...]) -> None:
    """Of a shipped model, on its own unseen characters: as good as equally few or many examples."""
    trained, random = vsm.load("glyphs-5w1s"), np.random.default_rng(0)
    dataset, memory = vsm.open_dataset("glyphs"), trained.state
    assert isinstance(memory, GaussianMemory)
    found: list[float] = []
    fewest: list[float] = []
    for _ in range(40):
        classes = random.choice(dataset.classes("test"), 5, replace=False)
        images = [random.permutation(dataset.image_ids(int(one)))[:12] for one in classes]
        samples = dataset.normalize(dataset.load(np.stack(images)).flatten(0, 1))
        with torch.no_grad():
            rows = trained.model.project(trained.model.embed(samples), memory).view(5, 12, -1)
        queries = rows[:, 6:].flatten(0, 1).unsqueeze(0)
        for kept, answers in ((shots, found), ((min(shots),) * 5, fewest)):
            support = torch.cat([part[:k] for part, k in zip(rows, kept, strict=True)])
            inferred = memory.reader.infer(SupportSet.of_classes(support, kept))
            right = inferred.scores(queries)[0].argmax(-1) == torch.arange(5).repeat_interleave(6)
            answers.append(right.float().mean().item())
    assert np.mean(found) > np.mean(fewest) - 0.01


@pytest.mark.parametrize("num_classes", [0, 1])
def test_without_two_classes_the_nearest_mean_is_the_answer(num_classes: int) -> None:
    how = ReadSettings("un", 3.0, 1.0, 0.5)
    features, class_ids = classes_of(1)
    chosen = class_ids < num_classes
    memory = GaussianMemory.fit(
        features[chosen], class_ids[chosen], torch.zeros(WIDTH), how._replace(epsilon=INFINITY)
    )
    reader = memory.reader
    assert torch.equal(reader.ratios, torch.full((WIDTH,), FLAT))
    new, queries = values(3, 2, WIDTH, seed=5), values(20, WIDTH, seed=6)
    found = reader.infer(SupportSet.of(reader.project(new.float()).unsqueeze(0)))
    log_densities = log_density_of(found, reader.project(queries.float()).unsqueeze(0))[0]
    assert log_densities.isfinite().all()
    nearest = torch.cdist(queries, new.mean(1)).argmin(1)
    assert torch.equal(log_densities.argmax(-1), nearest)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalization", ["un", "l2n", "cl2n"])
def test_constant_features_leave_a_reader_that_answers_by_the_nearest_mean(
    normalization: Normalization, precision: torch.dtype
) -> None:
    """Sums of equal numbers may be off by their last bit, which must not be taken for scatter."""
    row = (values(WIDTH, seed=9) / 3 + 1).to(precision)
    features, class_ids = row.expand(21, -1), torch.arange(3).repeat_interleave(7)
    center = row / row.norm() if normalization != "cl2n" else values(WIDTH, seed=10)
    memory = GaussianMemory.fit(features, class_ids, center, ReadSettings(normalization, 3.0, 1.0))
    reader = memory.reader
    new = memory.normalize(values(2, 1, WIDTH, seed=11).float())
    found = reader.infer(SupportSet.of(reader.project(new).unsqueeze(0)))
    log_densities = log_density_of(found, reader.project(new).view(1, 2, WIDTH))[0]
    assert log_densities.isfinite().all()
    assert log_densities.argmax(-1).tolist() == [0, 1]
    assert log_densities.softmax(-1).diagonal().min() > 0.5


def test_classes_of_one_image_are_told_apart_by_their_means_alone() -> None:
    """No class has two members, so the noise is taken to be as large as the classes are apart."""
    features = values(5, WIDTH, seed=12)
    memory = GaussianMemory.fit(
        features, torch.arange(5), torch.zeros(WIDTH), ReadSettings("un", 1.0, 1.0)
    )
    assert torch.equal(memory.within, torch.zeros(WIDTH, WIDTH).double())
    centered = (features - features.mean(0)).numpy()
    noise = np.eye(WIDTH) * (centered**2).sum() / 5 / WIDTH
    a = memory.reader.rotation.double().numpy()
    np.testing.assert_allclose(a @ noise @ a.T, np.eye(WIDTH), atol=1e-5)
    between = centered.T @ centered / 5 + noise  # tr S_b = tr W, so β·W is W
    np.testing.assert_allclose(
        a @ between @ a.T, np.diag(memory.reader.ratios.double().numpy()), atol=1e-4
    )


def test_many_examples_outweigh_what_is_remembered() -> None:
    features, class_ids = classes_of(6)
    memory, _ = read(features, class_ids, ReadSettings("un", 1.0, 1.0, 0.5))
    reader = memory.reader
    one = reader.project(values(1, 2, 1, WIDTH, seed=13).float())
    many = SupportSet(one, one[:, :, 0], torch.full((1, 2, 1), 1e6))
    found = reader.infer(many)
    torch.testing.assert_close(found.gaussian.mean, one[:, :, 0], rtol=1e-4, atol=1e-4)
    assert found.gaussian.variance.max() < 1e-5
