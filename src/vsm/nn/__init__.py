"""Modules of the model: perceptrons, the prototype classifier, batch norm over processes."""
