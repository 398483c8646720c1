"""Elastic training: a job continues without a process that is lost, and with one that joins."""
