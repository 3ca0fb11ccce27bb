"""Process-wide set-up that makes a CPU fast; called once by the command line.

Activations of a training step are tens of megabytes. By default glibc returns each to the kernel
when freed and requests zeroed pages again, which takes about a third of a step. These settings make
it reuse the memory. Linux with glibc only; ``VSM_KEEP_ALLOCATIONS=0`` switches it off.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_allocations(in_threads: bool = False) -> bool:
    """Stop glibc from returning freed memory to the kernel; return whether that worked.

    ``in_threads``: all threads share one arena, since their own keep nothing larger than 64 MB.
    """
    if sys.platform != "linux" or os.environ.get("VSM_KEEP_ALLOCATIONS") == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    never = -1  # the largest number would still give back what is free beyond 2 GB
    wanted = {_M_MMAP_THRESHOLD: 2**31 - 1, _M_TRIM_THRESHOLD: never, _M_TOP_PAD: 64 * 2**20}
    if in_threads:
        wanted[_M_ARENA_MAX] = 1
    return all(mallopt(option, value) == 1 for option, value in wanted.items())
