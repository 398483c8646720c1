"""What trains: the step, two pure functions, and the loop that calls it. Read `step` first, then `loop`."""
