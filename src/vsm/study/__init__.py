"""Result files out of trained runs, and a page out of result files: no figure is typed by hand.

``plan`` and ``page`` do without torch, so that a page is rendered at once.
"""
