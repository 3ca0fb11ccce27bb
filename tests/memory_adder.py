"""A process that adds classes to a memory, one at a time: PATH PREFIX COUNT."""

import sys
from pathlib import Path

import torch

from serving_helpers import tiny_model
from vsm.runs.memory_files import NamedMemory, by_hand, update_memory


def main() -> None:
    path, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = tiny_model()
    consolidation = by_hand(model)
    assert consolidation is not None
    for number in range(count):

        def add(memory: NamedMemory, number: int = number) -> NamedMemory:
            features = torch.full((2, model.num_features), float(number))
            labels = [f"{prefix}{number}", "shared"]
            return memory.taking_in(consolidation, features, labels, {})[0]

        update_memory(path, add)


if __name__ == "__main__":
    main()
