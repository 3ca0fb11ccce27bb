"""The part ``mutations``: damaged files of every format."""

from functools import partial
from random import Random
from typing import Any

from faults.bench import CANARY_TEXT, Attempt, Bench, Group
from faults.formats import CACHE, FORMATS, Format, Reader
from faults.oracles import answer_of, judge, timeless, tree_of
from faults.processes import TRUE_PROCESS_EVERY, Command


def groups() -> list[Group]:
    """Return the cases of every format."""
    return [Group("mutations", one.name, one.cases, partial(_attempt, one)) for one in FORMATS]


def _attempt(tried: Format, bench: Bench, number: int, random: Random) -> Attempt:
    reader = tried.readers[number % len(tried.readers)]
    undisturbed = _undisturbed(reader, bench)
    done = tried.damage(bench.folder, random)
    prepare = None
    if isinstance(reader.program, Command) and number % TRUE_PROCESS_EVERY == 0:
        prepare = reader.program.in_a_process_of_its_own
    before = tree_of(bench.folder)
    ended = bench.run(reader.program, prepare=prepare)
    after = tree_of(bench.folder)
    results = _results(reader, bench)
    allowed = done.may_differ, reader.writes, CACHE
    verdict = judge(ended, before, after, results, undisturbed, *allowed)
    defects = verdict.defects
    if CANARY_TEXT in ended.output + ended.errors:
        defects = ("prints another file", *defects)
    return Attempt(f"{done.what}; {_named(reader)}", verdict.outcome, defects)


def _undisturbed(reader: Reader, bench: Bench) -> dict[str, Any]:
    """Return what a program does with whole files; it must do the same twice."""
    if reader not in bench.undisturbed:
        found = []
        for _ in range(2):
            bench.restore()
            ended = bench.run(reader.program)
            if ended.code != 0 or ended.hung:
                raise RuntimeError(f"{_named(reader)} fails undisturbed: {ended.errors}")
            files = _results(reader, bench)
            found.append({"answer": answer_of(ended), "files": files, "events": ended.events})
        if found[0] != found[1]:
            raise RuntimeError(f"{_named(reader)} answers differently each time: {found}")
        bench.undisturbed[reader] = found[0]
        bench.restore()
    return bench.undisturbed[reader]


def _results(reader: Reader, bench: Bench) -> dict[str, str]:
    """Return digests of what a program should have written, as far as it is there."""
    paths = {name: bench.folder / name for name in reader.results}
    return {name: timeless(path) for name, path in paths.items() if path.is_file()}


def _named(reader: Reader) -> str:
    """Return what runs, shortly."""
    if isinstance(reader.program, Command):
        words = [word for word in reader.program.words[:3] if not word.startswith("-")]
        return f"vsm {' '.join(words)}"
    return getattr(reader.program, "__name__", "vsm serve")
