"""Checkpoints: written, verified, restored; and parameters from elsewhere."""
