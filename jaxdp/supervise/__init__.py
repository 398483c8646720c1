"""What supervises a run: signals, preemption, the watchdog of steps."""
