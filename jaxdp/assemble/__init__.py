"""Config -> Run: the only package that sees both sides. Everything below it takes plain arguments."""
