"""Checks of the devices between two updates: which one computes wrongly, which one slowly; and
faults to test them.
"""
