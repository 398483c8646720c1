"""One training job: a config in a run directory."""
