"""The verbs of the command line: description, options and examples. Imports neither JAX nor a
parser.
"""

import dataclasses
from typing import Any, Literal, NamedTuple


class Option(NamedTuple):
    """An option that is not a key of the config; a bool is False by default. least: the smallest
    value allowed. short: other names, such as -n.
    """

    kind: type
    text: str
    default: Any = None
    least: float | None = None
    short: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb, implemented by the `run` of `module`, or else of `jaxdp.cli.NAME`.

    Attributes:
        does: a line for the help.
        where: "job", in all processes of a job, on their devices; "alone", in one process, on
            simulated devices if there are no real ones; "host", without devices and without the
            keys of a config; "runs", in processes that it starts.
        arguments: name -> argparse's nargs, of positional arguments.
        command: what follows the options is a command with options of its own.
        featured: the number of examples that `jaxdp --help` shows.
        module: by its name in the package; "": that of the verb in `jaxdp.cli`.
    """

    does: str
    where: Literal["job", "alone", "host", "runs"]
    examples: tuple[str, ...]
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    featured: int = 1
    command: bool = False
    module: str = ""

    @property
    def has_config(self) -> bool:
        return self.where != "host"


STEP = Option(str, "use the checkpoint of this update, or the best one; by default the last")
JSON = Option(bool, "print JSON")
RUN_DIR = Option(str, "the directory of the run")
DIGITS = "--config configs/digits.yaml"

VERBS = {
    "train": Verb(
        "train a model by a config, or on data (jaxdp train DATA), resuming from the run directory if it exists",
        "job",
        (
            f"jaxdp train {DIGITS}",
            f"jaxdp train {DIGITS} --optimizer.lr 3e-4 --parallel.backend pjit",
            f"mpirun -np 2 jaxdp train {DIGITS}",
            f"jaxdp train {DIGITS} --check",
        ),
        {
            "check": Option(
                bool,
                "before a run, try all that it does in a temporary directory: two updates, evaluation, "
                "checkpoint, restore, and one batch, whose loss must fall",
            )
        },
        featured=3,
    ),
    "sweep": Verb(
        "train with several values of keys, several runs at once, and compare them",
        "runs",
        (
            f"jaxdp sweep {DIGITS} --optimizer.lr 1e-3,3e-3 --seed 0,1",
            f"jaxdp sweep {DIGITS} --optimizer.lr 1e-3,2e-3,3e-3 --batch_size 32,64,128 --sample 5 --jobs 2",
        ),
        {
            "jobs": Option(
                int,
                "runs at once; by default one for each GPU, without GPUs one for each core",
                least=1,
            ),
            "sample": Option(
                int, "train a random sample of this size; by default all combinations", least=1
            ),
            "sample_seed": Option(int, "the seed of the sample", 0),
            "metric": Option(str, "the metric that sorts the table", "loss"),
        },
        module="sweep.sweep",
    ),
    "eval": Verb(
        "evaluate a checkpoint of a run directory, by default the last",
        "job",
        (
            "jaxdp eval --run_dir runs/digits",
            "jaxdp eval --run_dir runs/digits --step 1380",
            "jaxdp eval --run_dir runs/digits --eval.ema true",
        ),
        {"step": STEP},
    ),
    "plan": Verb(
        "predict the memory, communication and time of a run on N devices, without them",
        "alone",
        (
            "jaxdp plan --config configs/gpt2_124m.yaml --devices 1024 --zero all",
            "jaxdp plan --config configs/llama_7b.yaml --devices 64 --memory 80GB --json",
            "jaxdp plan --config configs/gpt2_124m.yaml --target h100:8 --output plan.html",
        ),
        {
            "devices": Option(int, "the number of devices to plan for (8)", least=1),
            "target": Option(
                str,
                "devices to compile for by their own compiler: h100:8, h100:8x8 (hosts x devices), v5e:16x16",
            ),
            "zero": Option(str, "the ZeRO stage: 0 to 3, all, or the one of the config", "config"),
            "memory": Option(
                str, "memory of one device, such as 80GB; by default that of the hardware"
            ),
            "hardware": Option(
                str, "the name of a built-in hardware (h100-nvlink-ib400), or a YAML file"
            ),
            "network": Option(
                str, "between the sites of local updates (outer), such as 100mbit:40ms"
            ),
            "output": Option(
                str, "write a page with the schedule of the update, compiled for --target"
            ),
            "json": JSON,
        },
    ),
    "summary": Verb(
        "list the parameters of a model: paths, shapes, dtypes, sizes",
        "alone",
        (f"jaxdp summary {DIGITS}", "jaxdp summary --config configs/llama_7b.yaml --json"),
        {"json": JSON},
    ),
    "verify": Verb(
        "check that every layout reproduces single-device training",
        "alone",
        (
            f"jaxdp verify {DIGITS}",
            f"mpirun -np 2 jaxdp verify {DIGITS}",
            f"jaxdp verify {DIGITS} --exact",
            "jaxdp verify --config configs/gpt2_124m.yaml --verify.model_args '{layers: 2, dim: 64}' "
            "--verify.strategies 4",
        ),
        {
            "devices": Option(
                int,
                "simulate this many CPU devices if there are fewer real ones; under mpirun, use all",
                8,
                1,
            ),
            "updates": Option(int, "the number of updates to compare", 3, 1),
            "exact": Option(
                bool,
                "compare bits instead, with reduction: exact on 1, 2, 3 and all devices; under mpirun, on 1 and on all",
            ),
            "json": JSON,
        },
        featured=2,
    ),
    "report": Verb(
        "write a web page about one or several runs",
        "host",
        ("jaxdp report runs/digits runs/other", "jaxdp report runs/digits_sweep --metric accuracy"),
        {
            "out": Option(
                str, "the file to write; by default report.html in the run, or here for several"
            ),
            "metric": Option(
                str, "sort the runs by this metric and print a table; a sweep has its own"
            ),
        },
        {"run": "*"},
    ),
    "export": Verb(
        "write the parameters of a checkpoint for other programs",
        "host",
        (
            "jaxdp export --run_dir runs/digits",
            "jaxdp export --run_dir runs/digits --step 1380 --output digits.safetensors",
            "jaxdp export --run_dir runs/gpt2_124m --layout huggingface",
        ),
        {
            "run_dir": RUN_DIR,
            "output": Option(
                str, "by default export.safetensors, or huggingface, in the run directory"
            ),
            "step": STEP,
            "ema": Option(bool, "write the running average of the parameters instead"),
            "layout": Option(str, "jaxdp: a file; huggingface: a folder for transformers", "jaxdp"),
        },
    ),
    "sample": Verb(
        "generate text from a trained language model",
        "host",
        (
            'jaxdp sample --run_dir runs/python_gpt --prompt "def "',
            "jaxdp sample --run_dir runs/python_gpt --prompt 'class ' --tokens 400 --temperature 0.5",
        ),
        {
            "run_dir": RUN_DIR,
            "prompt": Option(str, "the text to continue", "\n"),
            "tokens": Option(int, "the number of tokens to generate", 256, 1),
            "temperature": Option(
                float, "logits are divided by it; 0 takes the most probable token", 0.8
            ),
            "top_k": Option(
                int, "sample from the k most probable tokens; by default from all", least=1
            ),
            "seed": Option(int, "seed of the sampling", 0),
            "step": STEP,
            "ema": Option(bool, "use the running average of the parameters"),
        },
    ),
    "data": Verb(
        "make shards of tokens from text (tokenize), or list what cannot be read (check)",
        "host",
        (
            "jaxdp data tokenize text.txt --output tokens --tokenizer gpt2",
            "jaxdp data tokenize a.txt b.jsonl --output tokens --tokenizer byte --split 0.05",
            "jaxdp data check pets",
            "jaxdp data check --config pets.yaml",
        ),
        {
            "output": Option(str, "the folder to make"),
            "config": Option(str, "check: the config whose data is read"),
            "tokenizer": Option(
                str, "byte, char, the path of a tokenizer.json, or a name of tiktoken", "gpt2"
            ),
            "split": Option(
                float, "the share at the end of each input that is for validation", 0.01
            ),
            "shard_tokens": Option(int, "tokens in a shard", 100_000_000, 1),
        },
        {"action": "?", "inputs": "*"},
    ),
    "rewind": Verb(
        "list the rows of an update, counted from 0, with the loss of each and its share of the gradient",
        "host",
        (
            "jaxdp rewind --run_dir runs/digits --step 700",
            "jaxdp rewind --run_dir runs/digits --around 700",
        ),
        {
            "run_dir": RUN_DIR,
            "step": Option(int, "the update", least=1),
            "around": Option(
                int, "those near this update whose loss stands out, or it and three before", least=1
            ),
        },
        module="rewind.rows_of_update",
    ),
    "predict": Verb(
        "predict the rows of a table with a run that was trained on one",
        "host",
        ("jaxdp predict --run_dir runs/churn --step best --data new.csv --output predicted.csv",),
        {
            "run_dir": RUN_DIR,
            "step": STEP,
            "data": Option(str, "the table: a CSV or Parquet file"),
            "output": Option(str, "the file to write: CSV, or .parquet", "predicted.csv"),
        },
        module="tables.predict",
    ),
    "confusion": Verb(
        "count how often a run takes each class for each, for the report",
        "host",
        ("jaxdp confusion --run_dir runs/digits",),
        {"run_dir": RUN_DIR, "step": STEP},
        module="measures.confusion",
    ),
    "doctor": Verb(
        "check this machine, and under mpirun all of a job's, before a run",
        "host",
        ("jaxdp doctor", "mpirun -np 2 jaxdp doctor --run_dir runs/digits"),
        {
            "run_dir": Option(str, "where the run is to go", "runs"),
            "json": JSON,
        },
        featured=2,
    ),
    "launch": Verb(
        "start the processes of a job on this host, and restart those that die",
        "host",
        (
            f"jaxdp launch --processes 2 train {DIGITS}",
            f"jaxdp launch --processes 4 --restart 5 train {DIGITS} --elastic.enabled true",
            "jaxdp launch --processes 2 python examples/allreduce.py",
        ),
        {
            "processes": Option(int, "the number of processes", 2, 1, ("-n",)),
            "restart": Option(
                int,
                "how many times a process that dies is started again, with a growing pause",
                0,
                0,
            ),
        },
        command=True,
    ),
}

# Verbs of earlier versions -> what to use instead.
REMOVED = {
    "profile": "jaxdp train --profile.start N writes a trace, which XProf (TensorBoard) and "
    "ui.perfetto.dev show",
}
