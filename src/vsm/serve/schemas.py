"""What goes in and comes out, as the OpenAPI description has it."""

from typing import Any

from pydantic import BaseModel, Field


class ProblemBody(BaseModel):
    """An error, as RFC 9457 has it, and the field that is at fault."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None


class NewTask(BaseModel):
    """A task to create."""

    name: str = Field(description="For people; it need not be unique.")


class TaskId(BaseModel):
    """A task that was created."""

    id: str
    name: str


class TaskSummary(BaseModel):
    """A task, and how many examples each of its classes has."""

    id: str
    name: str
    created: str
    version: int
    classes: dict[str, int]


class ExampleBody(BaseModel):
    """An example of a class."""

    id: str
    label: str
    file: str
    created: str
    remembered: bool


class TaskBody(TaskSummary):
    """A task with its examples, oldest first."""

    examples: list[ExampleBody]


class TaskList(BaseModel):
    """All tasks, oldest first."""

    tasks: list[TaskSummary]


class AddedExamples(BaseModel):
    """The ids of examples that were added, in the order of the files."""

    label: str
    examples: list[str]


class Chance(BaseModel):
    """A class and its probability."""

    label: str
    probability: float


class RecalledClass(BaseModel):
    """A remembered class and its weight in what the memory told of the answer's class."""

    name: str
    weight: float


class AnswerBody(BaseModel):
    """The answer for one picture; label and probability are null if it is none of the classes."""

    file: str
    label: str | None
    probability: float | None
    alternatives: list[Chance]
    recalled: list[RecalledClass]
    explanation: dict[str, Any] | None = None


class Answers(BaseModel):
    """The answers, in the order of the files."""

    answers: list[AnswerBody]


class Place(BaseModel):
    """A point of a map."""

    name: str
    x: float
    y: float


class TaskMap(BaseModel):
    """Prototypes, examples (by id) and recalled classes of a task in one plane."""

    prototypes: list[Place]
    examples: list[Place]
    recalled: list[Place]


class RememberedBody(BaseModel):
    """Names of classes that are new in the memory, were updated, or dropped for lack of space."""

    added: list[str]
    updated: list[str]
    dropped: list[str]
    classes: int


class ClassBody(BaseModel):
    """A remembered class; x and y if the map was asked for."""

    name: str
    count: int
    last_update: int
    added: bool
    has_thumbnail: bool
    x: float | None = None
    y: float | None = None


class MemoryBody(BaseModel):
    """A part of the remembered classes; ``total`` match the search."""

    version: int
    total: int
    classes: list[ClassBody]


class Forgotten(BaseModel):
    """A class that was forgotten; ``exact`` if nothing of it is left, its scatter included."""

    name: str
    exact: bool
    classes: int


class ModelBody(BaseModel):
    """The model that answers, what its pictures are like, and the limits of this server."""

    name: str
    encoder: str
    method: str
    side: int
    channels: int
    ink: bool
    remembers: bool
    can_reject: bool
    limits: dict[str, float]
