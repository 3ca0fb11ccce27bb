"""What classifying adds to embedding the pictures, and explaining to that: part of ``make bench``.

python -m benchmarks.classifier --threads 1
"""

import argparse
import sys
from dataclasses import replace

from benchmarks import run
from benchmarks.speed import TARGETS
from vsm.benchmarking.suite import Plan, measure_classifiers
from vsm.benchmarking.timing import Spread
from vsm.cli.output import counting, print_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=Plan().models, help="shipped models")
    parser.add_argument("--pairs", type=int, default=Plan().pairs, help="turns of each work")
    parser.add_argument("--threads", type=int, help="of torch; unset: its own choice")
    chosen = parser.parse_args()
    plan = replace(Plan(), models=tuple(chosen.models), pairs=chosen.pairs, threads=chosen.threads)
    found = measure_classifiers(plan, lambda title, total: counting(title, total, quiet=False))
    rows = [
        [name, Spread(**value).describe(), f"≤ {TARGETS[name]:.2f}" if name in TARGETS else ""]
        for name, value in found["spreads"].items()
    ]
    rows += [
        [f"{name}, ms", Spread(**value).describe(1), ""]
        for name, value in found["milliseconds"].items()
    ]
    print_table("classifier", ["", "median (quartiles)", "target"], rows)


if __name__ == "__main__":
    sys.exit(run(main))
