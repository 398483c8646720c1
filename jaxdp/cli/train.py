"""The verb `train`."""

from jaxdp.cli import Call
from jaxdp.run.training_job import train


def run(call: Call) -> None:
    train(call.config, call.path, call.context)
