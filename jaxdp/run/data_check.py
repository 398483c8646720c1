"""Check all data that a config names: list what cannot be read, of all sets."""

from collections.abc import Iterator

from jaxdp.config import Config
from jaxdp.config.training import Target
from jaxdp.data import SOURCES
from jaxdp.data.check import Finding, check_dataset
from jaxdp.data.dataset import as_dataset
from jaxdp.data.mixture import Mixture, has_test_split, is_target
from jaxdp.errors import UsageError, one_line
from jaxdp.run.datasets import named_sets
from jaxdp.targets import bind, call, locate, targets_in


def check_config(config: Config) -> Iterator[Finding]:
    """Yield the findings about the training set, and the evaluation sets, of a config."""
    yield from check_target("data", config.data, "train")
    if config.eval.data is not None:
        yield from check_target("eval.data", config.eval.data, "test")
    elif has_test_split(locate("data", config.data.target, SOURCES), config.data.args):
        yield from check_target("data, split test", config.data, "test")
    for name, target in named_sets(config).items():
        yield from check_target(f"eval.also.{name}", target, "test")


def check_target(key: str, target: Target, split: str) -> Iterator[Finding]:
    """Yield the findings about a data set; of a mixture, about each of its sets."""
    try:
        source = locate(key, target.target, SOURCES)
        sets = target.args.get("sets") if source is Mixture else None
        if not isinstance(sets, dict):
            examples = (
                call(key, bind(key, source, target.args, {"split": split}))
                if callable(source)
                else source
            )
            yield from check_dataset(as_dataset(examples), key)
            return
        for name, entry in sets.items():
            if not is_target(entry):
                raise UsageError(f"{key}.args.sets.{name}: {entry!r} is no target")
            [parts] = targets_in(f"{key}.args.sets.{name}", [entry], "data set", "Digits")
            yield from check_target(f"{key}.args.sets.{name}", Target(*parts), split)
    except Exception as error:
        text = (
            one_line(error)
            if isinstance(error, UsageError)
            else f"{type(error).__name__}: {one_line(error)}"
        )
        yield Finding(f"{key}: {text.removeprefix('data: ')}")
