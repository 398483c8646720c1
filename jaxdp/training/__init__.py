"""The training loop and what it does between updates: read `loop` first."""
