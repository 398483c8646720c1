"""Measures: metrics for any loss, each a function of sums over all examples."""
