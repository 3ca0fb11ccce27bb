"""The paper's tables and figures, one command each.

From top to bottom: ``paper`` (what the paper prints), ``catalog`` (which rows can be measured
here, and with which settings), ``budgets`` (how long they may take), ``jobs`` and ``plan`` (what
has to be computed, named by content), ``store`` (job folders), ``execution``, ``launchers`` and
``runner`` (computing it), ``results`` and ``report`` (what came out, beside the paper's values).
"""
