"""What each process of ``tests/test_class_rows.py`` does: learn a memory, with little room.

RANK=0 WORLD_SIZE=2 ... python tests/learning_worker.py NUMBERS WORDS...
"""

import sys

from vsm import learning
from vsm.cli import main
from vsm.encoders import encoder

if __name__ == "__main__":
    learning.NUMBERS_AT_ONCE = encoder.NUMBERS_IN_MEMORY = int(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
