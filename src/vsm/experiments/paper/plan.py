"""From a request (``vsm reproduce table-1 --budget smoke --seeds 3``) to the jobs it takes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vsm.data import EpisodeSampler, open_images
from vsm.data.catalog import FOLDER_PREFIX
from vsm.errors import DataError, RunError, SettingsError
from vsm.experiments.checksums import data_checksum
from vsm.experiments.jobs import Job, describe, evaluate_job, in_order, pretrain_job, train_job
from vsm.experiments.paper.budgets import Budget, Unavailable, budget
from vsm.experiments.paper.catalog import Column, PaperTable, Row, table
from vsm.experiments.store import JobStore
from vsm.settings import PretrainSettings, RunSettings

EVALUATION_SEED = 0


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        table: name of a table or figure.
        budget: name of a budget.
        data: datasets; empty: those of the budget, else the paper's.
        seeds: number of training runs per cell, with seeds 0, 1, ….
        rows: names of rows; empty: all that can be measured.
        checksums: of the data when it was asked for, so that results are found without the data.
    """

    table: str
    budget: str
    data: tuple[str, ...] = ()
    seeds: int = 3
    rows: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise SettingsError(f"seeds: must be at least 1, got {self.seeds}")
        object.__setattr__(self, "data", tuple(map(_with_full_path, self.data)))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Request":
        """Return the request that :meth:`as_dict` described."""
        tuples = {name: tuple(values[name]) for name in ("data", "rows")}
        return Request(**{**values, **tuples})

    def joined(self, other: "Request") -> "Request":
        """Return one request for all that two requests of one table, budget and data ask for."""
        rows = tuple(dict.fromkeys((*self.rows, *other.rows))) if self.rows and other.rows else ()
        return replace(other, seeds=max(self.seeds, other.seeds), rows=rows)


@dataclass(frozen=True)
class PlannedColumn:
    """A column to measure, and the positions of the paper's columns it is set beside.

    Where ``data`` is the paper's, that is one column; where it stands in for the paper's, all
    columns of the same way and shot.
    """

    column: Column
    beside: tuple[int, ...]
    stands_in: bool


