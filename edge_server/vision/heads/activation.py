"""Activation functions: scores to probabilities. Values that overflow become the limit or NaN, and are dropped
later."""

from __future__ import annotations

import numpy as np

from edge_server.vision.heads.output_parameters import Activation
from edge_server.vision.heads.output_tensors import Reals


def activate(scores: Reals, activation: Activation, *, axis: int) -> Reals:
    """Return probabilities; `axis` runs over the classes. Without an activation the scores themselves, uncopied."""
    if activation is Activation.NONE:
        return scores
    if activation is Activation.SIGMOID:
        logistic: Reals = 1 / (1 + np.exp(-scores))
        return logistic
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    shares: Reals = powers / powers.sum(axis=axis, keepdims=True)
    return shares


def best_class(scores: Reals, activation: Activation, *, axis: int) -> Reals:
    """Return the probability of the best class, for all places along the other axis: as `activate(...).max(axis)`.

    Cheaper, because the order of classes is the same before the activation.
    """
    highest: Reals = scores.max(axis=axis)
    if activation is Activation.SOFTMAX:
        shares: Reals = 1 / np.exp(scores - np.expand_dims(highest, axis)).sum(axis=axis)
        return shares
    return activate(highest, activation, axis=0)
