"""A process that adds classes to a memory, one at a time: PATH PREFIX COUNT."""

import sys
from pathlib import Path

import torch

from classify_helpers import tiny_model
from vsm.memory.named import NamedMemory, manual_consolidation
from vsm.runs.loading import update_memory


def main() -> None:
    path, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = tiny_model()
    consolidation = manual_consolidation(model.consolidation, model.settings.memory)
    assert consolidation is not None
    for number in range(count):

        def add(memory: NamedMemory, number: int = number) -> NamedMemory:
            features = torch.full((2, model.num_features), float(number))
            labels = [f"{prefix}{number}", "shared"]
            return memory.add(consolidation, features, labels, {})[0]

        update_memory(path, add)


if __name__ == "__main__":
    main()
