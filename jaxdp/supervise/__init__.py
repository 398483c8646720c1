"""Supervision of a run: signals, preemption, and a watchdog for hanging steps."""
