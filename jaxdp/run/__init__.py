"""One run: from a config to its built objects, to a finished run directory."""
