"""Experiments: a plan names jobs, jobs leave results, results become a page.

``jobs``, ``store``, ``execution``, ``launchers``, ``runner`` and ``worker`` compute, whatever was
planned; ``results`` estimates; ``document`` and ``plots`` show. ``paper`` plans the paper's tables
and figures, ``study`` compares trained runs or settings to train, ``uncertainty`` measures what
shipped models say of their own certainty, ``speed`` how long works take. ``shipping`` and
``demo_report`` use the same parts.
"""
