"""What a run costs before it runs: memory, FLOPs, bytes on the wire."""
