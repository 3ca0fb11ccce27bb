"""Tests of the package that try many things by themselves, as cases of the campaign."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from faults.bench import Attempt, Bench

ROOT = Path(__file__).parents[1]
SECONDS = 900


def suite(
    file: str, chosen: str, variable: str, count: int, what: str, each: int = 1
) -> Callable[[Bench, int, Random], Attempt]:
    """Return the case that runs those tests of a file whose names hold ``chosen``.

    Args:
        file: in the folder of tests.
        chosen: words of their names.
        variable: of the environment, which tells how often they try.
        count: its value.
        what: is tried.
        each: how many tests try that often.
    """
    return partial(_attempt, (file, chosen, variable, count, what, each))


def _attempt(
    asked: tuple[str, str, str, int, str, int], bench: Bench, _: int, __: Random
) -> Attempt:
    file, chosen, variable, count, what, each = asked
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    words += [f"--basetemp={bench.scratch / 'pytest'}", str(ROOT / "tests" / file), "-k", chosen]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, variable: str(count), "PYTHONPATH": path}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Attempt(what, "same", (f"{file} takes more than {SECONDS} seconds",))
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][:2]
        return Attempt(what, "same", (" ".join(failed or lines[-1:])[:300],))
    if "skipped" in lines[-1] and "passed" not in lines[-1]:
        return Attempt(f"{what}: skipped here", "same", (), tried=0)
    return Attempt(f"{count * each} {what}", "same", (), tried=count * each)
