"""A run that takes a while: data in a file of its own, slow to read, and the config of it."""

# Exact, so that one process and two end in the same bits; slow, so that there is time to stop it.
CONFIG = """
model: {target: MLP, args: {hidden: [16]}}
data: {target: slow_digits.SlowDigits}
steps: 150
batch_size: 32
parallel: {reduction: exact}
log: {every: 1}
checkpoint: {every: 20}
"""
SLOW = """import time
from jaxdp.data.digits import Digits


class SlowDigits(Digits):
    def read(self, indices):
        time.sleep(0.01)
        return super().read(indices)
"""
