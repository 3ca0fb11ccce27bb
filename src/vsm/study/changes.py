"""Single answers that the memory changed, with all that is needed to understand them."""

from typing import Any

import torch
from torch import Tensor

from vsm.evaluation.comparison import EpisodeProtocol, LoadedRun, measure
from vsm.evaluation.evaluator import Advance, Evaluation, evaluation_mode, unwatched
from vsm.seeding import generator

NUM_TURNED_RIGHT = 3
NUM_MISLED = 1
NUM_RECALLED = 4


def changed_answers(
    with_memory: LoadedRun,
    without: LoadedRun,
    protocol: EpisodeProtocol,
    advance: Advance = unwatched,
) -> dict[str, Any]:
    """Return how many answers the memory turned right and wrong, and the most drastic of them.

    Those shown are of different episodes, and the true class's probability changed most in them:
    they are extremes, not examples of what is usual.
    """
    before = measure(without, protocol, advance).evaluation
    after = measure(with_memory, protocol, advance).evaluation
    gain = after.log_likelihood.exp() - before.log_likelihood.exp()  # [E, B]
    turned, misled = after.correct & ~before.correct, before.correct & ~after.correct
    chosen = [("turned right", *place) for place in _largest(gain, turned, NUM_TURNED_RIGHT)]
    chosen += [("misled", *place) for place in _largest(-gain, misled, NUM_MISLED)]
    return {
        "turned_right": turned.double().mean().item(),
        "misled": misled.double().mean().item(),
        "shown": [
            _described(kind, episode, query, with_memory, protocol, before, after)
            for kind, episode, query in chosen
        ],
    }


def _largest(scores: Tensor, allowed: Tensor, count: int) -> list[tuple[int, int]]:
    """Return (episode, query) of the largest allowed scores ``[E, B]``, one of an episode."""
    best, queries = scores.masked_fill(~allowed, -torch.inf).max(1)
    episodes = best.argsort(descending=True)[:count].tolist()
    return [(e, int(queries[e])) for e in episodes if best[e] > -torch.inf]


@torch.no_grad()
def _described(
    kind: str,
    episode: int,
    query: int,
    run: LoadedRun,
    protocol: EpisodeProtocol,
    before: Evaluation,
    after: Evaluation,
) -> dict[str, Any]:
    sampler, names = protocol.sampler(run.dataset), run.dataset.class_names
    blocks = list(sampler.evaluation_episodes(episode + 1, protocol.seed))
    image_ids = blocks[-1].image_ids[-1]  # [N, K + Q]
    true, place = divmod(query, protocol.queries)
    return {
        "kind": kind,
        "episode": episode,
        "classes": [names[c] for c in after.class_ids[episode].tolist()],
        "support": image_ids[:, : protocol.shot].tolist(),
        "query": int(image_ids[true, protocol.shot + place]),
        "true": true,
        "before": before.log_probabilities[episode, query].exp().tolist(),
        "after": after.log_probabilities[episode, query].exp().tolist(),
        "recalled": _recalled(run, run.embedder(sampler)(image_ids.unsqueeze(0)), protocol),
    }


def _recalled(
    run: LoadedRun, features: Tensor, protocol: EpisodeProtocol
) -> list[list[dict[str, Any]]]:
    """Return the slots that each class of ``features [1, N, K + Q, D]`` recalled most."""
    trained, dataset = run.trained, run.dataset
    slots = [] if trained.memory is None else trained.memory.slot_classes
    if not slots:
        return []
    support, queries = features.split([protocol.shot, protocol.queries], 2)
    with evaluation_mode(trained.model):
        random = generator(protocol.seed, "changes")
        recollection = trained.model(support, queries, trained.memory, random).recollection
    best = recollection.weights[0].topk(min(NUM_RECALLED, len(slots)))  # [N, R]
    return [
        [
            {
                "class": dataset.class_names[slots[slot]],
                "image": int(dataset.image_ids(slots[slot])[0]),
                "weight": weight,
            }
            for weight, slot in zip(weights, chosen, strict=True)
        ]
        for weights, chosen in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
