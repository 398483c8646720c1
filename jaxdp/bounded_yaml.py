"""Parse YAML in bounded time and memory: anchors and aliases let a small text expand to billions of values."""

from __future__ import annotations

from typing import Any, NoReturn

import yaml

from jaxdp.errors import UsageError

BYTES = 2**20  # of the whole text
NODES = 20_000  # of the expanded text: an alias counts as all the nodes that it repeats
DEPTH = 50
SCALAR = 2**16  # characters of a string
NUMBER = 2**11  # characters of a number: Python prints no integer of more than 4,300 digits


class _Counter(yaml.SafeLoader):
    """A loader that counts the expanded nodes of a text. Raises UsageError beyond the limits."""

    def __init__(self, text: str, where: str):
        super().__init__(text)
        self.where, self.depth, self.nodes, self.sizes = where, 0, 0, dict[int, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        if self.depth > DEPTH:
            self.refuse(f"YAML that is nested more than {DEPTH} deep")
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if alias and id(node) not in self.sizes:
            self.refuse("a YAML alias inside the node that it refers to")
        if not alias:
            self.sizes[id(node)] = self.size(node)
        if max(self.nodes, self.sizes[id(node)]) > NODES:
            self.refuse(f"YAML that expands to more than {NODES:,} values")
        return node

    def size(self, node: Any) -> int:
        if not isinstance(node, yaml.ScalarNode):
            parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            return 1 + sum(self.sizes[id(part)] for part in parts)
        if len(node.value) > (NUMBER if node.tag.endswith((":int", ":float")) else SCALAR):
            self.refuse(f"a value of {len(node.value):,} characters")
        return 1

    def refuse(self, value: str) -> NoReturn:
        raise UsageError(f"{self.where}: {value} is refused")


def check(text: str, where: str) -> None:
    """Raise UsageError if a YAML text is too large, too deep, or expands too far. Ignore invalid YAML."""
    if len(text) > BYTES:
        raise UsageError(f"{where}: YAML of {len(text):,} characters is refused")
    try:
        _Counter(text, where).get_single_node()
    except yaml.YAMLError:
        return


def load(text: str, where: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parse a YAML text within the limits. Raises UsageError beyond them, and yaml.YAMLError for invalid YAML."""
    check(text, where)
    try:
        return yaml.load(text, loader)
    except ValueError as error:  # an integer of thousands of digits, an invalid date
        if isinstance(error, UsageError):
            raise
        raise yaml.YAMLError(str(error)) from None


def parser(**arguments: Any) -> Any:
    """Return a jsonargparse parser with these limits, also for YAML inside the values of a config."""
    import jsonargparse

    if not hasattr(plain := jsonargparse.get_loader("yaml"), "bounded"):

        def read(text: str) -> Any:
            check(text, "config")
            return plain(text)

        setattr(read, "bounded", True)  # noqa: B010
        jsonargparse.set_loader("yaml", read, (yaml.YAMLError,))
    return jsonargparse.ArgumentParser(exit_on_error=False, default_env=False, **arguments)
