"""The verb `train`."""

from jaxdp.cli import Call
from jaxdp.extras import door
from jaxdp.run import rundir
from jaxdp.run.training_job import train, train_in


def run(call: Call) -> None:
    """Train, or with --check try in a temporary directory what that does."""
    if call.options["check"]:
        directory = rundir.directory_of(call.config, call.path)
        door("check", "--check")(call.config).around(train_in, directory)(call.context, None)
    else:
        train(call.config, call.path, call.context)
