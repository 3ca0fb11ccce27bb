"""The part ``mutations``: every file format, its sample, its mutations and its readers."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from faults.mutations import (
    Mutate,
    mutate_array,
    mutate_array_header,
    mutate_bytes,
    mutate_database,
    mutate_folder,
    mutate_json,
    mutate_table,
    mutate_tensor_header,
    mutate_tensors,
    mutate_yaml,
    replace_file,
)
from faults.oracles import Outcome, check, digest_without_times, parse_answer, snapshot
from faults.processes import OWN_INTERPRETER_AT, OWN_INTERPRETER_EVERY, Command, Program
from faults.samples import (
    EVALUATE_FOREIGN,
    PRETRAIN,
    TINY,
    TRAIN,
    predict_with_saved,
    serve_and_query,
)
from faults.sandbox import CANARY_TEXT, Group, Sandbox


@dataclass(frozen=True)
class Reader:
    """A program that reads a file."""

    program: Program
    writes: tuple[str, ...] = ()  # prefixes of the files that it writes if it succeeds
    results: tuple[str, ...] = ()  # those of them that are the same in every run

    def __str__(self) -> str:
        return str(self.program) if isinstance(self.program, Command) else self.program.__name__


@dataclass(frozen=True)
class Format:
    """A file format, how it is damaged, and who reads it."""

    name: str
    files: str  # pattern of its samples
    mutations: tuple[Mutate, ...]  # one of which is drawn for every case
    readers: tuple[Reader, ...]  # used in turn
    cases: int = 40
    user_written: bool = False  # people write these files, so that any answer is right
    optional: bool = False  # another answer is right if the file is missing


def _vsm(words: str, writes: tuple[str, ...] = (), results: tuple[str, ...] = ()) -> Reader:
    return Reader(Command(words), writes, results)


def _classify(model: str) -> Reader:
    return _vsm(f"classify --support support --query query --json --model {model}")


def _learn(words: str) -> tuple[Reader, ...]:
    written = ("out/model.safetensors", "out/memory.safetensors")
    return (_vsm(f"memory learn --output out --json {words}", ("out",), written),)


ADD = "memory add learned --images support --json"
LEARNED = ("learned/memory.safetensors", "learned/.memory")
EVALUATE = _vsm("evaluate learned --way 3 --shot 1 --queries 2 --episodes 2 --json")
RENDER = _vsm("study study.yaml --render out.md", ("out.md",))
SHOW_DATA = _vsm("data info folder:images --verify --json")
RESUMED = tuple(f"resumed/{n}" for n in ("model.safetensors", "memory.safetensors", "config.yaml"))
RESUME = (_vsm(f"{TRAIN} --output resumed --resume", ("resumed",), RESUMED),)
PRETRAIN_RESUME = _vsm(
    f"{PRETRAIN} --output begun --resume", ("begun",), ("begun/backbone.safetensors",)
)
MODEL = (_classify("learned"), EVALUATE, _classify("learned --explain --reject 0.9"))
TENSORS = (
    *(mutate_bytes, mutate_bytes, mutate_tensor_header, mutate_tensors, mutate_tensors),
    replace_file,
)
JSON = (mutate_json, mutate_json, mutate_json, mutate_bytes, replace_file)
YAML = (mutate_yaml, mutate_yaml, mutate_yaml, mutate_bytes, replace_file)
ARRAY = (mutate_bytes, mutate_array_header, mutate_array_header, mutate_array, replace_file)
PREPARED = (mutate_bytes, mutate_array_header, replace_file)
DATABASE = (mutate_bytes, mutate_database, mutate_database, replace_file)
BYTES = (mutate_bytes, mutate_bytes, mutate_bytes, replace_file)
TABLE = (mutate_table, mutate_table, mutate_bytes, replace_file)
LOG = (mutate_json, mutate_bytes)
MEMORY_READERS = (
    *MODEL,
    _vsm("memory show learned --json"),
    _vsm(ADD, LEARNED, LEARNED[:1]),
    _vsm("memory forget learned train0 --json", LEARNED),
)
MEMORY_FILE_READERS = (
    _vsm("memory show other.safetensors --json"),
    _classify("model --memory other.safetensors"),
    _vsm("memory export other.safetensors out.csv", ("out",), ("out.csv",)),
)
FOLDER_READERS = (
    _classify("learned"),
    _vsm("review support --model learned --json", ("review.html",)),
    _vsm(ADD, LEARNED),
)
STORE_READERS = (
    _vsm(
        "memory export store.sqlite out.safetensors",
        ("out", "store.sqlite"),
        ("out.safetensors",),
    ),
    Reader(serve_and_query, ("store.sqlite",)),
)
SETTINGS_READERS = (
    _vsm("train --config settings.yaml --output out --print-config"),
    _vsm(f"train --config settings.yaml --output out {TINY} --steps 1", ("out",)),
)
JOBS = _vsm("study study.yaml --output jobs --json", ("jobs", "study/", "study.md"))
SHIPPED_READERS = (_classify("model --reject 0.9"), _classify("model"))
TABLE_READER = _vsm("classify --support table.csv --query query --model learned --json")
FOREIGN_READER = _vsm(EVALUATE_FOREIGN)
DRY_RUN = _vsm("study study.yaml --output jobs --dry-run --json")
LEARN_IMAGES = _learn("--data folder:images --encoder pre")
LEARN_FEATURES = _learn("--data features:features")
LEARN_FILE = _learn("--data features:features.safetensors")
FORMATS = (
    Format("config of a run", "learned/config.yaml", YAML, MODEL, 80),
    Format("weights of a run", "learned/model.safetensors", TENSORS, MODEL, 80),
    Format("memory of a run", "learned/memory.safetensors", TENSORS, MEMORY_READERS, 120),
    Format("memory file", "other.safetensors", TENSORS, MEMORY_FILE_READERS, 60),
    Format("thresholds", "learned/calibration.json", JSON, MODEL, 80),
    Format("log of a run", "resumed/metrics.jsonl", LOG, RESUME, 30, user_written=True),
    Format("state to resume", "resumed/resume.safetensors", TENSORS, RESUME, 60),
    Format("config to resume", "resumed/config.yaml", YAML, RESUME, 40),
    Format("state of pre-training", "begun/resume.safetensors", TENSORS, (PRETRAIN_RESUME,), 30),
    Format("backbone", "pre/backbone.safetensors", TENSORS, LEARN_IMAGES, 30),
    Format("shipped model", "model/*.json", JSON, SHIPPED_READERS, 60),
    Format("saved classifier", "saved.vsm", TENSORS, (Reader(predict_with_saved),), 80),
    Format("index of prepared data", "data/folder-*/index.json", JSON, (EVALUATE, SHOW_DATA), 60),
    Format("images of prepared data", "data/folder-*/images.npy", PREPARED, (SHOW_DATA,), 40),
    Format("images", "query/*", BYTES, (_classify("learned"),), 60, user_written=True),
    Format("folder of images", "support", (mutate_folder,), FOLDER_READERS, 40, user_written=True),
    Format("table of images", "table.csv", TABLE, (TABLE_READER,), 40, user_written=True),
    Format("features, arrays", "features/*.npy", ARRAY, LEARN_FEATURES, 50, user_written=True),
    Format("features, names", "features/*.json", JSON, LEARN_FEATURES, 30, user_written=True),
    Format(
        "features, one file", "features.safetensors", TENSORS, LEARN_FILE, 40, user_written=True
    ),
    Format("study", "study.yaml", YAML, (DRY_RUN, RENDER), 50, user_written=True),
    Format("results of a study", "study/results.json", JSON, (RENDER,), 40, user_written=True),
    Format("results of jobs", "jobs/jobs/*/*.json", JSON, (JOBS,), 40, user_written=True),
    Format("cache of embeddings", "data/embeddings/*.sqlite", DATABASE, (FOREIGN_READER,), 30),
    Format("ONNX encoder", "onnx/encoder.onnx", BYTES, (_classify("foreign"),), 40),
    Format("store of a server", "store.sqlite", DATABASE, STORE_READERS, 60, optional=True),
    Format("settings", "settings.yaml", YAML, SETTINGS_READERS, 60, user_written=True),
)


def groups() -> list[Group]:
    """Return the cases of every format."""
    return [Group("mutations", one.name, one.cases, partial(_run, one)) for one in FORMATS]


def _run(tried: Format, sandbox: Sandbox, number: int, random: Random) -> Outcome:
    reader = tried.readers[number % len(tried.readers)]
    baseline = sandbox.baseline(reader, lambda: _measure(reader, sandbox))
    # Sorted by size first: names may contain digests of where the files are.
    paths = sandbox.folder.glob(tried.files)
    path = random.choice(sorted(paths, key=lambda path: (path.stat().st_size, path)))
    description, may_differ = random.choice(tried.mutations)(path, random)
    may_differ |= tried.user_written or (tried.optional and not path.exists())
    prepare = None
    if isinstance(reader.program, Command) and number % OWN_INTERPRETER_EVERY == OWN_INTERPRETER_AT:
        prepare = reader.program.execute
    before = snapshot(sandbox.folder)
    completed = sandbox.run(reader.program, prepare=prepare)
    after, results = snapshot(sandbox.folder), _results(reader, sandbox)
    fault = f"{path.relative_to(sandbox.folder)}: {description}; {reader}"
    allowed = may_differ, reader.writes
    outcome = check(fault, completed, before, after, results, baseline, *allowed)
    if CANARY_TEXT in completed.output + completed.errors:
        return replace(outcome, defects=("prints another file", *outcome.defects))
    return outcome


def _measure(reader: Reader, sandbox: Sandbox) -> dict[str, Any]:
    """Return the results of a reader without damage, which must be the same twice."""
    found = []
    for _ in range(2):
        sandbox.restore()
        completed = sandbox.run(reader.program)
        if completed.code != 0 or completed.hung:
            raise RuntimeError(f"{reader} fails without damage: {completed.errors}")
        answer, files = parse_answer(completed), _results(reader, sandbox)
        found.append({"answer": answer, "files": files, "events": completed.events})
    if found[0] != found[1]:
        raise RuntimeError(f"{reader} answers differently each time: {found}")
    return found[0]


def _results(reader: Reader, sandbox: Sandbox) -> dict[str, str]:
    paths = {name: sandbox.folder / name for name in reader.results}
    return {name: digest_without_times(path) for name, path in paths.items() if path.is_file()}
