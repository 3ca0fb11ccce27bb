"""An HTTP server: images in, answers out, with tasks and memory in a persistent store.

A request passes :mod:`middleware` (token, limits), :mod:`service` (what each address does),
:mod:`images` (decoding), :mod:`worker` (batches) and :mod:`classifiers` (answers). :mod:`app` lists
the addresses, :mod:`server` runs the application.
"""
