"""Every format that the program reads: where a specimen is, how to damage it, who reads it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from faults.asking import serve_and_ask
from faults.mutations import (
    Mutate,
    Mutation,
    any_of,
    choose,
    harmless,
    in_array,
    in_array_header,
    in_bytes,
    in_database,
    in_json,
    in_json_lines,
    in_kind,
    in_signed_json,
    in_signed_yaml,
    in_table,
    in_tensor_header,
    in_tensors,
    in_yaml,
)
from faults.processes import Program, command
from faults.specimens import OTHER_DATA, PRETRAIN, TINY, TRAIN, ask_saved
from faults.trees import in_folder

CACHE = ("data/embeddings", "home")


@dataclass(frozen=True)
class Reader:
    """A program that reads a file.

    Attributes:
        program: what runs.
        writes: how the names of files begin that it writes if it succeeds.
        results: those of them that are the same whenever it runs.
    """

    program: Program
    writes: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: what people call it.
        files: a pattern of its specimens.
        mutate: damages one of them.
        readers: taken in turn.
        cases: in the whole campaign.
    """

    name: str
    files: str
    mutate: Mutate
    readers: tuple[Reader, ...]
    cases: int = 40

    def damage(self, folder: Path, random: Random) -> Mutation:
        """Damage a specimen below ``folder``."""
        path = choose(list(folder.glob(self.files)), random)
        done = self.mutate(path, random)
        return Mutation(f"{path.relative_to(folder)}: {done.what}", done.may_differ)


def _reads(*words: str) -> Reader:
    return Reader(command(*words, "--json"))


def _classify(model: str, *words: str) -> Reader:
    pictures = ("--support", "support", "--query", "query")
    return _reads("classify", *pictures, "--model", model, *words)


def _learn(*words: str) -> Reader:
    made = tuple(f"out/{name}.safetensors" for name in ("model", "memory"))
    return Reader(command("memory", "learn", "--output", "out", "--json", *words), ("out",), made)


EVALUATE = ("--way", "3", "--shot", "1", "--queries", "2", "--episodes", "2")
ADD = ("memory", "add", "learned", "--images", "support", "--json")
LEARNED = ("learned/memory.safetensors", "learned/.memory")
RESUME = Reader(
    command(*TRAIN, "--output", "resumed", "--resume"),
    ("resumed",),
    ("resumed/model.safetensors", "resumed/memory.safetensors", "resumed/config.yaml"),
)
PRETRAIN_RESUME = Reader(
    command(*PRETRAIN, "--output", "begun", "--resume"), ("begun",), ("begun/backbone.safetensors",)
)
TENSORS = any_of(in_bytes, in_bytes, in_tensor_header, in_tensors, in_tensors, in_kind)
JSON = any_of(in_json, in_json, in_signed_json, in_bytes, in_kind)
YAML = any_of(in_yaml, in_yaml, in_signed_yaml, in_bytes, in_kind)
ARRAY = any_of(in_bytes, in_array_header, in_array_header, in_array, in_kind)
DATABASE = any_of(in_bytes, in_database, in_database, in_kind)


def begun_anew(mutate: Mutate) -> Mutate:
    """Let another answer be right where the file is gone: it is begun anew."""

    def change(path: Path, random: Random) -> Mutation:
        done = mutate(path, random)
        return Mutation(done.what, done.may_differ or not path.exists())

    return change


