"""The reference of the Python API: every name that ``vsm`` offers, and every type they mention."""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_type_hints

import vsm
from vsm.system.interruption import Interrupted


def api_reference() -> str:
    """Return Markdown: public names package by package, then the types they take and return."""
    public = [getattr(vsm, name) for name in vsm.__all__]
    return "\n".join([*_public_names(public), *_further_types(public)])


def _public_names(public: list[Any]) -> Iterator[str]:
    homes: dict[str, list[Any]] = {}
    for what in public:
        homes.setdefault(_package(what), []).append(what)
    for home in sorted(homes):
        purpose = (importlib.import_module(home).__doc__ or "").strip().split("\n\n")[0]
        yield from (f"## {home}", "", " ".join(purpose.split()), "")
        for what in homes[home]:
            yield from _entry(f"vsm.{what.__name__}", what)


def _further_types(public: list[Any]) -> Iterator[str]:
    yield from ("## Further types", "", "What the names above take, return and raise.", "")
    for what in sorted(_mentioned([*public, *_exceptions()])[len(public) :], key=_path):
        yield from _entry(_path(what), what)


def _entry(path: str, what: Any) -> list[str]:
    directive = "autoclass" if inspect.isclass(what) else "autofunction"
    return [f"### {path}", "", "```{eval-rst}", f".. {directive}:: {path}", "```", ""]


def _package(what: Any) -> str:
    """Return the module that a name lives in, or the package of that."""
    return ".".join(what.__module__.split(".")[:2])


def _path(what: Any) -> str:
    return f"{what.__module__}.{what.__name__}"


def _exceptions() -> list[type]:
    """Return all that a user may want to catch, besides what is public."""
    return [*vsm.VsmError.__subclasses__(), Interrupted]


def _mentioned(names: list[Any]) -> list[Any]:
    """Return names, the types of ours that their signatures mention, those that these do, …."""
    found: dict[Any, None] = dict.fromkeys(names)
    waiting = list(names)
    while waiting:
        mentioned = {kind: None for what in waiting for kind in _own_types(what)}
        waiting = [kind for kind in mentioned if kind not in found]
        found |= dict.fromkeys(waiting)
    return list(found)


def _own_types(what: Any) -> Iterator[type]:
    for signature in _signatures(what):
        for hint in get_type_hints(signature).values():
            for part in _parts(hint):
                if inspect.isclass(part) and part.__module__.split(".")[0] == "vsm":
                    yield part


def _signatures(what: Any) -> Iterator[Any]:
    """Return all of a name that can have annotations: itself, or a class with its methods."""
    yield what
    if inspect.isclass(what):
        yield what.__init__
        for name, member in vars(what).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if not name.startswith("_") and inspect.isfunction(function):
                yield function


def _parts(hint: Any) -> Iterable[Any]:
    """Return an annotation, and all annotations within it."""
    yield hint
    for part in get_args(hint):
        for inner in part if isinstance(part, list) else [part]:
            yield from _parts(inner)
