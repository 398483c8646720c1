"""Processes of a job: detection (launchers), rendezvous (coordinator, membership) and collectives."""
