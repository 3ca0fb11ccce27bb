"""Which unlabeled images to label next, and why.

A label is worth most where it explains many images that no class explains yet. Every unlabeled
image u is explained by the class in which it is most likely, with the score max_n s(u | n), and
would be explained by a labeled image x with s(u | x), the score in a class of which x is the only
example; both are predictive densities in closed form. So the images X to label maximize

    Σ_u max(max_n s(u | n), max_{x ∈ X} s(u | x))

It is submodular, and greedy choice comes within 1 − 1/e of the maximum (Nemhauser et al. 1978). An
image that stands for many is chosen before an odd one, images of classes without examples before
those of known ones, and never two that are nearly the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vsm.classify.fitted import FittedClasses
from vsm.errors import ClassifierError
from vsm.memory import GaussianReader, SupportSet
from vsm.seeding import generator

MOST_EXPLAINED = 4096
"""Images that are explained; of more, so many are drawn."""
CANDIDATES_AT_ONCE, STALE_AT_ONCE = 512, 64
SURE = 0.8  # probability from which one class is named alone


class Suggestion(NamedTuple):
    """An image whose label would help."""

    image: int  #: its position
    classes: tuple[Any, ...]  #: the most probable labels, two if there are
    probabilities: tuple[float, ...]  #: theirs
    novelty: float  #: probability of a class never met, if that counts as one more class
    stands_for: int  #: images that it explains better than all classes and earlier suggestions
    images: int  #: so many were looked at
    gain: float  #: by how much it explains them better, in nats

    @property
    def is_novel(self) -> bool:
        """Whether it is more likely of a class never met than of all classes together."""
        return self.novelty > 0.5

    @property
    def reason(self) -> str:
        """One line for people."""
        names = [repr(label) for label in self.classes]
        chances = [f"{probability:.0%}" for probability in self.probabilities]
        if self.is_novel:
            what = f"unlike all classes so far ({self.novelty:.0%}), nearest {names[0]}"
        elif len(names) == 1:
            what = f"probably {names[0]}"
        elif self.probabilities[0] >= SURE:
            what = f"probably {names[0]} ({chances[0]})"
        else:
            what = f"{' or '.join(names)} ({' / '.join(chances)})"
        return f"{what}; stands for {self.stands_for:,} of {self.images:,} images"


class Choice(NamedTuple):
    """A chosen candidate."""

    place: int
    stands_for: int  # images that it explains better
    gain: float  # by how much


def suggest(
    fitted: FittedClasses, features: Tensor, number: int, temperature: float
) -> list[Suggestion]:
    """Choose ``number`` of the images with ``features [n, D]`` to label, the most useful first."""
    if number < 1:
        raise ClassifierError(f"number: expected at least 1, got {number}")
    if not len(features):
        raise ClassifierError("images: there are no images to choose from, got none")
    memory = None if fitted.recalled is None else fitted.recalled.memory.statistics
    if memory is None:
        raise ClassifierError(
            f"model: {fitted.trained.name} has no Gaussian memory, which suggestions need; learn "
            "one with vsm memory learn"
        )
    with torch.inference_mode():
        reader = memory.reader.to(features.device)
        rows = fitted.project(features)
        explained = rows
        if len(rows) > MOST_EXPLAINED:
            drawn = torch.randperm(len(rows), generator=generator(fitted.seed, "suggest"))
            explained = rows[drawn[:MOST_EXPLAINED].sort().values.to(rows.device)]
        chosen = greedy_max_coverage(
            lambda places: one_shot_scores(reader, rows[places.to(rows.device)], explained).cpu(),
            fitted.posterior.scores(explained.unsqueeze(0))[0].amax(-1).cpu(),
            len(rows),
            number,
        )
        places = torch.tensor([one.place for one in chosen], device=features.device)
        classes = fitted.posterior.scores(rows[places].unsqueeze(0))[0].logsumexp(-1)
        novelty = (reader.marginal_scores(rows[places]) - classes).sigmoid().tolist()
    probabilities = torch.from_numpy(fitted.probabilities(features[places], temperature))
    best = probabilities.topk(min(2, probabilities.shape[-1]), dim=-1)
    labels = fitted.examples.labels
    return [
        Suggestion(
            one.place,
            tuple(labels[n] for n in best.indices[row].tolist()),
            tuple(best.values[row].tolist()),
            novelty[row],
            one.stands_for,
            len(explained),
            one.gain,
        )
        for row, one in enumerate(chosen)
    ]


def one_shot_scores(reader: GaussianReader, candidates: Tensor, rows: Tensor) -> Tensor:
    """Score ``rows [m, D]`` in classes that have one example each, ``candidates [k, D]``.

    All are projected. It is a log density for a softmax over classes: ``[k, m]``.
    """
    found = reader.infer(SupportSet.of(candidates.view(1, len(candidates), 1, -1)))
    return found.scores(rows.unsqueeze(0))[0].mT


def greedy_max_coverage(
    scores: Callable[[Tensor], Tensor], explained: Tensor, count: int, number: int
) -> list[Choice]:
    """Choose candidates one after the other by how much better they explain m images.

    Gains only fall as others are chosen. So those of before are bounds, and only candidates whose
    bound is the largest are looked at again (Minoux 1978), which changes no choice.

    ``scores`` maps candidates ``[k]`` to the scores ``[k, m]``; ``explained [m]`` are those without
    any. Of ``count`` candidates ``number`` are chosen.
    """

    def gains(places: Tensor) -> Tensor:
        return (scores(places) - explained).clamp_min(0).sum(-1)

    bounds = torch.cat([gains(part) for part in torch.arange(count).split(CANDIDATES_AT_ONCE)])
    chosen: list[Choice] = []
    fresh = torch.ones(count, dtype=torch.bool)
    for _ in range(min(number, count)):
        while True:
            order = bounds.sort(descending=True, stable=True).indices[:STALE_AT_ONCE]
            if fresh[order[0]]:
                break
            stale = order[~fresh[order]]
            bounds[stale] = torch.minimum(bounds[stale], gains(stale))
            fresh[stale] = True
        place = order[:1]
        [row] = scores(place)
        chosen.append(Choice(int(place), int((row > explained).sum()), bounds[place].item()))
        explained = torch.maximum(explained, row)
        fresh[:] = False
        bounds[[one.place for one in chosen]] = -1.0  # below all gains
        fresh[[one.place for one in chosen]] = True
    return chosen