@dataclass(frozen=True)
class Plan:
    """The jobs of a request.

    Attributes:
        request: what was asked for.
        table: the table or figure.
        budget: the budget.
        columns: the columns to measure.
        cells: the job that measures each (row name, position of a column, seed).
        unavailable: why rows that were asked for cannot be measured.
    """

    request: Request
    table: PaperTable
    budget: Budget
    columns: tuple[PlannedColumn, ...]
    cells: Mapping[tuple[str, int, int], Job]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def jobs(self) -> list[Job]:
        """Every job, each once, in an order in which they can be run."""
        return in_order(self.cells.values())

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets to measure on."""
        return tuple(dict.fromkeys(planned.column.data for planned in self.columns))


def make_plan(request: Request) -> Plan:
    """Return the plan of ``request`` without computing or writing anything."""
    shown, affordable = table(request.table), budget(request.budget)
    columns = _columns(shown, request.data or tuple(affordable.data))
    datasets = dict.fromkeys(planned.column.data for planned in columns)
    checksums = {data: data_checksum(data, request.checksums) for data in datasets}
    request = replace(request, checksums=checksums)
    cells: dict[tuple[str, int, int], Job] = {}
    unavailable: dict[str, str] = {}
    for row in _rows(shown, request):
        for position, planned in enumerate(columns):
            for seed in range(request.seeds):
                try:
                    settings = affordable.settings(shown, planned.column, row, seed)
                    job = _cell(shown, affordable, settings, row.slots, checksums)
                except Unavailable as reason:
                    unavailable[row.name] = str(reason)
                else:
                    cells[row.name, position, seed] = job
    return Plan(request, shown, affordable, columns, cells, unavailable)


def check_data(plan: Plan) -> None:
    """Raise unless every dataset of the plan is prepared and can supply its episodes."""
    for data in plan.datasets:
        try:
            dataset = open_images(data)
        except DataError as error:
            raise DataError(f"{plan.table.name}: {error}; or choose data with --data") from error
        for planned in plan.columns:
            if planned.column.data == data:
                way, shot = planned.column.way, planned.column.shot
                EpisodeSampler(dataset, "train", way, shot, plan.budget.queries)
                EpisodeSampler(dataset, "test", way, shot, plan.budget.queries)


def _columns(shown: PaperTable, datasets: tuple[str, ...]) -> tuple[PlannedColumn, ...]:
    own = [
        PlannedColumn(column, (position,), stands_in=False)
        for position, column in enumerate(shown.columns)
    ]
    if not datasets:
        return tuple(own)
    chosen: list[PlannedColumn] = []
    for data in dict.fromkeys(datasets):
        of_paper = [planned for planned in own if planned.column.data == data]
        chosen += of_paper or _stand_in(shown, data)
    return tuple(chosen)


def _stand_in(shown: PaperTable, data: str) -> list[PlannedColumn]:
    """Return one column of ``data`` for each way and shot the table has."""
    beside: dict[Column, list[int]] = {}
    for position, column in enumerate(shown.columns):
        beside.setdefault(Column(data, column.way, column.shot), []).append(position)
    return [PlannedColumn(column, tuple(found), True) for column, found in beside.items()]


def _rows(shown: PaperTable, request: Request) -> tuple[Row, ...]:
    if not request.rows:
        return shown.measured_rows
    rows = tuple(shown.row(name) for name in request.rows)
    for row in rows:
        if row.changes is None:
            raise SettingsError(
                f"rows: {row.name} of {shown.name} is only quoted from the paper; rows that can be "
                f"measured: {', '.join(one.name for one in shown.measured_rows)}"
            )
    return rows


def _cell(
    shown: PaperTable,
    affordable: Budget,
    settings: RunSettings,
    slots: int | None,
    checksums: Mapping[str, str],
) -> Job:
    """Return the measurement of a run on test episodes of its own way and shot."""
    checksum = checksums[settings.data]
    training = train_job(settings, checksum, _pretraining(affordable, settings, checksum))
    protocol = {
        "data": settings.data,
        "split": "test",
        "way": settings.way,
        "shot": settings.shot,
        "queries": affordable.queries,
        "episodes": affordable.episodes,
        "seed": EVALUATION_SEED,
    }
    if shown.kind == "prototypes":
        title = f"look at the prototypes of {describe(settings)}"
        return Job("prototypes", title, {"protocol": protocol}, (training,))
    cut = "" if slots is None else f", {slots} slots"
    title = f"measure {describe(settings)}{cut}"
    return evaluate_job(training, title, protocol, slots=None if slots is None else (slots, 0))


def _pretraining(affordable: Budget, settings: RunSettings, checksum: str) -> Job | None:
    """Return the pre-training that all rows of a dataset and all seeds begin with, if any."""
    epochs = affordable.epochs(settings.data)
    if epochs is None:
        return None
    model = settings.model
    return pretrain_job(
        PretrainSettings(
            data=settings.data,
            backbone=model.backbone,
            channels=model.channels,
            epochs=epochs,
            augment_colors=False,
        ),
        checksum,
    )


def _with_full_path(data: str) -> str:
    """Let a folder be found from anywhere."""
    if not data.startswith(FOLDER_PREFIX):
        return data
    return f"{FOLDER_PREFIX}{Path(data.removeprefix(FOLDER_PREFIX)).expanduser().resolve()}"


def remember(store: JobStore, request: Request) -> Request:
    """Keep what was asked for, joined with what was asked before of the same columns."""
    columns = json.dumps([request.table, request.budget, request.data])
    name = f"{request.table}-{request.budget}-{hashlib.sha256(columns.encode()).hexdigest()[:8]}"
    if store.request_file(name).is_file():
        request = _read_request(store.request_file(name)).joined(request)
    store.write_request(name, request.as_dict())
    return request


def requests(store: JobStore) -> list[Request]:
    """Return everything that was asked for."""
    return [_read_request(path) for path in store.request_files()]


def _read_request(path: Path) -> Request:
    try:
        return Request.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); delete it and ask for its table again: no job is lost"
        ) from error
