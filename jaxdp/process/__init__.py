"""The processes of a job: launchers, rendezvous, signals, and what ends them."""
