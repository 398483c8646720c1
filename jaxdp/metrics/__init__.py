"""Writers of what a run measures, behind one small interface."""

from jaxdp.metrics.writer import Many, Nothing, Writer

__all__ = ["Many", "Nothing", "Writer"]
