"""Writers of a run's metrics, behind one small interface."""

from jaxdp.metrics.writer import Many, Writer

__all__ = ["Many", "Writer"]
