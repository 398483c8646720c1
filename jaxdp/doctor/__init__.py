"""The doctor looks for what goes wrong in a run before it does: each check says what it found and what mends it."""
