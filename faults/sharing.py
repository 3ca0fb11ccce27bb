"""The part ``sharing``: several processes on one memory and on one run."""

import json
import shutil
import time
from functools import partial
from pathlib import Path
from random import Random

from faults.bench import Attempt, Bench, Group
from faults.oracles import process_defects, timeless
from faults.processes import command
from faults.specimens import TRAIN

WRITERS, READERS = 4, 3
SHOW = command("memory", "show", "learned", "--json")


def groups() -> list[Group]:
    """Return writers among readers, and trainings of one run."""
    return [
        Group("sharing", "memory add × memory show", 6, _writers_and_readers),
        Group("sharing", "classify while the memory changes", 6, _readers_of_a_run),
        Group("sharing", "two train --resume", 6, partial(_trainings, "resumed")),
        Group("sharing", "two train --resume from nothing", 4, partial(_trainings, "fresh")),
    ]


def _writers_and_readers(bench: Bench, number: int, random: Random) -> Attempt:
    """Add a class by each of several processes; all of them must be remembered."""
    pictures = sorted((bench.folder / "support").glob("*/*.png"))
    for writer in range(WRITERS):
        folder = bench.folder / f"new{writer}" / f"added{writer}"
        folder.mkdir(parents=True)
        shutil.copy(random.choice(pictures), folder)
    programs = [
        command("memory", "add", "learned", "--images", f"new{writer}", "--json")
        for writer in range(WRITERS)
    ] + [SHOW] * READERS
    random.shuffle(programs)
    running = [bench.start(one, f"{place}") for place, one in enumerate(programs)]
    ended = [one.wait() for one in running]
    defects = [defect for one in ended for defect in process_defects(one)]
    defects += [f"fails: {one.errors.strip()[-120:]}" for one in ended if one.code]
    if not defects:
        names = {slot["name"] for slot in json.loads(bench.run(SHOW).output)["slots"]}
        lost = {f"added{writer}" for writer in range(WRITERS)} - names
        defects += [f"{len(lost)} of {WRITERS} classes are lost"] if lost else []
    return Attempt(f"{WRITERS} writers, {READERS} readers, order {number}", "same", tuple(defects))


def _readers_of_a_run(bench: Bench, number: int, _: Random) -> Attempt:
    """Classify while classes come and go; every answer is one of those before and after."""
    classify = command(
        *("classify", "--support", "support", "--query", "query", "--model", "learned", "--json")
    )
    forget = command("memory", "forget", "learned", f"train{number}", "--json")
    answers = [bench.run(classify).output]
    running = [bench.start(one, f"{n}") for n, one in enumerate([classify, forget, classify])]
    ended = [one.wait() for one in running]
    answers.append(bench.run(classify).output)
    defects = [defect for one in ended for defect in process_defects(one)]
    defects += [f"fails: {one.errors.strip()[-120:]}" for one in ended if one.code]
    between = [one.output for one in (ended[0], ended[2])]
    if not defects and not set(between) <= set(answers):
        defects.append("gives an answer that is neither the old nor the new one")
    return Attempt(f"forget train{number} while classifying", "same", tuple(defects))


def _trainings(folder: str, bench: Bench, number: int, random: Random) -> Attempt:
    """Train one run twice at a time: one goes on, the other is refused or comes after it."""
    program = command(*TRAIN, "--output", folder, "--resume")
    if folder not in bench.undisturbed:
        bench.run(program)
        bench.undisturbed[folder] = {"files": _files(bench.folder / folder)}
        bench.restore()
    seconds = random.uniform(0, 0.5)

    wait = partial(time.sleep, seconds)
    running = [bench.start(program, "first"), bench.start(program, "second", prepare=wait)]
    ended = [one.wait() for one in running]
    defects = [defect for one in ended for defect in process_defects(one)]
    if all(one.code for one in ended):
        defects.append("neither of them goes on")
    what = f"the second {seconds:.2f} seconds later, number {number}"
    if not defects and _files(bench.folder / folder) != bench.undisturbed[folder]["files"]:
        defects.append("both wrote, and the run differs from an undisturbed one")
    return Attempt(what, "refused" if any(one.code for one in ended) else "same", tuple(defects))


def _files(folder: Path) -> dict[str, str]:
    names = ("model.safetensors", "memory.safetensors", "config.yaml", "metrics.jsonl")
    return {name: timeless(folder / name) for name in names if (folder / name).is_file()}
