"""Activation functions: scores to probabilities. Values that overflow become the limit or NaN; NaN is dropped later."""

from __future__ import annotations

import numpy as np

from edge_server.plugins.vision.heads.output_parameters import Activation
from edge_server.plugins.vision.heads.output_tensors import Reals


def activate(scores: Reals, activation: Activation, *, axis: int) -> Reals:
    """Return probabilities; `axis` is the class axis. Without an activation, return the scores uncopied."""
    if activation is Activation.NONE:
        return scores
    if activation is Activation.SIGMOID:
        logistic: Reals = 1 / (1 + np.exp(-scores))
        return logistic
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    shares: Reals = powers / powers.sum(axis=axis, keepdims=True)
    return shares


def best_class(scores: Reals, activation: Activation, *, axis: int) -> Reals:
    """Return the probability of the best class along `axis`, as `activate(...).max(axis)`.

    This is cheaper, because the activation does not change the order of classes.
    """
    highest: Reals = scores.max(axis=axis)
    if activation is Activation.SOFTMAX:
        shares: Reals = 1 / np.exp(scores - np.expand_dims(highest, axis)).sum(axis=axis)
        return shares
    return activate(highest, activation, axis=0)
