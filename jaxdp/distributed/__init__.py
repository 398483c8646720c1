"""Processes: who they are (launchers), how they meet (rendezvous), and what they do together (collectives)."""
