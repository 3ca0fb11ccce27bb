"""``vsm memory``."""

from contextlib import closing
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vsm.cli.arguments import (
    Actions,
    BackboneOption,
    JsonOption,
    Options,
    PlacementOptions,
)
from vsm.cli.output import ProgressBar, print_json, print_table, progress_bar, require_extra, say
from vsm.errors import SettingsError
from vsm.runs.directory import RunDirectory
from vsm.settings import GaussianSettings

if TYPE_CHECKING:
    from vsm.memory.named import Changes, NamedMemory

SHOWN = 40  # rows for people
OUTPUTS = (".npz", ".csv", ".safetensors")
FEW_IMAGES = 50  # below this, no progress bar


class Learn(BackboneOption, PlacementOptions, JsonOption):
    """Learn class statistics in one pass over labeled images; no training."""

    data: str
    """Dataset whose training classes are remembered."""
    encoder: str | None = None
    """A run, a pre-training, a shipped model by name, efficientnet-lite0 (or 1, 2), hf:NAME,
    timm:NAME, onnx:FILE or module:attribute; unset: the data are features."""
    output: Path
    """The run directory to write."""
    overwrite: bool = False
    """Replace what is there."""
    split: Literal["train", "all"] = "train"
    """Remember the training classes, which leaves others to be measured on; or all."""
    classes: int | None = None
    """Remember the first n only."""
    like: Path | None = None
    """Normalize as this memory does, to merge both; a run, a shipped model or a memory file."""
    mirror: bool | None = None
    """Average features of images and their mirror images; unset: as the encoder does."""
    shift: int | None = None
    """Average those of images moved by so many pixels, too; unset: as the encoder does."""
    adapter: bool = True
    """Keep the encoder's adapter, if it has one."""
    seed: int = 0
    """Seed of the episodes that decide how the memory is read."""
    gaussian: GaussianSettings = field(default_factory=GaussianSettings)

    def __call__(self) -> None:
        if RunDirectory(self.output).exists() and not self.overwrite:
            raise SettingsError(
                f"output: {self.output} already holds a run; replace it with --overwrite, or "
                "choose another --output"
            )

        from vsm.data.catalog import FEATURES_PREFIX
        from vsm.encoders.encoder import open_data
        from vsm.learning import learn_memory
        from vsm.runs.loading import open_encoder, read_memory
        from vsm.runs.trained_model import made_in_memory
        from vsm.system.distributed import join_processes

        placement = self.prepare_placement()
        if self.encoder is None and not self.data.startswith(FEATURES_PREFIX):
            raise SettingsError(
                f"encoder: {self.data} holds images; name an encoder with --encoder"
            )
        encoder = open_encoder(
            self.encoder,
            self.data,
            mirror=self.mirror,
            shift=self.shift,
            backbone=self.backbone,
            with_adapter=self.adapter,
            placement=placement,
        )
        like = None if self.like is None else read_memory(self.like)
        with (
            join_processes(placement.device) as processes,
            ProgressBar(self.json or not processes.is_first) as bar,
        ):
            shared: dict[str, Any] = {"progress": bar, "processes": processes}
            dataset = open_data(encoder, self.data, merge_splits=self.split == "all", **shared)
            images = sum(len(dataset.split_ids(s)) for s in dataset.splits if s != "test")
            bar.start("learn", images // processes.count)
            learned = learn_memory(
                encoder,
                dataset,
                self.gaussian,
                data=self.data,
                num_classes=self.classes,
                like=like,
                seed=self.seed,
                **shared,
            )
        if not processes.is_first:
            return
        made_in_memory(*learned).write(self.output)
        if self.json:
            described = learned.memory.describe(neighbors=0)
            kept = ("encoder", "num_slots", "num_features", "reading", "choice")
            print_json({"run": str(self.output), **{key: described[key] for key in kept}})
        else:
            _print_choice(learned.memory)
            say(f"{self.output}: {len(learned.memory.memory):,} classes remembered")


def _print_choice(memory: "NamedMemory") -> None:
    """Print how class statistics are read, and what else was tried."""
    described = memory.describe(neighbors=0)
    reading, choice = described["reading"], described["choice"]
    if reading is None:
        return
    shown = ", ".join(f"{name} {_short(value)}" for name, value in reading.items())
    if choice is not None and choice["table"]:
        columns = list(choice["table"][0])
        rows = [[_short(row[name]) for name in columns] for row in choice["table"]]
        title = f"tried on {choice['episodes_of']}"
        print_table(title, [column.replace("_", " ") for column in columns], rows)
    say(f"read with {shown}" + ("" if choice is None else f": {choice['reason']}"))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Show(JsonOption):
    """Show what is remembered."""

    target: Path = field(kw_only=False)
    """A run directory, a name that vsm models lists, or a memory file."""
    plot: Path | None = None
    """Draw the slots to this .png, .svg or .pdf instead."""

    def __call__(self) -> None:
        if self.plot is not None and self.json:
            raise SettingsError("plot: goes to a file and --json to the screen; give one of them")
        if self.plot is not None:
            require_extra("plot", "plots")

        from vsm.runs.loading import read_memory

        memory = read_memory(self.target)
        title = f"{len(memory.memory):,} slots of {memory.method}, features of {memory.encoder}"
        if self.plot is not None:
            from vsm.runs.memory_map import write_memory_map

            write_memory_map(memory, self.plot, title)
            say(f"{self.plot}: {len(memory.memory):,} slots")
            return
        described = memory.describe()
        if self.json:
            print_json(described)
            return
        slots = described["slots"]
        rows = [
            [
                slot["name"],
                f"{slot['count']:,}",
                f"{slot['last_update']:,}",
                "".join(f"{one['name']} ({one['similarity']:.2f})" for one in slot["nearest"][:1]),
            ]
            for slot in sorted(slots, key=lambda slot: -slot["last_update"])[:SHOWN]
        ]
        if len(slots) > SHOWN:
            rows.append([f"… {len(slots) - SHOWN:,} more in --json", "", "", ""])
        print_table(title, ["class, newest first", "images", "last update", "nearest"], rows)
        _print_choice(memory)


class Add(BackboneOption, JsonOption):
    """Take in classes from labeled folders."""

    target: Path = field(kw_only=False)
    """A run directory, or a memory file. A new file begins as the model's."""
    images: Path
    """A folder with a folder of images per class."""
    model: Path | None = None
    """The run, or shipped model, whose encoder it is; unset: the target is one."""

    def __call__(self) -> None:
        from vsm.runs.loading import own_memory_path, update_memory

        own_memory_path(self.target)  # raises early if it may not be written
        if self.model is None and not self.target.is_dir():
            raise SettingsError(
                f"model: {self.target} is not a run directory; name the run whose encoder made its "
                "features with --model"
            )

        from vsm.data.folder import labeled_images
        from vsm.runs.loading import load

        images, labels = labeled_images(self.images)
        trained = load(self.model or self.target, backbone=self.backbone)
        consolidation = trained.manual_consolidation()
        with progress_bar("embed", len(images), self.json or len(images) < FEW_IMAGES) as bar:
            features = trained.embed(images, bar)
        changes: list[Changes] = []

        def add_classes(memory: "NamedMemory") -> "NamedMemory":
            memory.require_encoder(trained.encoder.identity, self.target)
            after, made = memory.add(consolidation, features, labels, {"from": self.images.name})
            changes.append(made)
            return after

        begin = None if self.model is None else trained.memory
        after = update_memory(self.target, add_classes, begin)
        made = changes[0]._asdict()
        if self.json:
            print_json({"num_slots": len(after.memory), **made})
            return
        counted = ", ".join(f"{len(names)} {what}" for what, names in made.items())
        say(f"{self.target}: {counted}; {len(after.memory):,} slots")


class ChangingCommand(JsonOption):
    """A command that ends with a changed memory."""

    def report(self, summary: str, after: "NamedMemory") -> None:
        """Print what was done, and what is remembered now."""
        if self.json:
            print_json({"num_slots": len(after.memory), "names": list(after.names)})
        else:
            say(f"{summary}; {len(after.memory):,} slots")


class Forget(ChangingCommand):
    """Drop classes."""

    target: Path = field(kw_only=False)
    """A run directory, or a memory file."""
    classes: list[str] = field(kw_only=False)
    """Names of classes."""

    def __call__(self) -> None:
        from vsm.runs.loading import update_memory

        after = update_memory(self.target, lambda memory: memory.forget(self.classes))
        summary = f"{self.target}: forgot {len(set(self.classes))} classes"
        if stays := after.provenance[-1].get("scatter_stays"):
            summary += f" (of {len(stays)} the scatter stays in the common one)"
        self.report(summary, after)


class Merge(ChangingCommand):
    """Join two memories of one encoder."""

    first: Path = field(kw_only=False)
    """A run directory, a name that vsm models lists, or a memory file."""
    second: Path = field(kw_only=False)
    """The other one, given likewise."""
    output: Path
    """The file to write."""
    overwrite: bool = False
    """Replace what is there."""

    def __call__(self) -> None:
        from vsm.errors import MemoryFileError
        from vsm.runs.loading import memory_path, own_memory_path, read_memory
        from vsm.system.files import exclusive_lock

        output = own_memory_path(self.output)
        inputs = [memory_path(path).resolve() for path in (self.first, self.second)]
        if output.exists() and output.resolve() not in inputs and not self.overwrite:
            raise MemoryFileError(
                f"output: there is a memory at {self.output} already; name another, or replace it "
                "with --overwrite"
            )
        with exclusive_lock(output):
            after = read_memory(self.first).merge(read_memory(self.second))
            if self.output.is_dir() and output.exists():
                read_memory(self.output).require_encoder(after.encoder, "output")
            after.write(output)
        self.report(f"{self.output}: {self.first} and {self.second}", after)


class Export(Options):
    """Write slots as .npz or .csv, or what a store holds as a memory file."""

    target: str = field(kw_only=False)
    """A run, a shipped model, a memory file, or a store: FILE.sqlite or postgresql://…"""
    output: Path = field(kw_only=False)
    """Ends in .npz, .csv or .safetensors."""

    def __call__(self) -> None:
        if self.output.suffix not in OUTPUTS:
            raise SettingsError(
                f"output: expected a file that ends in {', '.join(OUTPUTS)}, got {self.output}"
            )
        from vsm.runs.loading import read_memory
        from vsm.stores import is_store

        memory = self._stored() if is_store(self.target) else read_memory(Path(self.target))
        if self.output.suffix == ".safetensors":
            memory.write(self.output)
        else:
            memory.export(self.output)
        say(f"{self.output}: {len(memory.memory):,} slots")

    def _stored(self) -> "NamedMemory":
        """Return the memory that a store holds."""
        from vsm.errors import StoreError
        from vsm.stores import open_store

        with closing(open_store(self.target, create=False)) as store:
            memory = store.memory().named
        if memory is None:
            raise StoreError(f"store: {self.target.rpartition('@')[2]} holds no memory")
        return memory


class Import(ChangingCommand):
    """Put a memory file into a store of vsm serve."""

    source: Path = field(kw_only=False)
    """A run directory, a name that vsm models lists, or a memory file."""
    store: str
    """An SQLite file that ends in .sqlite, or postgresql://…"""
    overwrite: bool = False
    """Replace the memory that is there; unset: join both, as merge does."""

    def __call__(self) -> None:
        from vsm.runs.loading import read_memory
        from vsm.stores import open_store

        memory = read_memory(self.source)
        with closing(open_store(self.store)) as store:
            if store.encoder() is None:
                store.bind(memory.encoder, memory)
                after = store.memory().named
            elif self.overwrite:
                after = store.replace_memory(memory).named
            else:
                after = store.change_memory(lambda known: known.merge(memory)).named
        assert after is not None
        self.report(f"{store!r}: {self.source}", after)


ACTIONS = {
    "learn": Learn,
    "show": Show,
    "add": Add,
    "forget": Forget,
    "merge": Merge,
    "export": Export,
    "import": Import,
}
COMMANDS = {"memory": Actions(ACTIONS)}
