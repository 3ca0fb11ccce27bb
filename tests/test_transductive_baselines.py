"""Transductive baselines, against plain float64 loops, autograd, scikit-learn and each other."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.neighbors import kneighbors_graph
from sklearn.semi_supervised import LabelSpreading
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vsm.baselines import BASELINES, BaseFeatures
from vsm.settings import BaselineSettings
from vsm_lab.transductive import TRANSDUCTIVE, TransductiveBaseline
from vsm_lab.transductive.contract import support_targets, unit
from vsm_lab.transductive.graph import neighbor_weights
from vsm_lab.transductive.laplacian_shot import rectified
from vsm_lab.transductive.pt_map import PowerTransformMap
from vsm_lab.transductive.tim import AlphaTim, Tim

Array = npt.NDArray[np.float64]
Loop = Callable[[Array, Array, Mapping[str, float]], Array]

LABELS = tuple(TRANSDUCTIVE)
MEAN = torch.linspace(-0.3, 0.4, 6).double()  # of the training features


def build(label: str, mean: Tensor = MEAN, /, **chosen: float) -> TransductiveBaseline:
    base = BaseFeatures(torch.stack([mean - 1, mean + 1]), [2])
    return TRANSDUCTIVE[label](BaselineSettings(), lambda: base, **chosen)


def tasks(
    shot: int, num_tasks: int = 3, way: int = 3, queries: int = 7, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Support ``[T, N, K, 6]`` and queries ``[T, B, 6]`` of unequal classes around random means."""
    random = torch.Generator().manual_seed(shot)
    means = torch.randn(num_tasks, way, 6, generator=random).double()
    labels = torch.randint(way, (num_tasks, queries), generator=random)
    drawn = torch.randn(num_tasks, way * shot + queries, 6, generator=random).double()
    support = means.unsqueeze(2) + noise * drawn[:, : way * shot].unflatten(1, (way, shot))
    chosen = means.gather(1, labels.unsqueeze(-1).expand(-1, -1, 6))
    return support, chosen + noise * drawn[:, way * shot :]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def answers(baseline: TransductiveBaseline, support: Tensor, queries: Tensor) -> Tensor:
    with torch.no_grad():
        return baseline.fit_predict(support, queries, torch.Generator())


# --- the contract, for all of them ---------------------------------------------------------------


def test_the_methods_have_the_names_of_the_command_line() -> None:
    assert LABELS == (
        "soft-kmeans",
        "tim",
        "alpha-tim",
        "laplacian-shot",
        "pt-map",
        "stat-a",
        "label-propagation",
    )


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize("label", LABELS)
def test_every_query_has_normalized_probabilities(label: str, shot: int) -> None:
    support, queries = tasks(shot)
    random = torch.Generator().manual_seed(1)
    before = random.get_state()
    found = build(label).fit_predict(support, queries, random)
    assert found.shape == (3, 7, 3)
    assert found.dtype == torch.float64
    assert not found.requires_grad
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, 7).double())
    assert torch.equal(random.get_state(), before), "nothing is drawn"


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize("label", LABELS)
def test_order_of_classes_support_and_queries_does_not_matter(
    label: str, shot: int, ties: bool
) -> None:
    support, queries = tasks(shot, queries=20)
    if ties:  # many images are the same, and as near to one as to another
        support, queries = (
            part[..., :2].round().repeat(1, 1, 3) for part in (support[:, :, 0], queries)
        )
        support = support.unsqueeze(2).expand(-1, -1, shot, -1)
    baseline = build(label, MEAN * (not ties))
    found = answers(baseline, support, queries)
    classes = torch.tensor([2, 0, 1])
    images, places = torch.arange(shot).flip(0), (7 * torch.arange(20) + 3) % 20
    moved = answers(baseline, support[:, classes][:, :, images], queries[:, places])
    assert_equal(moved, found[:, places][..., classes])


