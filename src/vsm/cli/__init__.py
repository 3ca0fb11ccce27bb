"""The command line: parsing, printing and exit codes; no mathematics.

Exit codes: 0 done, 1 the system refused (a full disk, a missing permission, too little memory, a
lost process), 2 a mistake in what was asked or a damaged file (one line says which), 130 stopped by
Ctrl-C, 143 by SIGTERM, 140 by SIGUSR2, 141 because nobody reads the output any more. Results go to
standard output, everything else to standard error.
"""

from vsm.cli.main import main

__all__ = ["main"]
