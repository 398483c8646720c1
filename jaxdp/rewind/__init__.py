"""Rewind: which rows an update of a run was made of, recomputed from the nearest checkpoint."""
