"""The results of checks, and the table of causes that a failed verification names."""

from typing import NamedTuple

OK, FAILED, NOTE, SKIPPED, REFUSED = "ok", "FAILED", "note", "skipped", "refused"
CAUSES = {
    # The traced programs.
    "axis_index": "{part} asks which device it is on (axis_index{at}); derive random numbers from the key that is "
    "passed in",
    "communicates": "{part} communicates over the devices ({what}{at}), as BatchNorm with sync: true does, so its "
    "numbers depend on how many there are",
    "counts": "{part} asks how many devices there are (axis_size, or psum of 1{at}), and its numbers depend on it",
    "impure": "{part} is not the same when it is traced again (it differs{at}): it draws from a generator of its own, "
    "NumPy's or Python's, or reads something that changes; derive random numbers from the key that is passed in",
    "host": "{part} depends on {what} (it differs{at}), which is another in every process or on other hardware; use "
    "the config, the key, or the data instead",
    "raises": "what the config names cannot be constructed or traced on another host (another value of {what})",
    "unbound": "{part} names an axis that does not exist ({what}); that of all devices is 'data', and init has none",
    # The data and the model.
    "data": "the data is not a function of the index: {what!r} of an example changes when it is read again; move what "
    "is random into its transform(batch, key, train)",
    "repeat": "one microbatch computed twice gives another {leaf} (by {error:.1e}): model or loss draw from a random "
    "generator of their own, as in a host callback; derive random numbers from the key",
    "padding": "the model counts padded examples: with {what}, {leaf} differs by {error:.1e}; a BatchNorm (or anything "
    "that looks across examples) needs the mask, an argument named mask",
    "integers": "the microbatches disagree on {leaves} of the model's state; all must change an integer alike",
    # The loss.
    "loss not finite": "the loss has a {what} that is not finite",
    "no weight": "the loss has the weight {weight:g} for {size} examples; return batch['mask'] summed",
    "mean of means": "the loss makes a mean of means; return the sum of the losses, and batch['mask'] summed",
    "weight": "the loss has a weight that does not count examples; return batch['mask'] summed",
    "mean": "the loss returns a mean instead of a sum; return the losses times batch['mask'] summed",
    "couples": "the loss of an example depends on the other examples of its microbatch (as a contrastive loss does): "
    "set its attribute scope to 'global', so that it gets the full batch",
    "metric": "the loss has a {what} that is a mean or does not add up; return its sum",
    "mask": "the loss counts examples whose batch['mask'] is 0 (in its {what}); multiply by the mask before summing",
    # Training.
    "not finite": "the loss is not finite: {losses} in the first updates; try a smaller optimizer.lr",
    "rounding": "not compared, because rounding alone moves them too far: {leaves}",
    "no trained leaf": "no parameter that is trained was compared",
    "refused": "the configuration that the config asks for is refused: {failure}",
    "failed": "{number} of {all} configurations failed: {failure}",
    "all differ": "every configuration differs, on one device too: the step computes something other than the oracle",
    "one setting": "only {name} {value} differs",
    "several devices": "one device agrees and several do not: something depends on how many devices there are",
    "no setting": "no setting is common to all that differ, and to nothing that agrees",
    "nothing compared": "no configuration was compared with the oracle",
}


class Check(NamedTuple):
    """verdict: OK, FAILED, NOTE or SKIPPED; FAILED alone means that the problem is not verified."""

    name: str
    verdict: str
    text: str


def cause(kind: str, where: str = "", **values: object) -> str:
    """Return a cause of the table. where: a line of code."""
    return CAUSES[kind].format(at=where and f" at {where}", **values)


def failed(name: str, kind: str, where: str = "", **values: object) -> Check:
    return Check(name, FAILED, cause(kind, where, **values))
