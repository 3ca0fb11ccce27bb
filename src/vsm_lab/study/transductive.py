"""Studies of transductive inference: does it harm, and how does it compare with other methods?

Everything was chosen before: ours with the memory, baselines on validation classes for each N and
K. Test classes are measured once. Inductive figures are the reference, and never mixed with others.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from vsm.data.episodes import Proportions
from vsm.evaluation.evaluator import EpisodeProtocol, Evaluation
from vsm.evaluation.intervals import estimate, reliability
from vsm.evaluation.transduction_choice import (
    Outcome,
    QuerySet,
    Trial,
    outcomes_of,
    query_sets,
)
from vsm.learning import class_features
from vsm.memory import Transduction
from vsm.memory.transduction import COVERAGE
from vsm.runs.directory import RunDirectory, find_run
from vsm.runs.trained_model import Measurement, ModelOnData
from vsm.settings import BaselineSettings
from vsm_lab.cells import class_interval
from vsm_lab.document import Block, Heading, Text, grouped_table
from vsm_lab.job_files import JobStore
from vsm_lab.jobs import Job, in_order
from vsm_lab.study.definition import Found, Study, TransductiveSettings
from vsm_lab.study.runs import run_job
from vsm_lab.transductive import TRANSDUCTIVE

INDUCTIVE, OURS, SEED = "inductive", "transductive", 0
MANY = 300  # queries


def compared_query_sets(way: int) -> dict[str, tuple[Proportions, float]]:
    """Return the query sets that methods are compared on: proportions, and share of outliers."""
    some = max(2, way * 2 // 5)
    missing = (*[1.0] * some, *[0.0] * (way - some))
    return {
        "balanced": ("balanced", 0.0),
        "Dirichlet(2)": (2.0, 0.0),
        "2/5 of the classes": (missing, 0.0),
        "Dirichlet(2), 30% outliers": (2.0, 0.3),
    }


def measure_methods(subject: ModelOnData, protocol: EpisodeProtocol, names: Sequence[str]) -> Found:
    """Measure the model both ways and baselines on every query set, paired with inductive."""
    found = {}
    others = len(subject.dataset.classes(protocol.split)) - protocol.way
    for label, (proportions, outliers) in compared_query_sets(protocol.way).items():
        if outliers and not others:
            continue
        values = asdict(protocol) | {"proportions": proportions, "outliers": outliers}
        inductive = subject.measure(EpisodeProtocol(**values))
        ours = subject.measure(EpisodeProtocol(**values | {"transductive": True}))
        measured = {INDUCTIVE: inductive, OURS: ours}
        for name in names:
            kind, settings = TRANSDUCTIVE[name], BaselineSettings()
            measured[name] = subject.measure_baseline(kind, inductive.protocol, settings)
        found[label] = {
            name: _scores(one, inductive.evaluation, ours.evaluation)
            for name, one in measured.items()
        }
    return found


def _scores(one: Measurement, inductive: Evaluation, ours: Evaluation) -> Found:
    found: Found = {
        "accuracy": asdict(one.accuracy),
        "nll": one.evaluation.nll,
        "ece": one.evaluation.reliability.expected_calibration_error,
        "over_inductive": _difference(one.evaluation, inductive),
        "behind_ours": _difference(ours, one.evaluation),
    }
    if one.baseline is not None:
        found["chosen"] = dict(one.baseline_settings or {})
    return found


def _difference(first: Evaluation, second: Evaluation) -> Found:
    """Return by how much the first is more accurate, with intervals over episodes and classes."""
    way, queries = first.class_ids.shape[1], first.labels.shape[1]
    gain = estimate(first.episode_accuracies - second.episode_accuracies)
    shares = (first.confusions - second.confusions) * way / queries  # adds up to the difference
    classes = class_interval(shares, first.class_ids, SEED)
    return {**asdict(gain), "ci95_classes": classes}


def measure_harm(subject: ModelOnData, protocol: EpisodeProtocol) -> Found:
    """Measure the model both ways on many query sets of any size, none of them chosen on."""
    trained, way, shot = subject.trained, protocol.way, protocol.shot
    thresholds = trained.thresholds()
    others = class_features(trained.encoder, subject.dataset, protocol.split)
    trial = Trial(trained.state, others)
    limit = thresholds.at(COVERAGE, [shot] * way)[0].item()
    kinds = query_sets(way, shot, [others])
    if (min(others.sizes) - shot) * way >= 2 * MANY:
        kinds.append(QuerySet(2.0, MANY))
    ways = (Transduction(weight=0.0), trained.transduction)
    temperatures = (1.0, trained.transduction.temperature(shot))
    found = []
    for kind in kinds:
        pair = outcomes_of(
            trained.model, [trial], limit, (way, shot), kind, ways, protocol.seed, protocol.episodes
        )
        gain = estimate(pair[1].accuracy - pair[0].accuracy)
        rows = [_task_scores(*one) for one in zip(pair, temperatures, strict=True)]
        found.append({"query_set": kind._asdict(), "rows": rows, "gain": asdict(gain)})
    return {"sets": found, "chosen": trained.transduction.as_dict()}


def _task_scores(outcome: Outcome, temperature: float) -> Found:
    scaled = torch.log_softmax(outcome.log_probabilities / temperature, -1)
    correct = outcome.log_probabilities.argmax(-1) == outcome.labels
    bins = reliability(scaled.amax(-1).exp().flatten(), correct.flatten())
    return {
        "accuracy": outcome.accuracy.mean().item(),
        "nll": outcome.nll(temperature).mean().item(),
        "ece": bins.expected_calibration_error,
    }


class TransductivePlan:
    """The jobs of a study of transductive inference; takes what :class:`.runs.StudyPlan` takes."""

    def __init__(self, study: Study, backbones: Sequence[str] = (), **options: Any) -> None:
        assert isinstance(study.settings, TransductiveSettings)
        self.study, self.asked = study, study.settings
        self.cells: dict[tuple[str, str, int, int], Job] = {}
        asked = self.asked
        for label, name in asked.models.items():
            path = find_run(name)
            settings = RunDirectory(path).settings()
            model = run_job(path, settings, backbones, options)
            for way, shot in product(asked.ways, asked.shots):
                queries = asked.queries.get(label, 15)
                if way > 5:
                    queries = min(queries, asked.many_way_queries)
                title = f"{way}-way {shot}-shot of {label}"
                for what, episodes, more in (
                    ("harm", asked.episodes, {}),
                    ("methods", asked.compared_episodes, {"baselines": list(asked.baselines)}),
                ):
                    shape = (way, shot, queries, episodes * 5 // way, SEED)
                    protocol = asdict(EpisodeProtocol(settings.data, "test", *shape))
                    job = Job(what, f"{what}, {title}", {"protocol": protocol, **more}, (model,))
                    self.cells[label, what, way, shot] = job
        self.jobs = in_order(self.cells.values())

    def write_results(self, store: JobStore) -> Found:
        """Collect the finished jobs, and write the result file."""
        rows = [
            {
                "model": label,
                "what": what,
                "way": way,
                "shot": shot,
                "protocol": job.recipe["protocol"],
                "found": store.outcome(job),
            }
            for (label, what, way, shot), job in self.cells.items()
        ]
        return self.study.write_results({"measured": rows})


def transductive_blocks(results: Found) -> list[Block]:
    """Return the content of the page: of each model whether it harms, then the comparison."""
    blocks: list[Block] = [
        Text(
            "Accuracy in percent on the queries that are of the task's classes, with 95% intervals "
            "over episodes, and in parentheses over classes; differences in points, paired by "
            "episode. NLL in nats, ECE in 15 bins, inductive → transductive."
        )
    ]
    models = dict.fromkeys(one["model"] for one in results["measured"])
    for model in models:
        measured = [one for one in results["measured"] if one["model"] == model]
        harm = [one for one in measured if one["what"] == "harm"]
        used = harm[0]["found"]["chosen"]
        blocks += [
            Heading(2, model),
            Text(
                f"An unlabeled image counts as {used['weight']:g} examples, the prior of equal "
                f"classes as {used['prior']:g} × the images there are: chosen with the memory, on "
                "other classes. Every way of dealing queries to classes:"
            ),
            grouped_table(
                ["", "queries", "inductive", "gain", "NLL", "ECE"],
                {_title(one): [_harm_row(row) for row in one["found"]["sets"]] for one in harm},
            ),
            Text("Methods on the same features and episodes: accuracy, and ours less the method."),
        ]
        methods = [one for one in measured if one["what"] == "methods"]
        kinds = list(methods[0]["found"])
        columns = ["", "method", *(column for kind in kinds for column in (kind, "ours −"))]
        groups = {_title(one): _method_rows(one["found"], kinds) for one in methods}
        blocks.append(grouped_table(columns, groups))
    return blocks


def _title(one: Found) -> str:
    return f"{one['way']}-way {one['shot']}-shot"


def _harm_row(row: Found) -> list[str]:
    (before, after), gain = row["rows"], row["gain"]
    return [
        describe_query_set(QuerySet(**row["query_set"])),
        f"{100 * before['accuracy']:.1f}",
        f"{100 * gain['mean']:+.1f} ± {100 * gain['ci95']:.1f}",
        f"{before['nll']:.3f} → {after['nll']:.3f}",
        f"{100 * before['ece']:.1f} → {100 * after['ece']:.1f}",
    ]


def describe_query_set(kind: QuerySet) -> str:
    """Describe how queries are dealt, for people."""
    shares = kind.proportions
    if isinstance(shares, list | tuple):
        some = sum(one > 0 for one in shares)
        dealt = "of one class" if some == 1 else f"of {some} classes"
    else:
        even = "of equally likely classes"
        dealt = even if isinstance(shares, str) else f"Dirichlet({shares:g})"
    outliers = f", {kind.outliers:.0%} outliers" if kind.outliers else ""
    outliers += " of one class" if kind.alike else ""
    return f"{kind.number} {dealt}{outliers}"


def _method_rows(found: Found, kinds: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in found[kinds[0]]:
        cells = [name]
        for kind in kinds:
            if kind not in found:
                cells += ["–", "–"]
                continue
            one = found[kind][name]
            behind, accuracy = one["behind_ours"], one["accuracy"]
            apart = f"{100 * behind['mean']:+.1f} ± {100 * behind['ci95']:.1f}"
            if behind["ci95_classes"] is not None:
                apart += f" ({100 * behind['ci95_classes']:.1f})"
            cells += [
                f"{100 * accuracy['mean']:.1f} ± {100 * accuracy['ci95']:.1f}",
                "" if name == OURS else apart,
            ]
        rows.append(cells)
    return rows