MODEL_READERS = (
    _classify("learned"),
    _reads("evaluate", "learned", *EVALUATE),
    _classify("learned", "--explain", "--reject", "0.9"),
)
FORMATS = (
    Format("config of a run", "learned/config.yaml", YAML, MODEL_READERS, 80),
    Format("weights of a run", "learned/model.safetensors", TENSORS, MODEL_READERS, 80),
    Format(
        "memory of a run",
        "learned/memory.safetensors",
        TENSORS,
        (
            *MODEL_READERS,
            _reads("memory", "show", "learned"),
            Reader(command(*ADD), LEARNED, LEARNED[:1]),
            Reader(command("memory", "forget", "learned", "train0", "--json"), LEARNED),
        ),
        120,
    ),
    Format(
        "memory file",
        "other.safetensors",
        TENSORS,
        (
            _reads("memory", "show", "other.safetensors"),
            _classify("model", "--memory", "other.safetensors"),
            Reader(
                command("memory", "export", "other.safetensors", "out.csv"), ("out",), ("out.csv",)
            ),
        ),
        60,
    ),
    Format("thresholds", "learned/calibration.json", JSON, MODEL_READERS, 80),
    Format(  # of which lines that are cut short are passed over
        *("log of a run", "resumed/metrics.jsonl", harmless(any_of(in_json_lines, in_bytes))),
        *((RESUME,), 30),
    ),
    Format("state to resume", "resumed/resume.safetensors", TENSORS, (RESUME,), 60),
    Format("config to resume", "resumed/config.yaml", YAML, (RESUME,), 40),
    Format("state to pre-train on", "begun/resume.safetensors", TENSORS, (PRETRAIN_RESUME,), 30),
    Format(
        "backbone",
        "pre/backbone.safetensors",
        TENSORS,
        (_learn("--data", "folder:pictures", "--encoder", "pre"),),
        30,
    ),
    Format(
        "shipped model",
        "model/*.json",
        JSON,
        (_classify("model", "--reject", "0.9"), _classify("model")),
        60,
    ),
    Format("saved classifier", "saved.vsm", TENSORS, (Reader(ask_saved),), 80),
    Format(
        "index of prepared data",
        "data/folder-*/index.json",
        JSON,
        (
            _reads("evaluate", "learned", *EVALUATE),
            _reads("data", "info", "folder:pictures", "--verify"),
        ),
        60,
    ),
    Format(
        "images of prepared data",
        "data/folder-*/images.npy",
        any_of(in_bytes, in_array_header, in_kind),
        (_reads("data", "info", "folder:pictures", "--verify"),),
        40,
    ),
    Format(
        "pictures",
        "query/*",
        harmless(any_of(in_bytes, in_bytes, in_bytes, in_kind)),
        (_classify("learned"),),
        60,
    ),
    Format(
        "folder of pictures",
        "support",
        harmless(in_folder),
        (
            _classify("learned"),
            Reader(command("review", "support", "--model", "learned", "--json"), ("review.html",)),
            Reader(command(*ADD), LEARNED),
        ),
        40,
    ),
    Format(
        "table of pictures",
        "table.csv",
        harmless(any_of(in_table, in_table, in_bytes, in_kind)),
        (_reads("classify", "--support", "table.csv", "--query", "query", "--model", "learned"),),
        40,
    ),
    Format(
        "features, arrays",
        "features/*.npy",
        harmless(ARRAY),
        (_learn("--data", "features:features"),),
        50,
    ),
    Format(
        "features, names",
        "features/*.json",
        harmless(JSON),
        (_learn("--data", "features:features"),),
        30,
    ),
    Format(
        "features, one file",
        "features.safetensors",
        harmless(TENSORS),
        (_learn("--data", "features:features.safetensors"),),
        40,
    ),
    Format(
        "study",
        "study.yaml",
        harmless(YAML),
        (
            _reads("study", "study.yaml", "--output", "jobs", "--dry-run"),
            Reader(command("study", "study.yaml", "--render", "out.md"), ("out.md", "charts")),
        ),
        50,
    ),
    Format(
        "results of a study",
        "study/results.json",
        harmless(JSON),
        (Reader(command("study", "study.yaml", "--render", "out.md"), ("out.md", "charts")),),
        40,
    ),
    Format(
        "results of jobs",
        "jobs/jobs/*/*.json",
        harmless(JSON),
        (
            Reader(
                command("study", "study.yaml", "--output", "jobs", "--json"),
                ("jobs", "study/"),
            ),
        ),
        40,
    ),
    Format(
        "cache of embeddings",
        "data/embeddings/*.sqlite",
        DATABASE,
        (_reads("evaluate", "foreign", *OTHER_DATA[:-1]),),
        30,
    ),
    Format(
        "ONNX encoder",
        "onnx/encoder.onnx",
        any_of(in_bytes, in_bytes, in_bytes, in_kind),
        (_classify("foreign"),),
        40,
    ),
    Format(
        "store of a server",
        "store.sqlite",
        begun_anew(DATABASE),
        (
            Reader(
                command("memory", "export", "store.sqlite", "out.safetensors"),
                ("out", "store.sqlite"),
                ("out.safetensors",),
            ),
            Reader(
                partial(serve_and_ask, "--model", "learned", "--store", "store.sqlite"),
                ("store.sqlite",),
            ),
        ),
        60,
    ),
    Format(
        "settings",
        "settings.yaml",
        harmless(YAML),
        (
            Reader(
                command("train", "--config", "settings.yaml", "--output", "out", "--print-config")
            ),
            Reader(
                command(
                    *("train", "--config", "settings.yaml", "--output", "out"),
                    *(*TINY, "--steps", "1"),
                ),
                ("out",),
            ),
        ),
        60,
    ),
)
