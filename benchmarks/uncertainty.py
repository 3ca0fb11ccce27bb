"""How honest the classifier's doubts are: coverage, strangers spotted, calibration, and its causes.

An episode has five classes that are fitted with K examples each, and five strangers; the same
episodes serve every K, with the first K of ten examples. Which score spots strangers best is asked
of validation classes; test classes are measured once, with the score that the package uses. Writes
uncertainty.json beside this file and renders docs/uncertainty.md from it.

    python -m benchmarks.uncertainty
    python -m benchmarks.uncertainty --render
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run
from vsm.classify import Pretrained, open_pretrained
from vsm.classify.explanation import split_uncertainty
from vsm.cli.output import counting
from vsm.data import EpisodeSampler, Split, open_dataset
from vsm.errors import RunError
from vsm.evaluation.calibration import scale_by_temperature
from vsm.evaluation.evaluator import Advance, cached_embedder
from vsm.evaluation.rejection import SHOTS, class_scores, slots_of
from vsm.evaluation.statistics import auroc, estimate, reliability
from vsm.experiments.document import Block, Heading, Table, Text, to_markdown
from vsm.memory import SupportSet
from vsm.model import FewShotModel
from vsm.nn.prototype_classifier import predictive
from vsm.runs.shipped import shipped_names
from vsm.seeding import Randomness, task_generators
from vsm.system.allocator import keep_allocations
from vsm.system.files import write_text

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "uncertainty.md"
WAY, STRANGERS, QUERIES, SEED = 5, 5, 10, 0
COVERAGES = (0.8, 0.9, 0.95)
AT_ONCE = 10  # episodes
CHOSEN, DISTANCE = "distance against memory", "distance alone"
SCORES = (CHOSEN, DISTANCE, "largest probability")

Found = dict[str, Any]
Measure = Callable[[Pretrained, Tensor, Tensor, Randomness], dict[str, Tensor]]
Values = dict[str, list[Tensor]]


def measure_model(name: str, episodes: int, advance: Advance) -> Found:
    """Measure one model on validation and on test classes."""
    opened = open_pretrained(name)
    found: Found = {"model": name, "data": opened.model.settings.data}
    parts: tuple[tuple[Split, Measure], ...] = (("validation", spotting), ("test", doubts))
    for split, about in parts:
        values: dict[int, Values] = {shot: defaultdict(list) for shot in SHOTS}
        for support, queries, tasks in _episodes(opened, split, episodes, advance):
            for shot in SHOTS:
                random = task_generators(SEED, "uncertainty-noise", 0, tasks)
                for key, value in about(opened, support[:, :, :shot], queries, random).items():
                    values[shot][key].append(value)
        found[split] = {
            str(shot): summary({key: torch.cat(parts) for key, parts in of_shot.items()})
            for shot, of_shot in values.items()
        }
        found[f"{split}_paired"] = paired(values)
    return found


def _episodes(
    opened: Pretrained, split: Split, count: int, advance: Advance
) -> Iterator[tuple[Tensor, Tensor, range]]:
    """Yield support ``[T, 5, 10, D]``, queries ``[T, 10, Q, D]``, and which episodes they are."""
    dataset = open_dataset(opened.model.settings.data)
    sampler = EpisodeSampler(dataset, split, WAY + STRANGERS, SHOTS[-1], QUERIES)
    embed, done = cached_embedder(opened.model, sampler), 0
    for block in sampler.evaluation_episodes(count, SEED):
        for image_ids in block.image_ids.split(AT_ONCE):
            support, queries = embed(image_ids).split([SHOTS[-1], QUERIES], 2)
            yield support[:, :WAY], queries, range(done, done + len(image_ids))
            done += len(image_ids)
            advance(len(image_ids))


@torch.no_grad()
def spotting(
    opened: Pretrained, support: Tensor, queries: Tensor, random: Randomness
) -> dict[str, Tensor]:
    """Return the area under the ROC curve of strangers against queries of the classes ``[T]``."""
    model, memory = opened.model, None if opened.memory is None else opened.memory.memory
    prototypes = model.infer(SupportSet.of(support), memory, random).prototypes
    rows = queries.flatten(1, 2)
    probabilities = predictive(model.classifier(rows, prototypes)).exp()
    scores = {
        CHOSEN: nearest(model, prototypes, rows, slots_of(memory)),
        DISTANCE: nearest(model, prototypes, rows, None),
        "largest probability": -probabilities.amax(-1),
    }
    return {name: auroc(*_known_and_strange(score)) for name, score in scores.items()}


def nearest(model: FewShotModel, prototypes: Tensor, rows: Tensor, slots: Tensor | None) -> Tensor:
    """Return the lowest score of each row over the classes ``[T, B]``."""
    return class_scores(model, prototypes, rows, slots).amin(-1)


def _known_and_strange(values: Tensor) -> tuple[Tensor, ...]:
    """Split what belongs to queries ``[T, B, ...]`` into those of the classes and strangers."""
    parts: tuple[Tensor, ...] = values.split([WAY * QUERIES, STRANGERS * QUERIES], 1)
    return parts


@torch.no_grad()
def doubts(
    opened: Pretrained, support: Tensor, queries: Tensor, random: Randomness
) -> dict[str, Tensor]:
    """Return all that is told of test classes, one number an episode ``[T]`` or a query each."""
    model, memory = opened.model, None if opened.memory is None else opened.memory.memory
    shot = support.shape[2]
    prototypes = model.infer(SupportSet.of(support), memory, random).prototypes
    rows = queries.flatten(1, 2)
    known, strange = _known_and_strange(nearest(model, prototypes, rows, slots_of(memory)))
    told = {"auroc": auroc(known, strange)}
    for coverage in COVERAGES:
        limit = opened.thresholds().at(coverage, [shot] * WAY)[0]
        told[f"answered at {coverage}"] = (known <= limit).double().mean(1)
        told[f"spotted at {coverage}"] = (strange > limit).double().mean(1)
    log_probabilities = model.classifier(rows[:, : WAY * QUERIES], prototypes)
    for part, nats in zip(
        ("total", "aleatoric", "epistemic"), split_uncertainty(log_probabilities), strict=True
    ):
        told[part] = nats.double().mean(1)
    labels = torch.arange(WAY).repeat_interleave(QUERIES).expand(len(rows), -1)
    for name, temperature in (("", 1.0), (" calibrated", opened.temperature(shot))):
        answers = scale_by_temperature(predictive(log_probabilities), temperature)
        told[f"nll{name}"] = -answers.gather(-1, labels.unsqueeze(-1))[..., 0].double().mean(1)
        told[f"confidence{name}"] = answers.amax(-1).exp()  # [T, B]
        told["correct"] = answers.argmax(-1) == labels
    return told


def summary(values: dict[str, Tensor]) -> Found:
    """Return means with intervals over episodes, and calibration errors over all queries."""
    found: Found = {name: asdict(estimate(v)) for name, v in values.items() if v.ndim == 1}
    if "correct" in values:
        correct = values["correct"]
        found["accuracy"] = asdict(estimate(correct.double().mean(1)))
        for name in ("", " calibrated"):
            bins = reliability(values[f"confidence{name}"].flatten(), correct.flatten())
            found[f"ece{name}"] = bins.expected_calibration_error
    return found


def paired(values: dict[int, Values]) -> Found:
    """Return differences episode by episode: of scores at one K, and of doubt from K to the next.

    Validation classes tell how much better the chosen score is than distance alone, test classes by
    how much epistemic uncertainty and the rest fall with more examples.
    """
    whole = {shot: {k: torch.cat(parts) for k, parts in v.items()} for shot, v in values.items()}
    if CHOSEN in whole[SHOTS[0]]:
        return {
            str(shot): {
                other: asdict(estimate(of_shot[CHOSEN] - of_shot[other])) for other in SCORES[1:]
            }
            for shot, of_shot in whole.items()
        }
    return {
        f"{fewer} to {more}": {
            part: asdict(estimate(whole[more][part] - whole[fewer][part]))
            for part in ("total", "aleatoric", "epistemic")
        }
        for fewer, more in pairwise(SHOTS)
    }


def percent(found: Found, signed: bool = False) -> str:
    mean = f"{100 * found['mean']:+.1f}" if signed else f"{100 * found['mean']:.1f}"
    return f"{mean} ± {100 * found['ci95']:.1f}"


def nats(found: Found, signed: bool = False) -> str:
    return f"{found['mean']:{'+' if signed else ''}.4f} ± {found['ci95']:.4f}"


def page(results: Found) -> list[Block]:
    """Return the page as blocks."""
    blocks: list[Block] = [
        Heading(1, "How honest the doubts are"),
        Text(
            "Rendered from `benchmarks/uncertainty.json`, which `python -m benchmarks.uncertainty` "
            "wrote: no figure is typed by hand. "
            f"{results['episodes']} episodes (seed {results['seed']}) of {results['way']} classes "
            f"with K examples each and {results['strangers']} strangers, {results['queries']} "
            "queries a class; the same episodes for every K. In percent, with 95% intervals over "
            "episodes: other classes of the kind would vary by more."
        ),
    ]
    for found in results["models"]:
        blocks += _about(found)
    return blocks


def _about(found: Found) -> list[Block]:
    validation, test = found["validation"], found["test"]
    return [
        Heading(2, f"{found['model']}"),
        Text(
            f"Which score spots strangers, on validation classes of {found['data']}: area under "
            f"the ROC curve (50 is chance), and what {CHOSEN} has more than the others, paired."
        ),
        Table(
            ["K", *SCORES, *(f"− {other}" for other in SCORES[1:])],
            [
                [
                    shot,
                    *(percent(of_shot[score]) for score in SCORES),
                    *(percent(found["validation_paired"][shot][o], True) for o in SCORES[1:]),
                ]
                for shot, of_shot in validation.items()
            ],
        ),
        Text(
            f"Test classes, by {CHOSEN} and the thresholds that are stored with the model: the "
            "share of pictures of the classes that is answered, and of strangers that is spotted, "
            "when so much coverage is asked for."
        ),
        Table(
            [
                "K",
                "AUROC",
                *(f"{what} at {c}" for c in COVERAGES for what in ("answered", "spotted")),
            ],
            [
                [
                    shot,
                    percent(of_shot["auroc"]),
                    *(
                        percent(of_shot[f"{what} at {c}"])
                        for c in COVERAGES
                        for what in ("answered", "spotted")
                    ),
                ]
                for shot, of_shot in test.items()
            ],
        ),
        Text(
            "Probabilities on test classes as computed, and calibrated by the card's temperature, "
            "which is the classifier's default: NLL in nats, calibration error (ECE, 15 bins)."
        ),
        Table(
            ["K", "accuracy", "NLL", "NLL calibrated", "ECE", "ECE calibrated"],
            [
                [
                    shot,
                    percent(of_shot["accuracy"]),
                    nats(of_shot["nll"]),
                    nats(of_shot["nll calibrated"]),
                    f"{100 * of_shot['ece']:.1f}",
                    f"{100 * of_shot['ece calibrated']:.1f}",
                ]
                for shot, of_shot in test.items()
            ],
        ),
        Text("Uncertainty on test classes in nats, and how it changes with more examples, paired:"),
        Table(
            ["K", "total", "aleatoric", "epistemic"],
            [
                *(
                    [shot, *(nats(of_shot[part]) for part in ("total", "aleatoric", "epistemic"))]
                    for shot, of_shot in test.items()
                ),
                *(
                    [step, *(nats(of_step[p], True) for p in ("total", "aleatoric", "epistemic"))]
                    for step, of_step in found["test_paired"].items()
                ),
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=shipped_names(), help="names or folders")
    parser.add_argument("--episodes", type=int, default=500, help="of each split")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the result file")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown page")
    chosen = parser.parse_args()
    if not chosen.render:
        keep_allocations()
        with counting("uncertainty", 2 * chosen.episodes * len(chosen.models), False) as advance:
            models = [measure_model(name, chosen.episodes, advance) for name in chosen.models]
        facts = {"episodes": chosen.episodes, "seed": SEED, "way": WAY, "strangers": STRANGERS}
        results = {**facts, "queries": QUERIES, "models": models}
        write_text(chosen.results, json.dumps(results, indent=2) + "\n")
    if not chosen.results.is_file():
        raise RunError(f"results: {chosen.results} is not there yet; leave out --render")
    results = json.loads(chosen.results.read_text(encoding="utf-8"))
    write_text(chosen.page, to_markdown(page(results)))
    print(chosen.page)


if __name__ == "__main__":
    sys.exit(run(main))
