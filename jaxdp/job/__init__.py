"""One training job: train a config in a run directory."""
