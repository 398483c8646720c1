"""The training loop and its work between updates: read `loop` first."""
