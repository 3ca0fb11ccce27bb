"""``vsm serve``."""

from contextlib import closing
from dataclasses import field
from pathlib import Path

from vsm.cli.arguments import ModelOptions
from vsm.cli.output import require_extra
from vsm.serve import Limits
from vsm.system.allocator import keep_allocations


class Serve(ModelOptions):
    """Open the model and the store, and serve until stopped."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0 takes a free one."""
    store: str | None = None
    """An SQLite file, or postgresql://…; unset: a file of the model in the data folder."""
    token_file: Path | None = None
    """Holds the token that requests must have."""
    insecure: bool = False
    """Allow another address than loopback without a token."""
    keep_originals: bool = False
    """Keep the files of examples besides features and thumbnails."""
    limits: Limits = field(default_factory=Limits)

    def __call__(self) -> None:
        require_extra("serve", "serve")
        keep_allocations(in_threads=True)  # one of which uses the model

        from vsm.serve import server

        token = None if self.token_file is None else server.read_token(self.token_file)
        access = server.checked_access(self.host, token, self.insecure)
        name = self.chosen_model
        _require_run(name)
        with server.open_socket(self.host, self.port) as listening:
            from vsm.runs.loading import load
            from vsm.serve.app import Service
            from vsm.stores import default_store, open_store
            from vsm.system.devices import choose_placement

            placement = choose_placement(self.device, "float32")
            trained = load(name, memory=self.memory, backbone=self.backbone, placement=placement)
            store = open_store(self.store or default_store(name, trained.encoder.identity))
            with closing(store):  # also if it is refused, so that it leaves no files beside it
                service = Service(trained, store, self.limits, keep_originals=self.keep_originals)
                server.run(service, access, listening)


COMMANDS = {"serve": Serve}


def _require_run(name: str) -> None:
    """Refuse a model that does not exist before anything is loaded."""
    from vsm.runs.directory import RunDirectory, find_run

    path = find_run(name)
    if not path.is_file():  # of which loading tells what it is
        RunDirectory(path).used.settings()
