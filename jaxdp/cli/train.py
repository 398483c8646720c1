"""The verb `train`."""

from jaxdp.cli import Call
from jaxdp.job.train import train


def run(call: Call) -> None:
    train(call.config, call.path, call.context)
