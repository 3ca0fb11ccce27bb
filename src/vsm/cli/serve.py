"""``vsm serve``."""

import importlib.util
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import jsonargparse

from vsm.cli.arguments import add_backbone_argument, add_memory_argument
from vsm.cli.classify import default_model
from vsm.errors import SettingsError
from vsm.serve import Limits
from vsm.system.allocator import keep_allocations

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare the model, where to listen, where to store, and the limits."""
    parser.add_argument(
        "--model",
        type=str | None,
        help="A run directory, or a name that vsm models lists; unset: as classify.",
    )
    add_memory_argument(parser)
    add_backbone_argument(parser)
    parser.add_argument("--host", type=str, default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one.")
    parser.add_argument(
        "--store",
        type=str | None,
        help="An SQLite file, or postgresql://…; unset: a file of the model in the data folder.",
    )
    parser.add_argument(
        "--token_file", type=Path | None, help="Holds the token that requests must have."
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="Allow another address than loopback without a token.",
    )
    parser.add_argument(
        "--keep_originals",
        action="store_true",
        help="Keep the files of examples besides features and thumbnails.",
    )
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, mps or auto.")
    parser.add_class_arguments(Limits, "limits")


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Open the model and the store, and serve until stopped."""
    parsed = parser.parse_args(arguments)
    limits = Limits(**parsed.limits.as_dict())
    require_serving("serve")
    keep_allocations(in_threads=True)  # one of which uses the model

    from vsm.serve import server

    token = None if parsed.token_file is None else server.read_token(parsed.token_file)
    access = server.checked_access(parsed.host, token, parsed.insecure)
    name = parsed.model or default_model()
    _require_run(name)
    with server.open_socket(parsed.host, parsed.port) as listening:
        from vsm.runs.loading import load
        from vsm.serve.app import Service
        from vsm.stores import default_store, open_store
        from vsm.system.devices import choose_placement

        placement = choose_placement(parsed.device, "float32")
        trained = load(name, memory=parsed.memory, backbone=parsed.backbone, placement=placement)
        store = open_store(parsed.store or default_store(name, trained.encoder.identity))
        with closing(store):  # also if it is refused, so that it leaves no files beside it
            service = Service(trained, store, limits, keep_originals=parsed.keep_originals)
            server.run(service, access, listening)


def _require_run(name: str) -> None:
    """Refuse a model that does not exist before anything is loaded."""
    from vsm.runs.directory import RunDirectory
    from vsm.runs.shipped import find_run

    path = find_run(name)
    if not path.is_file():  # of which loading tells what it is
        RunDirectory(path).used.settings()


def require_serving(what: str) -> None:
    """Raise if the extra that ``what`` needs is missing, and name it."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise SettingsError(
            f"{what} needs {', '.join(missing)}: pip install 'variational-semantic-memory[serve]'"
        )
