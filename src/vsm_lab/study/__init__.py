"""Studies: trained runs, or settings to train, from a YAML file to a result file to a page.

``definition`` and ``page`` do without torch, so that a page is rendered at once.
"""
