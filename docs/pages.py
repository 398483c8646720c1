"""Write the pages in docs/reference: keys of a config, commands, and Python's public names. `make
docs` runs it.
"""

import dataclasses
import inspect
import json
import pathlib
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import jaxdp
from jaxdp import cli
from jaxdp.config import Config
from jaxdp.config.validation import decides, inner
from jaxdp.config.values import Epochs

# Title -> (text, names as they are imported).
SECTIONS: dict[str, tuple[str, list[str]]] = {
    "Losses": (
        "`loss.target` is one of these, or anything of the same shape: sums and a weight, never a mean.",
        [
            "jaxdp.losses.SoftmaxCrossEntropy",
            "jaxdp.losses.CausalLM",
            "jaxdp.losses.MeanSquaredError",
            "jaxdp.losses.Contrastive",
            "jaxdp.losses.MultiTask",
            "jaxdp.sampling.example_losses.WeightedCrossEntropy",
            "jaxdp.sampling.example_losses.PerExample",
            "jaxdp.measures.measured.Measured",
            "jaxdp.measures.measured.AUC",
            "jaxdp.measures.measured.Precision",
        ],
    ),
    "Results": (
        "What `jaxdp.fit` returns ([Notebooks](../notebook.md)).",
        ["jaxdp.run.fitted.Fitted"],
    ),
    "Optimizers": (
        "`optimizer.target` is sgd, adam, adamw, lamb, adafactor, lion, muon, or a function that returns an Optax "
        "transformation.",
        [
            "jaxdp.optim.optimizers.make_optimizer",
            "jaxdp.optim.schedule.make_schedule",
            "jaxdp.optim.zero.zero1",
            "jaxdp.optim.muon.muon",
        ],
    ),
    "Data": (
        "[Data](../data.md) is the page to begin with.",
        [
            "jaxdp.data.dataset.Dataset",
            "jaxdp.data.digits.Digits",
            "jaxdp.data.npz.Npz",
            "jaxdp.data.text.PythonSource",
            "jaxdp.data.cifar10.CIFAR10",
            "jaxdp.data.mnist.MNIST",
            "jaxdp.data.mnist.FashionMNIST",
            "jaxdp.data.image_folder.ImageFolder",
            "jaxdp.data.hugging_face.HuggingFace",
            "jaxdp.data.text.TextFile",
            "jaxdp.data.text.PennTreebank",
            "jaxdp.data.packing.Documents",
            "jaxdp.data.token_file.TokenFile",
            "jaxdp.data.packing.PackedTokens",
            "jaxdp.data.mixture.Mixture",
            "jaxdp.sampling.balanced.Balanced",
            "jaxdp.tables.rows.Table",
            "jaxdp.archives.image_table.ImageTable",
            "jaxdp.archives.packed.ImageZip",
            "jaxdp.archives.web_dataset.WebDataset",
            "jaxdp.archives.medmnist.MedMNIST",
            "jaxdp.data.stream.Stream",
            "jaxdp.recipes.augmented.Augmented",
            "jaxdp.recipes.crops.resized_crop",
            "jaxdp.recipes.rand_augment.rand_augment",
            "jaxdp.data.transforms.Mixup",
            "jaxdp.recipes.cutmix.CutMix",
            "jaxdp.data.tokenizers.Tokenizer",
        ],
    ),
    "Models": (
        "[Models](../models.md) is the page to begin with.",
        [
            "jaxdp.models.base.Model",
            "jaxdp.models.mlp.MLP",
            "jaxdp.models.cnn.CNN",
            "jaxdp.models.resnet9.ResNet9",
            "jaxdp.models.vit.ViT",
            "jaxdp.models.gpt.GPT",
            "jaxdp.models.recurrent.LSTM",
            "jaxdp.models.recurrent.RNN",
            "jaxdp.models.nnx.Carry",
            "jaxdp.models.nnx.Blocks",
            "jaxdp.models.equinox.Carry",
            "jaxdp.models.scan.scan_blocks",
            "jaxdp.losses.Logits",
        ],
    ),
    "The step and its strategies": (
        "What the trainer is built from; each part takes plain arguments.",
        [
            "jaxdp.train.state.TrainState",
            "jaxdp.train.state.Sums",
            "jaxdp.train.step.Forward",
            "jaxdp.train.step.UpdateRule",
            "jaxdp.train.step.Step",
            "jaxdp.train.step.make_step",
            "jaxdp.parallel.strategy.Strategy",
            "jaxdp.parallel.strategy.Program",
            "jaxdp.parallel.pmap.PMap",
            "jaxdp.parallel.pjit.PJit",
            "jaxdp.parallel.layout.Sharding",
            "jaxdp.parallel.layout.Layout",
        ],
    ),
    "Writers and hardware": (
        "[Watch a run](../monitoring.md) and [plan](../plan.md) use these.",
        ["jaxdp.metrics.writer.Writer", "jaxdp.plan.hardware.Hardware"],
    ),
}


def config_page() -> str:
    """Every key of a config: type, default, what it decides, meaning."""
    lines = [
        "# Config",
        "",
        "A run is described by one YAML file; each key may be given on the command line too, as `--key value`, where "
        "lists and mappings are YAML in quotes. A key that is unknown is an error that names the nearest known one. "
        "**numbers**: the key changes what is computed, and a run that is there can only go on with the same value. "
        "**speed**: it changes only how fast, where, or what is written about it, and may differ from start to start.",
    ]
    for group in groups():
        lines += [
            "",
            f"## {group.name or 'The run'}",
            "",
            _linked(group.text),
            "",
            *_table(group.keys),
        ]
    return "\n".join(lines) + "\n"


