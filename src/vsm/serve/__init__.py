"""A server: pictures in over HTTP, answers out, with tasks and memory in a store that lasts.

One straight line: :mod:`gate` (token, limits), :mod:`pictures` (decoding), :mod:`worker` (batches),
:mod:`fitting` (classifiers), :mod:`answers`. :mod:`app` names the addresses, :mod:`server` runs it.
"""
