"""The verb `train`."""

from jaxdp.cli import Call
from jaxdp.extras import door
from jaxdp.run import rundir
from jaxdp.run.driver import Continuation
from jaxdp.run.training_job import train, train_in


def run(call: Call) -> None:
    config, context = call.config, call.context
    if call.options["check"]:
        check = door("check", "--check")(config)
        check.around(train_in, rundir.directory_of(config, call.path))(context, Continuation())
    else:
        train(config, call.path, context)
