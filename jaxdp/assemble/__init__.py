"""Build a run from a config: the only package that knows both. Everything below it takes plain
arguments.
"""
