"""Find problems of a machine or a cluster before a run does: each check reports a finding and its
fix.
"""
