"""``vsm memory``."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jsonargparse

from vsm.cli.arguments import add_action, add_backbone_argument, add_json_argument
from vsm.cli.output import ProgressBar, need_matplotlib, print_json, print_table, progress_bar, say
from vsm.cli.processes import add_placement_arguments, prepare_placement
from vsm.errors import SettingsError
from vsm.runs.directory import RunDirectory
from vsm.settings import GaussianSettings

if TYPE_CHECKING:
    from vsm.memory.named import Changes, NamedMemory

TARGET = "A run directory, or a memory file."
SOURCE = "A run directory, a name that vsm models lists, or a memory file."
STORE = "An SQLite file that ends in .sqlite, or postgresql://…"
SHOWN = 40  # rows for people
OUTPUTS = (".npz", ".csv", ".safetensors")
FEW_IMAGES = 50  # below this, no progress bar


def add_arguments(parser: jsonargparse.ArgumentParser) -> None:
    """Declare what can be done with memories."""
    actions = parser.add_subcommands(dest="action", required=True)

    _add_learn_arguments(actions)

    showing = add_action(actions, "show", "Show what is remembered.")
    showing.add_argument("target", type=Path, help=SOURCE)
    showing.add_argument(
        "--plot", type=Path | None, help="Draw the slots to this .png, .svg or .pdf instead."
    )
    add_json_argument(showing)

    adding = add_action(actions, "add", "Take in classes from labeled folders.")
    adding.add_argument("target", type=Path, help=f"{TARGET} A new file begins as the model's.")
    adding.add_argument(
        "--images", type=Path, required=True, help="A folder with a folder of images per class."
    )
    adding.add_argument(
        "--model",
        type=Path | None,
        help="The run, or shipped model, whose encoder it is; unset: the target is one.",
    )
    add_backbone_argument(adding)
    add_json_argument(adding)

    forgetting = add_action(actions, "forget", "Drop classes.")
    forgetting.add_argument("target", type=Path, help=TARGET)
    forgetting.add_argument("classes", type=str, nargs="+", help="Names of classes.")
    add_json_argument(forgetting)

    merging = add_action(actions, "merge", "Join two memories of one encoder.")
    merging.add_argument("first", type=Path, help=SOURCE)
    merging.add_argument("second", type=Path, help=SOURCE)
    merging.add_argument("--output", type=Path, required=True, help="The file to write.")
    merging.add_argument("--overwrite", action="store_true", help="Replace what is there.")
    add_json_argument(merging)

    exporting = add_action(
        actions, "export", "Write slots as .npz or .csv, or what a store holds as a memory file."
    )
    exporting.add_argument("target", type=str, help=f"{SOURCE[:-1]}; or a store. {STORE}")
    exporting.add_argument("output", type=Path, help="Ends in .npz, .csv or .safetensors.")

    importing = add_action(actions, "import", "Put a memory file into a store of vsm serve.")
    importing.add_argument("source", type=Path, help=SOURCE)
    importing.add_argument("--store", type=str, required=True, help=STORE)
    importing.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace the memory that is there; unset: join both, as merge does.",
    )
    add_json_argument(importing)


def _add_learn_arguments(actions: Any) -> None:
    learning = add_action(
        actions, "learn", "Learn class statistics in one pass over labeled images; no training."
    )
    learning.add_argument(
        "--data", type=str, required=True, help="Dataset whose training classes are remembered."
    )
    learning.add_argument(
        "--encoder",
        type=str | None,
        help="A run, a pre-training, a shipped model by name, efficientnet-lite0 (or 1, 2), "
        "hf:NAME, timm:NAME, onnx:FILE or module:attribute; unset: the data are features.",
    )
    learning.add_argument("--output", type=Path, required=True, help="The run directory to write.")
    learning.add_argument("--overwrite", action="store_true", help="Replace what is there.")
    learning.add_argument(
        "--split",
        type=Literal["train", "all"],
        default="train",
        help="Remember the training classes, which leaves others to be measured on; or all.",
    )
    learning.add_argument("--classes", type=int | None, help="Remember the first n only.")
    learning.add_argument(
        "--like", type=Path | None, help=f"Normalize as this memory does, to merge both. {SOURCE}"
    )
    learning.add_argument(
        "--mirror",
        type=bool | None,
        help="Average features of images and their mirror images; unset: as the encoder does.",
    )
    learning.add_argument(
        "--shift",
        type=int | None,
        help="Average those of images moved by so many pixels, too; unset: as the encoder does.",
    )
    learning.add_argument(
        "--adapter", type=bool, default=True, help="Keep the encoder's adapter, if it has one."
    )
    learning.add_argument("--seed", type=int, default=0, help="Of the episodes that decide.")
    learning.add_class_arguments(GaussianSettings, "gaussian")
    add_backbone_argument(learning)
    add_placement_arguments(learning)
    add_json_argument(learning)


def run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Learn, show, add, forget, merge, export or import."""
    parsed = parser.parse_args(arguments)
    actions = {
        "learn": _learn,
        "show": _show,
        "add": _add,
        "forget": _forget,
        "merge": _merge,
        "export": _export,
        "import": _import,
    }
    actions[parsed.action](parsed[parsed.action])


