"""Scripts that measure; each prints or writes its figures, and none asserts any."""

import sys
from collections.abc import Callable

from vsm.errors import VsmError


def run(script: Callable[[], None]) -> int:
    """Run a script and return its exit code: a known error or Ctrl-C is one line."""
    try:
        script()
    except VsmError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
