"""The name that `jaxdp.run.callbacks` had in version 0.1: `jaxdp.training.callbacks`."""

import sys

from jaxdp.run import callbacks

sys.modules["jaxdp.training.callbacks"] = callbacks