def _table(keys: Iterable["Key"]) -> list[str]:
    rows = ["| key | type | default | decides | |", "|---|---|---|---|---|"]
    for key in keys:
        default = (
            f"`{shown(key.default)}`"
            if shown(key.default)
            else "null"
            if key.default is None
            else ""
        )
        rows.append(
            f"| `{key.name}` | {key.kind} | {default} | {key.decides} | {_linked(_escaped(key.text))} |"
        )
    return rows


def commands_page() -> str:
    """Every command: how it is called, examples, its own options."""
    lines = [
        "# Commands",
        "",
        "`jaxdp VERB --help` prints what stands here, and `jaxdp train --help` all keys of a config, too, which are "
        "on [a page of their own](config.md). `python -m jaxdp` is the same, and `python train.py` is `jaxdp train`.",
        "",
        "Exit codes: 0 done, 2 bad usage or config, 75 preempted after a good save (start me again), 1 anything else.",
    ]
    for verb in cli.VERBS:
        text = cli.help_of(verb).partition("\n\nkeys:\n")[0].rstrip()
        lines += ["", f"## jaxdp {verb}", "", "```text", text, "```"]
    return "\n".join([*lines, ""])


def python_page() -> str:
    """The public names of the package, and those of its modules that a person uses."""
    lines = ["# Python", "", _linked(_escaped(jaxdp.__doc__ or "")), "", "## jaxdp", ""]
    for name in jaxdp.__all__:
        if name != "__version__":
            lines += _entry(f"{jaxdp._HOME.get(name, 'jaxdp')}.{name}", f"jaxdp.{name}")
    for title, (text, names) in SECTIONS.items():
        lines += ["", f"## {title}", "", text, ""]
        for name in names:
            lines += _entry(name, name)
    return "\n".join(lines) + "\n"


def _entry(path: str, heading: str) -> list[str]:
    return [
        f"::: {path}",
        "    options:",
        f"      heading: {heading}",
        f"      toc_label: {heading.rpartition('.')[2]}",
        "",
    ]


def _escaped(text: str) -> str:
    return re.sub(r"([*_<\[|])", r"\\\1", text)


def _linked(text: str) -> str:
    return re.sub(
        r"docs/(\w+)(?:\\_(\w+))?\.md(#[\w-]+)?",
        lambda m: f"[{m[0]}](../{'_'.join(filter(None, m.groups()[:2]))}.md{m[3] or ''})",
        text,
    )


KINDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Epochs: "epochs",
    dict: "mapping",
    list: "list",
}


class Key(NamedTuple):
    """A key. name: dotted, as on the command line. choices: the allowed values, if they can be
    listed. decides: 'numbers' or 'speed'."""

    name: str
    kind: str
    choices: tuple[str, ...]
    default: Any
    decides: str
    text: str


class Group(NamedTuple):
    """The keys of one section; the name of the top level is empty."""

    name: str
    text: str
    keys: list[Key]


def groups() -> list[Group]:
    """Return all keys of a config by section, in the order of the schema."""
    fields = dataclasses.fields(Config)
    hints = get_type_hints(Config)
    top = [f for f in fields if inner(hints[f.name]) is None]
    sections = [Group("", summary(Config), [_key(Config, f, "") for f in top])]
    for field in fields:
        if part := inner(hints[field.name]):
            sections.append(Group(field.name, summary(part), _keys(part, f"{field.name}.")))
    return sections


def summary(thing: Any) -> str:
    """Return a docstring's text before `Args:`, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\nArgs:")[0].split())


def arguments(thing: Any) -> dict[str, str]:
    """Return {argument: description} of a docstring's section `Args:`."""
    section = (inspect.getdoc(thing) or "").partition("\nArgs:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _keys(part: Any, prefix: str) -> list[Key]:
    keys: list[Key] = []
    for field in dataclasses.fields(part):
        keys.append(_key(part, field, prefix))
        if subsection := inner(get_type_hints(part)[field.name]):
            keys += _keys(subsection, f"{prefix}{field.name}.")
    return keys


def _key(part: Any, field: "dataclasses.Field[Any]", prefix: str) -> Key:
    default = (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    hint = get_type_hints(part)[field.name]
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words: list[str] = []
    choices: tuple[str, ...] = ()
    for kind in sorted(kinds, key=lambda kind: get_origin(kind) is dict):  # a text first
        if get_origin(kind) is Literal:
            choices += get_args(kind)
            words += get_args(kind)
        elif kind is not type(None):
            words.append("target and args" if inner(kind) else KINDS[get_origin(kind) or kind])
            choices += ("true", "false") if kind is bool else ()
    if type(None) in kinds:
        words.append("null")
    name = f"{prefix}{field.name}"
    return Key(
        name, ", ".join(words), choices, default, decides(name), arguments(part).get(field.name, "")
    )


def shown(default: Any) -> str:
    """Return a default as written in a config; empty if there is none, or if it is a section."""
    if default in (None, "", [], {}) or dataclasses.is_dataclass(default):
        return ""
    return default if isinstance(default, str) else json.dumps(default)


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    for name, page in {
        "config": config_page,
        "commands": commands_page,
        "python": python_page,
    }.items():
        (folder / f"{name}.md").write_text(page())
