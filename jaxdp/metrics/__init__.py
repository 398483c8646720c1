"""Writers of a run's metrics, behind one small interface."""

from jaxdp.metrics.writer import Many, Nothing, Writer

__all__ = ["Many", "Nothing", "Writer"]
