"""Observers that a config names under `callbacks`."""
