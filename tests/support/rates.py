"""Functions that a config names as its schedule."""

import numpy as np


def decay_to(lr, factor=0.5):
    """A learning-rate schedule."""
    return lambda step: lr * factor**step


def pair():
    """No learning-rate schedule: it returns two numbers."""
    return lambda step: np.stack([1.0, 2.0])
