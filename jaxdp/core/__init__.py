"""The training step: pure functions without strategy, collective, backend or logging; read `step`
first.
"""
