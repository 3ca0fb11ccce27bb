"""``python -m vsm`` is the command ``vsm``."""

import sys

from vsm.cli import main

if __name__ == "__main__":
    sys.exit(main())