def _learn(chosen: jsonargparse.Namespace) -> None:
    settings = GaussianSettings(**chosen.gaussian.as_dict())
    if RunDirectory(chosen.output).exists() and not chosen.overwrite:
        raise SettingsError(
            f"output: {chosen.output} already holds a run; replace it with --overwrite, or choose "
            "another --output"
        )

    from vsm.data.catalog import FEATURES_PREFIX
    from vsm.encoders.embedding import open_data
    from vsm.learning import learn_memory
    from vsm.runs.loading import open_encoder
    from vsm.runs.memory_files import read_memory
    from vsm.runs.trained_model import made_in_memory
    from vsm.system.distributed import join_processes

    placement = prepare_placement(chosen)
    if chosen.encoder is None and not chosen.data.startswith(FEATURES_PREFIX):
        raise SettingsError(
            f"encoder: {chosen.data} holds images; name an encoder for them with --encoder"
        )
    encoder = open_encoder(
        chosen.encoder,
        chosen.data,
        mirror=chosen.mirror,
        shift=chosen.shift,
        backbone=chosen.backbone,
        with_adapter=chosen.adapter,
        placement=placement,
    )
    like = None if chosen.like is None else read_memory(chosen.like)
    with join_processes(placement.device) as processes:
        merge = chosen.split == "all"
        with ProgressBar(chosen.json or not processes.is_first) as bar:
            dataset = open_data(
                encoder, chosen.data, merge_splits=merge, progress=bar, processes=processes
            )
            images = sum(len(dataset.split_ids(s)) for s in dataset.splits if s != "test")
            bar.start("learn", images // processes.count)
            learned = learn_memory(
                encoder,
                dataset,
                settings,
                data=chosen.data,
                num_classes=chosen.classes,
                like=like,
                seed=chosen.seed,
                progress=bar,
                processes=processes,
            )
    if not processes.is_first:
        return
    made_in_memory(*learned).write(chosen.output)
    if chosen.json:
        described = learned.memory.describe(neighbors=0)
        kept = ("encoder", "num_slots", "num_features", "reading", "choice")
        print_json({"run": str(chosen.output), **{key: described[key] for key in kept}})
    else:
        _print_choice(learned.memory)
        say(f"{chosen.output}: {len(learned.memory.memory):,} classes remembered")


def _print_choice(memory: "NamedMemory") -> None:
    """Print how class statistics are read, and what else was tried."""
    described = memory.describe(neighbors=0)
    reading, choice = described["reading"], described["choice"]
    if reading is None:
        return
    shown = ", ".join(f"{name} {_short(value)}" for name, value in reading.items())
    if choice is None or not choice["table"]:
        say(f"read with {shown}" + ("" if choice is None else f": {choice['reason']}"))
        return
    columns = list(choice["table"][0])
    rows = [[_short(row[name]) for name in columns] for row in choice["table"]]
    print_table(f"tried on {choice['episodes_of']}", [c.replace("_", " ") for c in columns], rows)
    say(f"read with {shown}: {choice['reason']}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show(chosen: jsonargparse.Namespace) -> None:
    if chosen.plot is not None:
        if chosen.json:
            raise SettingsError("plot: goes to a file and --json to the screen; give one of them")
        need_matplotlib("plot")

    from vsm.runs.memory_files import read_memory

    memory = read_memory(chosen.target)
    if chosen.plot is not None:
        from vsm.runs.memory_map import write_memory_map

        write_memory_map(memory, chosen.plot, _title(memory))
        say(f"{chosen.plot}: {len(memory.memory):,} slots")
        return
    described = memory.describe()
    if chosen.json:
        print_json(described)
        return
    slots = described["slots"]
    rows = [
        [
            slot["name"],
            f"{slot['count']:,}",
            f"{slot['last_update']:,}",
            "".join(f"{near['name']} ({near['similarity']:.2f})" for near in slot["nearest"][:1]),
        ]
        for slot in sorted(slots, key=lambda slot: -slot["last_update"])[:SHOWN]
    ]
    if len(slots) > SHOWN:
        rows.append([f"… {len(slots) - SHOWN:,} more in --json", "", "", ""])
    print_table(_title(memory), ["class, newest first", "images", "last update", "nearest"], rows)
    _print_choice(memory)


def _title(memory: "NamedMemory") -> str:
    return f"{len(memory.memory):,} slots of {memory.method}, features of {memory.encoder}"


def _add(chosen: jsonargparse.Namespace) -> None:
    from vsm.runs.memory_files import own_memory_path, update_memory

    own_memory_path(chosen.target)  # raises early if it may not be written
    model = chosen.model or chosen.target
    if chosen.model is None and not chosen.target.is_dir():
        raise SettingsError(
            f"model: {chosen.target} is not a run directory; name the run whose encoder made its "
            "features with --model"
        )

    from vsm.data.folder import labeled_images
    from vsm.runs.loading import load

    images, labels = labeled_images(chosen.images)
    trained = load(model, backbone=chosen.backbone)
    consolidation = trained.manual_consolidation()
    with progress_bar("embed", len(images), quiet=chosen.json or len(images) < FEW_IMAGES) as bar:
        features = trained.embed(images, bar)
    changes: list[Changes] = []

    def add_classes(memory: "NamedMemory") -> "NamedMemory":
        memory.require_encoder(trained.encoder.identity, chosen.target)
        after, made = memory.add(consolidation, features, labels, {"from": chosen.images.name})
        changes.append(made)
        return after

    after = update_memory(
        chosen.target, add_classes, None if chosen.model is None else trained.memory
    )
    made = changes[0]._asdict()
    if chosen.json:
        print_json({"num_slots": len(after.memory), **made})
        return
    counted = ", ".join(f"{len(names)} {what}" for what, names in made.items())
    say(f"{chosen.target}: {counted}; {len(after.memory):,} slots")


def _forget(chosen: jsonargparse.Namespace) -> None:
    from vsm.runs.memory_files import update_memory

    after = update_memory(chosen.target, lambda memory: memory.forget(chosen.classes))
    summary = f"{chosen.target}: forgot {len(set(chosen.classes))} classes"
    if stays := after.provenance[-1].get("scatter_stays"):
        summary += f" (of {len(stays)} the scatter stays in the common one)"
    _report(chosen, summary, after)


def _merge(chosen: jsonargparse.Namespace) -> None:
    from vsm.errors import MemoryFileError
    from vsm.runs.memory_files import memory_path, own_memory_path, read_memory
    from vsm.system.files import exclusive_lock

    output = own_memory_path(chosen.output)
    inputs = [memory_path(path).resolve() for path in (chosen.first, chosen.second)]
    if output.exists() and output.resolve() not in inputs and not chosen.overwrite:
        raise MemoryFileError(
            f"output: there is a memory at {chosen.output} already; name another, or replace it "
            "with --overwrite"
        )
    with exclusive_lock(output):
        after = read_memory(chosen.first).merge(read_memory(chosen.second))
        if chosen.output.is_dir() and output.exists():
            read_memory(chosen.output).require_encoder(after.encoder, "output")
        after.write(output)
    _report(chosen, f"{chosen.output}: {chosen.first} and {chosen.second}", after)


def _report(chosen: jsonargparse.Namespace, summary: str, after: "NamedMemory") -> None:
    if chosen.json:
        print_json({"num_slots": len(after.memory), "names": list(after.names)})
    else:
        say(f"{summary}; {len(after.memory):,} slots")


def _export(chosen: jsonargparse.Namespace) -> None:
    if chosen.output.suffix not in OUTPUTS:
        raise SettingsError(
            f"output: expected a file that ends in {', '.join(OUTPUTS)}, got {chosen.output}"
        )
    from vsm.runs.memory_files import read_memory
    from vsm.stores import is_store

    stored = is_store(chosen.target)
    memory = _stored(chosen.target) if stored else read_memory(Path(chosen.target))
    if chosen.output.suffix == ".safetensors":
        memory.write(chosen.output)
    else:
        memory.export(chosen.output)
    say(f"{chosen.output}: {len(memory.memory):,} slots")


def _stored(target: str) -> "NamedMemory":
    """Return the memory that a store holds."""
    from vsm.errors import StoreError
    from vsm.stores import open_store

    with closing(open_store(target, create=False)) as store:
        memory = store.memory().named
    if memory is None:
        raise StoreError(f"store: {target.rpartition('@')[2]} holds no memory")
    return memory


def _import(chosen: jsonargparse.Namespace) -> None:
    from vsm.runs.memory_files import read_memory
    from vsm.stores import open_store

    memory = read_memory(chosen.source)
    with closing(open_store(chosen.store)) as store:
        if store.encoder() is None:
            store.bind(memory.encoder, memory)
            after = store.memory().named
        elif chosen.overwrite:
            after = store.replace_memory(memory).named
        else:
            after = store.change_memory(lambda known: known.merge(memory)).named
    assert after is not None
    _report(chosen, f"{store!r}: {chosen.source}", after)
