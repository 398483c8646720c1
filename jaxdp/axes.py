"""The names of mesh axes, as models, reductions and strategies share them."""

DATA = "data"  # one entry per device: every replica's share of the batch
