"""An HTTP server: images in, answers out, with tasks and memory in a persistent store.

A request passes :mod:`middleware` (token, limits), :mod:`app` (what each address does),
:mod:`images` (decoding) and :mod:`worker` (batches, classifiers, answers). :mod:`server` runs the
application.
"""
