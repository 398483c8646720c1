"""Many runs of one config, side by side."""
