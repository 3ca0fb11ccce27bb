"""From a request (``vsm reproduce table-1 --budget smoke --seeds 3``) to the jobs it takes.

Requests are kept in ``requests/`` beside the jobs, so that a later command knows what belongs in a
report.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from vsm.data import EpisodeSampler, open_images
from vsm.data.catalog import FOLDER_PREFIX
from vsm.errors import DataError, RunError, SettingsError
from vsm.settings import PretrainSettings, RunSettings
from vsm.system.files import read_object, write_json
from vsm_lab.job_files import JobStore, data_checksum
from vsm_lab.jobs import Job, describe, evaluate_job, in_order, pretrain_job, train_job
from vsm_lab.paper.tables import Budget, Column, PaperTable, Row, Unavailable, budget, table


@dataclass(frozen=True)
class Request:
    """The options of ``vsm reproduce``; empty data and rows mean all.

    ``checksums`` are those of the data when it was asked for: results are found without the data.
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

    def joined(self, other: "Request") -> "Request":
        """Return one request for all that two requests of one table, budget and data ask for."""
        rows = tuple(dict.fromkeys((*self.rows, *other.rows))) if self.rows and other.rows else ()
        return replace(other, seeds=max(self.seeds, other.seeds), rows=rows)


def _with_full_path(data: str) -> str:
    """Let a folder be found from anywhere."""
    if not data.startswith(FOLDER_PREFIX):
        return data
    return f"{FOLDER_PREFIX}{Path(data.removeprefix(FOLDER_PREFIX)).expanduser().resolve()}"


@dataclass(frozen=True)
class PlannedColumn:
    """A column to measure, and the positions of the paper's columns it is compared with.

    Data that stands in for the paper's is compared with all columns of the same way and shot.
    """

    column: Column
    beside: tuple[int, ...]
    stands_in: bool


@dataclass(frozen=True)
class Plan:
    """The jobs of a request.

    Attributes:
        cells: the job that measures each (row name, position of a column, seed).
        unavailable: why rows that were asked for cannot be measured.
    """

    request: Request
    table: PaperTable
    budget: Budget
    columns: tuple[PlannedColumn, ...]
    cells: Mapping[tuple[str, int, int], Job]
    unavailable: Mapping[str, str]

    @cached_property
    def jobs(self) -> list[Job]:
        """Every job, each once, in an order in which they can be run."""
        return in_order(self.cells.values())

    @property
    def datasets(self) -> list[str]:
        """The datasets to measure on."""
        return list(self.request.checksums)


def make_plan(request: Request) -> Plan:
    """Return the plan of ``request`` without computing or writing anything."""
    shown, affordable = table(request.table), budget(request.budget)
    columns = _columns(shown, request.data or affordable.data)
    datasets = dict.fromkeys(planned.column.data for planned in columns)
    checksums = {data: data_checksum(data, request.checksums) for data in datasets}
    cells: dict[tuple[str, int, int], Job] = {}
    unavailable: dict[str, str] = {}
    for row in _rows(shown, request):
        for position, planned in enumerate(columns):
            for seed in range(request.seeds):
                try:
                    settings = affordable.settings(shown, planned.column, row, seed)
                except Unavailable as reason:
                    unavailable[row.name] = str(reason)
                    continue
                job = _cell(shown, affordable, settings, row, checksums[settings.data])
                cells[row.name, position, seed] = job
    request = replace(request, checksums=checksums)
    return Plan(request, shown, affordable, columns, cells, unavailable)


def check_data(plan: Plan) -> None:
    """Raise unless every dataset of the plan is prepared and can supply its episodes."""
    for data in plan.datasets:
        try:
            dataset = open_images(data)
        except DataError as error:
            raise DataError(f"{plan.table.name}: {error}; or choose data with --data") from error
        for column in (planned.column for planned in plan.columns if planned.column.data == data):
            EpisodeSampler(dataset, "train", column.way, column.shot, plan.budget.queries)
            EpisodeSampler(dataset, "test", column.way, column.shot, plan.budget.queries)


def _columns(shown: PaperTable, datasets: tuple[str, ...]) -> tuple[PlannedColumn, ...]:
    """Return the paper's columns of each dataset, or one for each way and shot if it has none."""
    chosen: list[PlannedColumn] = []
    for data in dict.fromkeys(datasets or shown.datasets):
        stands_in = data not in shown.datasets
        beside: dict[Column, list[int]] = {}
        for position, column in enumerate(shown.columns):
            if stands_in or column.data == data:
                beside.setdefault(replace(column, data=data), []).append(position)
        chosen += [PlannedColumn(column, tuple(at), stands_in) for column, at in beside.items()]
    return tuple(chosen)


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
    shown: PaperTable, affordable: Budget, settings: RunSettings, row: Row, checksum: str
) -> Job:
    """Return the measurement of a run on test episodes of its own way and shot."""
    epochs, pretraining = affordable.epochs(settings.data), None
    if epochs is not None:  # all rows of a dataset and all seeds begin with the same backbone
        backbone = PretrainSettings(
            data=settings.data,
            backbone=settings.model.backbone,
            channels=settings.model.channels,
            epochs=epochs,
            augment_colors=False,
        )
        pretraining = pretrain_job(backbone, checksum)
    training = train_job(settings, checksum, pretraining)
    protocol = {
        "data": settings.data,
        "split": "test",
        "way": settings.way,
        "shot": settings.shot,
        "queries": affordable.queries,
        "episodes": affordable.episodes,
        "seed": 0,
    }
    if shown.kind == "prototypes":
        title = f"look at the prototypes of {describe(settings)}"
        return Job("prototypes", title, {"protocol": protocol}, (training,))
    title = f"measure {describe(settings)}"
    if row.slots is None:
        return evaluate_job(training, title, protocol)
    return evaluate_job(training, f"{title}, {row.slots} slots", protocol, slots=[row.slots, 0])


def remember(store: JobStore, request: Request) -> Request:
    """Keep what was asked for, joined with what was asked before of the same columns."""
    columns = json.dumps([request.table, request.budget, request.data])
    name = f"{request.table}-{request.budget}-{hashlib.sha256(columns.encode()).hexdigest()[:8]}"
    path = store.root / "requests" / f"{name}.json"
    if path.is_file():
        request = _read_request(path).joined(request)
    write_json(path, asdict(request), indent=1)
    return request


def requests(store: JobStore) -> list[Request]:
    """Return everything that was asked for."""
    return [_read_request(path) for path in sorted((store.root / "requests").glob("*.json"))]


def _read_request(path: Path) -> Request:
    try:
        values = read_object(path)
        return Request(**{**values, "data": tuple(values["data"]), "rows": tuple(values["rows"])})
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); delete it and ask for its table again: no job is lost"
        ) from error