@pytest.mark.parametrize("label", LABELS)
def test_a_task_does_not_depend_on_its_neighbors(label: str) -> None:
    support, queries = tasks(5)
    support[1], queries[1] = 1e3 * support[1], 0.0  # none of them is easy to converge with
    baseline = build(label)
    together = answers(baseline, support, queries)
    for t in range(3):
        alone = answers(baseline, support[t : t + 1], queries[t : t + 1])
        torch.testing.assert_close(alone[0], together[t], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("label", LABELS)
def test_queries_help_where_few_labels_mislead(label: str) -> None:
    random = torch.Generator().manual_seed(0)
    means = 2 + torch.eye(5, 20)
    images = means.view(1, 5, 1, 20) + 0.3 * torch.randn(60, 5, 16, 20, generator=random)
    support, queries = images[:, :, :1], images[:, :, 1:].flatten(1, 2)
    labels = torch.arange(5).repeat_interleave(15)
    base = BaseFeatures(means.mean(0, keepdim=True), [1])
    chosen = {"stat-a": {"likelihood": 0.4}, "alpha-tim": {"sharpness": 8, "alpha": 1.5}}
    nearest = BASELINES["simpleshot"](BaselineSettings(), lambda: base)
    adapted = TRANSDUCTIVE[label](BaselineSettings(), lambda: base, **chosen.get(label, {}))
    before, after = (
        (one.fit_predict(support, queries, random).argmax(-1) == labels).double().mean()
        for one in (nearest, adapted)
    )
    assert 0.7 < before < 0.8
    assert after > before + 0.03


def hostile(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    support, queries = (part.to(dtype) for part in tasks(2, queries=8))
    return {
        "duplicates": (support[:, :, :1].expand_as(support), support.flatten(1, 2)),
        "one query": (support, queries[:, :1]),
        "fewer queries than classes": (support, queries[:, :2]),
        "identical queries": (support, queries[:, :1].expand_as(queries)),
        "identical support": (support[:, :1, :1].expand_as(support), queries),
        "all identical": (torch.ones_like(support), torch.ones_like(queries)),
        "zero queries": (support, torch.zeros_like(queries)),
        "zeros": (torch.zeros_like(support), torch.zeros_like(queries)),
        "support at the mean": (MEAN.to(support).expand_as(support), queries),
        "huge": (1e30 * support, 1e30 * queries),
        "tiny": (1e-30 * support, 1e-30 * queries),
        "mixed": (1e20 * support, 1e-20 * queries),
        "opposite": (support, -support.flatten(1, 2)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label", LABELS)
def test_hostile_features_have_finite_answers(label: str, dtype: torch.dtype) -> None:
    for name, parts in hostile(dtype).items():
        found = answers(build(label, MEAN * ("mean" in name)), *parts)
        assert torch.isfinite(found).all(), name
        sums = found.exp().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), msg=name)


@pytest.mark.parametrize("label", LABELS)
def test_identical_features_give_even_odds(label: str) -> None:
    support, queries = torch.ones(2, 3, 2, 6).double(), torch.ones(2, 4, 6).double()
    found = answers(build(label), support, queries)
    torch.testing.assert_close(found, torch.full((2, 4, 3), 1 / 3).double().log())


@pytest.mark.parametrize("label", LABELS)
def test_about_as_many_candidates_are_tried_of_every_method(label: str) -> None:
    method = TRANSDUCTIVE[label]
    assert 9 <= len(method.candidates) <= 12
    assert len({tuple(sorted(one.items())) for one in method.candidates}) == len(method.candidates)
    support, queries = tasks(1, num_tasks=1)
    for candidate in method.candidates:
        baseline = build(label, **candidate)
        assert baseline.chosen == {**method.defaults, **candidate}
        assert torch.isfinite(answers(baseline, support, queries)).all()


@pytest.mark.parametrize("label", LABELS)
def test_an_unknown_hyperparameter_is_named(label: str) -> None:
    with pytest.raises(TypeError, match=rf"^colour: not a hyper-parameter of {label}; it has \w+"):
        build(label, colour=3)


class PeakElements(TorchDispatchMode):
    """Counts the numbers in all tensors that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.alive += [weakref.ref(one) for one in tree_leaves(found) if isinstance(one, Tensor)]
        self.alive = [one for one in self.alive if one() is not None]
        tensors = [one() for one in self.alive]
        kept = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
        numbers = (t.untyped_storage().nbytes() // t.element_size() for t in kept.values())
        self.most = max(self.most, sum(numbers))
        return found


@pytest.mark.parametrize("num_features", [8, 256])
@pytest.mark.parametrize("label", LABELS)
def test_a_task_holds_no_more_numbers_than_estimated(label: str, num_features: int) -> None:
    random = torch.Generator().manual_seed(0)
    support = torch.randn(4, 5, 2, num_features, generator=random)
    queries = torch.randn(4, 150, num_features, generator=random)  # half of them outliers
    few = {"steps": 2} if "steps" in TRANSDUCTIVE[label].defaults else {}
    baseline = build(label, torch.zeros(num_features), **few)
    with PeakElements() as peak:
        answers(baseline, support, queries)
    estimate = baseline.elements_per_task(5, 2, 15, num_features)
    assert estimate / 6 < peak.most / 4 < estimate


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30])
def test_vectors_of_any_size_are_scaled_to_length_one(scale: float) -> None:
    features = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    scaled = scale * features.double()
    torch.testing.assert_close(unit(scaled.float()), unit(features), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(unit(features), F.normalize(features, dim=-1))
    assert unit(torch.zeros(2, 6)).tolist() == [[0] * 6] * 2


# --- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_graph_is_that_of_scikit_learn(count: int) -> None:
    _, queries = tasks(1)
    points = F.normalize(queries, dim=-1)
    for task, found in zip(points, neighbor_weights(points, count), strict=True):
        expected = kneighbors_graph(task.numpy(), count, include_self=False).toarray()
        np.testing.assert_array_equal(found.numpy(), expected)


def test_neighbors_at_the_same_distance_share_what_is_left() -> None:
    angles = torch.tensor([0.0, 0.3, -0.3, 0.5, -0.5, 2.0]).double()
    points = torch.stack([angles.cos(), angles.sin()], -1).unsqueeze(0)
    found = neighbor_weights(points, 3)[0]
    torch.testing.assert_close(found[0], torch.tensor([0, 1, 1, 0.5, 0.5, 0]).double())
    torch.testing.assert_close(found.sum(-1), torch.full((6,), 3.0).double())
    assert neighbor_weights(points[:, :3], 9).sum(-1).tolist() == [[2, 2, 2]]
    assert neighbor_weights(points[:, :1], 9).tolist() == [[[0]]]


# --- plain loops over the equations of each paper ------------------------------------------------


def norm(vector: Array) -> Array:
    result: Array = vector / np.sqrt((vector * vector).sum())
    return result


def softmax(scores: Any) -> Array:
    shifted = np.exp(np.array(scores) - np.max(scores))
    result: Array = shifted / shifted.sum()
    return result


def square(vector: Array) -> float:
    return float((vector * vector).sum())


def soft_kmeans_loop(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    def assign(query: Array) -> Array:
        return softmax([-square(query - p) / chosen["temperature"] for p in prototypes])

    prototypes = [sum(images) / len(images) for images in support]
    for _ in range(int(chosen["steps"])):
        z = [assign(query) for query in queries]
        prototypes = [
            (sum(images) + sum(z[i][n] * query for i, query in enumerate(queries)))
            / (len(images) + sum(z[i][n] for i in range(len(queries))))
            for n, images in enumerate(support)
        ]
    return np.log([assign(query) for query in queries])


def tim_loop(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    """The closed forms of TIM-ADM, as the paper writes them."""
    tau, lam, alpha = (chosen[n] for n in ("sharpness", "support_weight", "entropy_weight"))
    way, shot = support.shape[:2]
    known = [(image, np.eye(way)[n]) for n in range(way) for image in support[n]]

    def predict(image: Array) -> Array:
        return softmax([-tau / 2 * square(w - image) for w in weights])

    weights = [images.mean(0) for images in support]
    share = way * shot / len(queries)
    for _ in range(int(chosen["steps"])):
        p = [predict(query) for query in queries]
        p_known = [predict(image) for image, _ in known]
        raised = np.array([row ** (1 + alpha) for row in p])
        q = np.array([row / raised.sum(0) ** 0.5 for row in raised])
        q = np.array([row / row.sum() for row in q])
        moved = []
        for n in range(way):
            top, bottom = np.zeros(support.shape[2]), 0.0
            for (image, target), row in zip(known, p_known, strict=True):
                part = target[n] * image + row[n] * (weights[n] - image)
                top += lam / (1 + alpha) * part
                bottom += lam / (1 + alpha) * target[n]
            for i, query in enumerate(queries):
                top += share * (q[i, n] * query + p[i][n] * (weights[n] - query))
                bottom += share * q[i, n]
            moved.append(top / bottom)
        weights = moved
    return np.log([predict(query) for query in queries])


def laplacian_shot_loop(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    prototypes = support.mean(1)
    if chosen["rectify"]:
        queries = queries + support.reshape(-1, support.shape[2]).mean(0) - queries.mean(0)
        prototypes = rectify_loop(support, queries)
    graph = graph_loop(queries, int(chosen["neighbors"]))
    distances = np.array([[square(query - p) for p in prototypes] for query in queries])
    y = np.array([softmax(-row) for row in distances])
    for _ in range(int(chosen["steps"])):
        pulls = [sum(w * v for w, v in zip(line, y, strict=True)) for line in graph]
        scores = [
            chosen["smoothness"] * pull - row for pull, row in zip(pulls, distances, strict=True)
        ]
        y = np.array([softmax(row) for row in scores])
    result: Array = np.log(y)
    return result


def graph_loop(points: Array, count: int) -> Array:
    """1 for mutual neighbors, ½ for others."""
    graph = np.zeros((len(points), len(points)))
    for i, point in enumerate(points):
        others = sorted((square(point - other), j) for j, other in enumerate(points) if j != i)
        for _, j in others[:count]:
            graph[i, j] += 0.5
            graph[j, i] += 0.5
    return graph


def rectify_loop(support: Array, queries: Array) -> Array:
    prototypes = support.mean(1)
    sums, counts = np.zeros_like(prototypes), np.zeros(len(prototypes))
    for image in [*support.reshape(-1, support.shape[2]), *queries]:
        cosines = np.array([norm(image) @ norm(p) for p in prototypes])
        best = cosines.argmax()
        sums[best] += softmax(10 * cosines)[best] * image
        counts[best] += 1
    return np.array([s / c if c else p for s, c, p in zip(sums, counts, prototypes, strict=True)])


def pt_map_loop(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    """Algorithm 1 of PT-MAP; Sinkhorn runs until it has converged."""

    def prepare(images: Array) -> Array:
        powers = [norm(np.sign(row) * np.abs(row) ** chosen["power"]) for row in images]
        return np.array([norm(row - np.mean(powers, 0)) for row in powers])

    def transport() -> Array:
        cost = np.array([[square(query - c) for c in centers] for query in inputs])
        plan: Array = np.exp(-chosen["sharpness"] * cost)
        for _ in range(10_000):
            plan = plan * (len(inputs) / way / plan.sum(0))
            plan = plan / plan.sum(1, keepdims=True)
            if np.abs(plan.sum(0) - len(inputs) / way).max() < 1e-13:
                return plan
        raise AssertionError("Sinkhorn did not converge")

    way, shot, width = support.shape
    known = prepare(support.reshape(-1, width)).reshape(way, shot, width)
    inputs = prepare(queries)
    centers = known.mean(1)
    for _ in range(int(chosen["steps"])):
        plan = transport()
        for n in range(way):
            total = known[n].sum(0) + sum(plan[i, n] * row for i, row in enumerate(inputs))
            estimate = total / (shot + plan[:, n].sum())
            centers[n] = centers[n] + chosen["rate"] * (estimate - centers[n])
    return np.log(transport())


def gaussians_loop(
    anchors: Array, spread: Array, z: Array, queries: Array, chosen: Mapping[str, float]
) -> tuple[Array, Array]:
    """Means and variances ``[N, D]`` given the assignments."""
    scale = norm if chosen["unit"] else np.asarray
    hard = np.eye(z.shape[1])[z.argmax(1)] if chosen["hard"] else z
    means, variances, weights = [], [], []
    for n, anchor in enumerate(anchors):
        count = hard[:, n].sum()
        beta = count / (count + chosen["anchor"])
        found = scale(sum(z[i, n] * row for i, row in enumerate(queries)) / z[:, n].sum())
        mean = scale(beta * found + (1 - beta) * anchor)
        around = sum(z[i, n] * (row - mean) ** 2 for i, row in enumerate(queries)) / z[:, n].sum()
        means.append(mean)
        variances.append(beta * around + (1 - beta) * (spread + (anchor - mean) ** 2))
        weights.append(count + chosen["anchor"])
    if chosen["shared"]:
        mixed = sum(w * v for w, v in zip(weights, variances, strict=True)) / sum(weights)
        variances = [mixed for _ in variances]
    return np.array(means), np.array(variances)


def normal_log(row: Array, mean: Array, variance: Array) -> float:
    return float(-0.5 * (np.log(variance) + (row - mean) ** 2 / variance).sum())


def stat_a_start(
    support: Array, queries: Array, chosen: Mapping[str, float]
) -> tuple[Array, Array, Array, Array]:
    """ŷ, anchors, Σ' and λW."""
    scale = norm if chosen["unit"] else np.asarray
    anchors = np.array([scale(images.mean(0)) for images in support])
    guess = np.array(
        [softmax([chosen["sharpness"] * norm(row) @ norm(a) for a in anchors]) for row in queries]
    )
    spread = sum(
        guess[i, n] * (row - anchor) ** 2
        for i, row in enumerate(queries)
        for n, anchor in enumerate(anchors)
    ) / len(queries)
    count = int(chosen["neighbors"])
    cosines = np.array([[max(a @ b, 0.0) for a in queries] for b in queries])
    graph = chosen["smoothness"] / count * graph_loop(queries, count) * cosines
    return guess, anchors, np.asarray(spread), graph


def stat_a_loop(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    guess, anchors, spread, graph = stat_a_start(support, queries, chosen)
    z, means, variances = guess, anchors, np.array([spread for _ in anchors])
    for step in range(int(chosen["steps"]) + 1):
        if step:
            means, variances = gaussians_loop(anchors, spread, z, queries, chosen)
        gaussians = list(zip(means, variances, strict=True))
        for _ in range(5):
            scores = []
            for i, row in enumerate(queries):
                likelihoods = np.array([normal_log(row, *gaussian) for gaussian in gaussians])
                neighbors = sum(graph[i, j] * z[j] for j in range(len(queries)))
                scores.append(np.log(guess[i]) + chosen["likelihood"] * likelihoods + neighbors)
            z = np.array([softmax(row) for row in scores])
    result: Array = np.log(z)
    return result


def label_spreading(support: Array, queries: Array, chosen: Mapping[str, float]) -> Array:
    """LabelSpreading of scikit-learn, which repeats F ← αSF + (1 − α)Y, on our graph."""

    def kernel(points: Array, others: Array) -> Array:
        links = np.zeros((len(points), len(points)))
        for i, j in np.argwhere(graph_loop(points, int(chosen["neighbors"]))):
            links[i, j] = np.exp(-square(points[i] - points[j]) / (2 * chosen["width"] ** 2))
        return links

    way, shot, width = support.shape
    images = np.concatenate([support.reshape(-1, width), queries])
    labels = np.concatenate([np.arange(way).repeat(shot), np.full(len(queries), -1)])
    oracle = LabelSpreading(kernel=kernel, alpha=chosen["alpha"], max_iter=100_000, tol=1e-13)
    oracle.fit(images, labels)
    result: Array = np.log(oracle.label_distributions_[way * shot :])
    return result


LOOPS: dict[str, tuple[Loop, list[dict[str, float]]]] = {
    "soft-kmeans": (soft_kmeans_loop, [{}, {"temperature": 1.3, "steps": 2}, {"steps": 0}]),
    "tim": (tim_loop, [{"steps": 30}, {"sharpness": 4, "support_weight": 1, "steps": 10}]),
    "laplacian-shot": (
        laplacian_shot_loop,
        [{}, {"rectify": 1}, {"neighbors": 2, "smoothness": 2}],
    ),
    "pt-map": (pt_map_loop, [{"sweeps": 400}, {"power": 1, "rate": 0.4, "sweeps": 400}]),
    "stat-a": (
        stat_a_loop,
        [
            {},
            {"likelihood": 0.4, "neighbors": 2},
            {"likelihood": 0.4, "hard": 0},
            {"likelihood": 0.4, "hard": 0, "unit": 0, "shared": 1},
            {"likelihood": 0.4, "anchor": 7, "shared": 1, "steps": 3},
        ],
    ),
    "label-propagation": (
        label_spreading,
        [{"neighbors": 9}, {"neighbors": 4, "alpha": 0.5, "width": 1}],
    ),
}


@pytest.mark.parametrize("shot", [1, 3])
@pytest.mark.parametrize(
    ("label", "case"),
    [(label, n) for label, (_, cases) in LOOPS.items() for n in range(len(cases))],
)
def test_answers_equal_a_plain_loop(label: str, case: int, shot: int) -> None:
    loop, cases = LOOPS[label]
    support, queries = tasks(shot, num_tasks=2, queries=10)
    baseline = build(label, **cases[case])
    found = answers(baseline, support, queries)
    raw = label == "pt-map"  # prepares its features itself
    for t in range(2):
        known, inputs = support[t].numpy(), queries[t].numpy()
        if not raw:
            known = np.array([[norm(x - MEAN.numpy()) for x in images] for images in known])
            inputs = np.array([norm(x - MEAN.numpy()) for x in inputs])
        expected = loop(known, inputs, baseline.chosen)
        np.testing.assert_allclose(found[t].numpy(), expected, atol=1e-6)


# --- soft k-means --------------------------------------------------------------------------------


def test_without_steps_soft_kmeans_is_simpleshot() -> None:
    support, queries = tasks(3)
    baseline = build("soft-kmeans", steps=0, temperature=0.4)
    nearest = BASELINES["simpleshot"](BaselineSettings(temperature=0.4), baseline.base)
    expected = nearest.fit_predict(support, queries, torch.Generator())
    torch.testing.assert_close(answers(baseline, support, queries), expected)


# --- TIM and α-TIM -------------------------------------------------------------------------------


def classifier(shot: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Images ``[3, S + 7, 6]``, targets and weights that are not where they start."""
    support, queries = tasks(shot)
    images = F.normalize(torch.cat([support.flatten(1, 2), queries], 1), dim=-1)
    noise = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(5)).double()
    return images, support_targets(support), 0.5 * noise


def predictions(images: Tensor, weights: Tensor, sharpness: float) -> Tensor:
    return F.softmax(-sharpness / 2 * torch.cdist(images, weights).square(), -1)


def test_a_step_of_tim_is_a_scaled_gradient_step_on_its_objective() -> None:
    lam, alpha, tau = 0.3, 0.4, 5.0
    images, targets, weights = classifier()
    known = targets.shape[1]
    method = build("tim", support_weight=lam, entropy_weight=alpha, sharpness=tau, steps=1)
    assert isinstance(method, Tim)
    moved = method.adapt(images, targets, weights)
    weights.requires_grad_()
    p = predictions(images, weights, tau)
    raised = p[:, known:].detach() ** (1 + alpha)
    q = raised / raised.sum(1, keepdim=True).sqrt()
    q /= q.sum(-1, keepdim=True)
    cross_entropy = -(targets * p[:, :known].log()).sum(-1).mean(1)
    penalty = -(q * p[:, known:].log()).sum(-1).mean(1)
    (lam * cross_entropy + (1 + alpha) * penalty).sum().backward()
    assert weights.grad is not None
    counts = lam / (1 + alpha) * targets.sum(1) + known / q.shape[1] * q.sum(1)
    step = known / ((1 + alpha) * tau * counts).unsqueeze(-1) * weights.grad
    torch.testing.assert_close(moved, (weights - step).detach(), atol=1e-9, rtol=1e-9)


def mutual_information(p: Tensor, q_entropy: Callable[[Tensor], Tensor], weight: float) -> Tensor:
    return q_entropy(p.mean(1)) - weight * q_entropy(p).mean(1)


def test_tim_raises_mutual_information_and_keeps_to_the_support() -> None:
    def entropy(p: Tensor) -> Tensor:
        return -(p * p.log()).sum(-1)

    images, targets, _ = classifier()
    known = targets.shape[1]
    start = torch.stack([images[:, :known].unflatten(1, (3, -1)).mean(2)]).squeeze(0)
    values = []
    for steps in (0, 5, 50):
        method = build("tim", steps=steps, sharpness=5)
        assert isinstance(method, Tim)
        p = predictions(images, method.adapt(images, targets, start), 5)
        gain = mutual_information(p[:, known:], entropy, 0.1)
        loss = -(targets * p[:, :known].log()).sum(-1).mean(1)
        values.append((gain - 0.1 * loss).tolist())
    assert all(a < b < c for a, b, c in zip(*values, strict=True))


def alpha_objective(images: Tensor, targets: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """λ = 0.7, weight of the second entropy 0.6, τ = 5; α = 1 is Shannon's entropy."""

    def entropy(p: Tensor) -> Tensor:
        if alpha == 1:
            return -(p * p.log()).sum(-1)
        return (1 - (p**alpha).sum(-1)) / (alpha - 1)

    known = targets.shape[1]
    p = predictions(images, weights, 5.0)
    cross_entropy = -(targets * p[:, :known].log()).sum(-1).mean(1)
    return (0.7 * cross_entropy - mutual_information(p[:, known:], entropy, 0.6)).sum()


def alpha_tim(alpha: float, steps: int = 40) -> AlphaTim:
    weights = {"support_weight": 0.7, "entropy_weight": 0.6, "sharpness": 5.0}
    found = build("alpha-tim", alpha=alpha, steps=steps, rate=0.01, **weights)
    assert isinstance(found, AlphaTim)
    return found


@pytest.mark.parametrize("alpha", [1.5, 2.0, 7.0])
def test_the_gradient_of_alpha_tim_is_that_of_autograd(alpha: float) -> None:
    images, targets, weights = classifier()
    found = alpha_tim(alpha).gradient(images, targets, weights)
    weights.requires_grad_()
    [expected] = torch.autograd.grad(alpha_objective(images, targets, weights, alpha), weights)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_alpha_near_one_is_the_entropy_of_shannon() -> None:
    images, targets, weights = classifier()
    found = alpha_tim(1 + 1e-6).gradient(images, targets, weights)
    weights.requires_grad_()
    [expected] = torch.autograd.grad(alpha_objective(images, targets, weights, 1.0), weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("alpha", [2.0, 7.0])
@pytest.mark.parametrize("shot", [1, 3])
def test_alpha_tim_is_adam_of_torch_on_its_objective(shot: int, alpha: float) -> None:
    support, queries = tasks(shot)
    found = answers(alpha_tim(alpha), support, queries)
    known, inputs = (F.normalize(part - MEAN, dim=-1) for part in (support, queries))
    images = torch.cat([known.flatten(1, 2), inputs], 1)
    weights = known.mean(2).clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        alpha_objective(images, support_targets(support), weights, alpha).backward()
        optimizer.step()
    expected = predictions(inputs, weights.detach(), 5.0).log()
    assert_equal(found, expected)


# --- LaplacianShot -------------------------------------------------------------------------------


def prepared(shot: int = 3, queries: int = 30, noise: float = 0.7) -> tuple[Tensor, Tensor]:
    support, found = tasks(shot, queries=queries, noise=noise)
    return F.normalize(support - MEAN, dim=-1), F.normalize(found - MEAN, dim=-1)


@pytest.mark.parametrize("smoothness", [0.3, 0.7])
def test_no_bound_update_raises_the_objective_of_laplacian_shot(smoothness: float) -> None:
    support, queries = prepared()
    graph = np.array([graph_loop(task, 3) for task in queries.numpy()])
    assert np.linalg.eigvalsh(graph).min() > -2 / smoothness
    distances = torch.cdist(queries, support.mean(2)).square().numpy()
    values = []
    for steps in range(12):
        method = build("laplacian-shot", 0 * MEAN, smoothness=smoothness, steps=steps)
        y = answers(method, support, queries).exp().numpy()
        pairs = np.einsum("tij,tin,tjn->t", graph, y, y)
        values.append((y * (np.log(y) + distances)).sum((1, 2)) - smoothness / 2 * pairs)
    changes = np.diff(values, axis=0)
    assert (changes < 1e-9).all()
    assert (changes[0] < -0.1).all()


def test_a_class_that_is_nearest_to_no_image_keeps_its_prototype() -> None:
    places = torch.tensor([[0, 0], [0, 2], [2, 2]])  # the images of the second are in the others
    support = torch.eye(3).double()[places].unsqueeze(0)
    queries = torch.eye(3).double()[:1].unsqueeze(0)
    found = rectified(support, queries)[0]
    expected = rectify_loop(support[0].numpy(), queries[0].numpy())
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


# --- PT-MAP --------------------------------------------------------------------------------------


def test_the_plan_of_pt_map_gives_every_class_the_same_number_of_queries() -> None:
    support, queries = prepared()
    method = build("pt-map", sweeps=2000)
    assert isinstance(method, PowerTransformMap)
    scores = method.transport(queries, support.mean(2))  # log P
    assert_equal(scores.exp().sum(1), torch.full((3, 3), 10.0).double())
    torch.testing.assert_close(scores.exp().sum(2), torch.ones(3, 30).double())
    kernel = -10 * torch.cdist(queries, support.mean(2)).square()
    torch.testing.assert_close(without_scales(scores), without_scales(kernel))


def without_scales(matrix: Tensor) -> Tensor:
    """What factors of rows and columns leave of the logarithm of a matrix."""
    rows, columns = matrix.mean(2, keepdim=True), matrix.mean(1, keepdim=True)
    return matrix - rows - columns + matrix.mean((1, 2), keepdim=True)


# --- StatA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("likelihood", [0.1, 1.0])
@pytest.mark.parametrize("anchor", [1, 5])
def test_no_step_of_stat_a_raises_its_objective(
    anchor: float, likelihood: float, shared: int
) -> None:
    support, queries = prepared()
    chosen = {"anchor": anchor, "likelihood": likelihood, "shared": shared, "hard": 0, "unit": 0}
    values: list[list[float]] = []
    for steps in range(6):
        method = build("stat-a", 0 * MEAN, steps=steps, **chosen)
        found = answers(method, support, queries).exp().numpy()
        parts = zip(support.numpy(), queries.numpy(), found, strict=True)
        values.append([stat_a_objective(*part, method.chosen) for part in parts])
    changes = np.diff(np.array(values), axis=0)
    assert (changes < 1e-9).all()
    assert (changes[0] < -1e-4).all()


def stat_a_objective(
    support: Array, queries: Array, z: Array, chosen: Mapping[str, float]
) -> float:
    """The objective at z and the best Gaussians for it, KL divergences by torch.distributions."""
    guess, anchors, spread, graph = stat_a_start(support, queries, chosen)
    means, variances = gaussians_loop(anchors, spread, z, queries, chosen)
    first, second = (
        torch.distributions.Normal(torch.from_numpy(mean), torch.from_numpy(variance).sqrt())
        for mean, variance in ((anchors, np.array([spread for _ in anchors])), (means, variances))
    )
    divergence = torch.distributions.kl_divergence(first, second).sum()
    points = torch.from_numpy(queries).unsqueeze(1)
    likelihoods = second.log_prob(points).sum(-1).numpy()  # [B, N]
    gaussian = -(z * likelihoods).sum() + chosen["anchor"] * float(divergence)
    pairs = sum(graph[i, j] * z[i] @ z[j] for i in range(len(z)) for j in range(len(z)))
    return float((z * np.log(z / guess)).sum() - pairs / 2 + chosen["likelihood"] * gaussian)


@pytest.mark.parametrize("shared", [0, 1])
def test_the_gaussians_of_stat_a_are_where_its_objective_is_flat(shared: int) -> None:
    """So the loop that the method is compared with minimizes what the paper says."""
    support, queries = (part[0].numpy() for part in prepared())
    chosen = {**TRANSDUCTIVE["stat-a"].defaults, "hard": 0, "unit": 0, "shared": shared}
    guess, anchors, spread, _ = stat_a_start(support, queries, chosen)
    start = gaussians_loop(anchors, spread, guess, queries, chosen)
    mean, variance = (torch.from_numpy(part).requires_grad_() for part in start)
    scale = variance[:1].expand(3, -1) if shared else variance
    gaussians = torch.distributions.Normal(mean, scale.sqrt())
    anchor = torch.distributions.Normal(torch.from_numpy(anchors), torch.from_numpy(spread**0.5))
    log = gaussians.log_prob(torch.from_numpy(queries).unsqueeze(1)).sum(-1)
    divergence = torch.distributions.kl_divergence(anchor, gaussians).sum()
    (chosen["anchor"] * divergence - (torch.from_numpy(guess) * log).sum()).backward()
    for part in (mean, variance):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, torch.zeros_like(part.grad), atol=1e-8, rtol=0)


def test_a_strong_anchor_holds_the_gaussians_of_stat_a() -> None:
    support, queries = prepared()
    chosen = {"likelihood": 0.5, "smoothness": 0.0}
    held = answers(build("stat-a", 0 * MEAN, anchor=1e9, **chosen), support, queries)
    first = answers(build("stat-a", 0 * MEAN, steps=0, **chosen), support, queries)
    free = answers(build("stat-a", 0 * MEAN, anchor=1, **chosen), support, queries)
    assert_equal(held, first)
    assert (free - first).abs().max() > 0.1


def test_a_class_that_has_no_query_keeps_the_anchor_of_stat_a() -> None:
    support = torch.eye(3).view(1, 3, 1, 3)
    queries = torch.eye(3)[[0, 0, 1]].unsqueeze(0)
    for hard in (0, 1):
        method = build("stat-a", torch.zeros(3), sharpness=1e4, hard=hard)  # its count is 0
        found = answers(method, support, queries)
        assert torch.isfinite(found).all()
        assert found.argmax(-1).tolist() == [[0, 0, 1]]


def test_rounding_makes_no_variance_of_stat_a_negative() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randn(50, 3, 1, 6, generator=random)
    queries = images.squeeze(2).repeat_interleave(60, 1)  # copies: no variance but the anchor's
    method = build("stat-a", torch.zeros(6), anchor=1e-3, likelihood=1)
    assert torch.isfinite(answers(method, images, queries)).all()


# --- label propagation ---------------------------------------------------------------------------


def test_a_query_that_no_label_reaches_has_even_odds() -> None:
    near = torch.tensor([[1.0, 0], [0.99, 0.1]]).double()
    far = torch.tensor([[-1.0, 0], [-0.99, 0.1], [-0.99, -0.1]]).double()
    support = torch.stack([near[:1], near[1:]]).unsqueeze(0)  # [1, 2, 1, 2]
    method = build("label-propagation", torch.zeros(2).double(), neighbors=1)
    found = answers(method, support, torch.cat([near, far]).unsqueeze(0)).exp()[0]
    torch.testing.assert_close(found[2:], torch.full((3, 2), 0.5).double())
    assert (found[:2].amax(-1) > 0.6).all()
