"""The paper's tables and figures, one command each.

``catalog`` (what the paper prints, which rows can be measured here, and with which settings),
``budgets`` (how long they may take), ``plan`` (the jobs of a request), ``tables``, ``pictures`` and
``report`` (what was measured, beside the paper's values).
"""
