"""The size of the package: what a newcomer has to read. A number here only falls, or a change says why it rises."""

import ast
import pathlib
import re
import traceback

import jax
import numpy as np
from flax import nnx

import jaxdp
import toys
from jaxdp.models import as_model

ROOT = pathlib.Path(jaxdp.__file__).parent
# 30,643; less 1,370: pretended hosts and traced programs in verify, help of our own, limits of YAML, prefetching of
# token files, extrapolated plans. Then 950: checkpoints of hosts that share nothing 220, 4,096 processes 130, what fit
# returns, summaries of models and .npz 430, the report of several runs, media and git 170. Then 73 less, and 200 more:
# processes forked after one import 70, survivors that are busy 30, snapshots of the same update 20, model state of any
# dtype and 16-bit losses 97. Then a kernel's gradient as one product 57, `outer.reduction` and JAX 0.12 18. Then 105:
# sown values that are losses 26, int64 that only some examples need 17, the usual lowering after a run 20, models that
# would fail later or disagree 24, sums of 16-bit gradients and batches without weight 13.
# Then 89: survivors that are busy when the coordinator dies 30, joiners and hanging loaders that end alone 30, launch
# 19, damaged files of a report 10. Then 130 that
# turn a traceback, or a mistake without a message, into a line each. Then 105 less for a simpler
# doctor, and 18 for the start and the data sets of an evaluation. Then 440 less: indirections, and what the standard
# library does. Then 340 less: the objects of a script are compared by the programs that JAX traces of them.
# Then 48: ranks that cannot take part are named to all, and a save that is made again has a folder of its own.
# Then 5: small arrays are saved whole, and a rank waits for the one that prints for it.
# Then 24: int64 in a mixture, traces that cannot be written, an infinite timeout, a key's line. Then 80 less: one
# report of a verification for errors and for bits. Then 32: what `outer` sends and refuses, and what `plan` says of it;
# 3: coordinators that come and go refuse nobody. Then 58: numbers, types and data that own loops and data sets had
# changed, dropped or read wrongly in silence.
# Then 258: what verify judges (evaluation, schedules, numbers of processes, models in bfloat16) 113; what a checkpoint,
# a resume or a finished run forgot of callbacks and evaluations 60; the command line and sweeps 30; data that means
# something else 26; numbers of plan, losses and models 26; one test of what is a random key 3.
# Then 45: products of narrow floats that are not rounded 9, muon's second rate 7, data that a model cannot use as it is
# (windows, segments, images without channels, invalid labels under Mixup, a missing test split) 29.
# Then 34: audits of runs that resume or end early 15, stages that plan leaves out 12, traces and first collectives of
# several ranks 19, what doctor, launch and export overlooked 8; less 20, since a loop names its length.
# Then 57: elastic jobs that lost a message of Gloo, their generation or all their processes, or that ended while one
# waited 42; groups of shard_size and copies of replicas for the devices that are left 10; callbacks of a script 5.
# Then 46: records that rank 0 of an elastic job had not written when it was lost, and the time since its last save, 41;
# names and numbers that ended in a traceback 5.
# Then 100: arguments of the five calls, of the eager collectives and of jaxdp.lax that ended in a traceback, or were
# taken in silence (weights that are none, metrics that overflow, a state of another byte order or another on each
# rank) 80; records of an update that failed on rank 0 alone 15; devices that are opened together 5.
# Then 29: a connection that breaks between live processes of an elastic job 24; one that hangs ends 5.
# Then 92: a process builds its run before it joins an elastic job 74, and one interruption for several (join_after) 18.
# Then 58: arguments of init and ranks that end early, in a script, are named in a line; launch knows an elastic job.
# Then 9: a long metrics file is read from its end: an elastic job recovers as fast after days as at first. Then 2:
# platforms that JAX cannot open, in `init`. Then 21: runs of a sweep with other data or another evaluation, and those
# that an audit has named, are not shown as equal 18; a job with fewer processes than it needs 3; mpirun as root 2. Then
# 25: what a stage of `plan` needs, sweeps in a report, errors that name the key of an evaluation or an option.
# Then 8: `overwrite` in a job that `launch` starts again, and a generation of one process that others join.
# Then 21: shapes of the state kept over generations 6; the interval of snapshots from more copies, since a pause made
# it 1 in one of three jobs, 7; the loss of a final record that another process writes 8. Then 5: measurements of slow
# devices took ten seconds of the start of each job.
BUDGET = {"package": 30_844, "file": 300, "function": 60, "one update": 700}  # lines
ONE_UPDATE = ("core/step.py", "parallel/strategy.py", "parallel/pjit.py", "training/loop.py")
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS = {
    "models/gpt.py __init__": 62,
}
PARAMETERS = 8  # of a function, without self; fields of a record count as those of its constructor
MANY_PARAMETERS = {
    # Sections of the config, and functions whose arguments are keys of the config: each is set by its name.
    "config/__init__.py Config": 29,
    "config/training.py Optimizer": 13,
    "config/training.py Parallel": 12,
    "api.py fit": 9,
    "models/gpt.py GPT": 17,
    "data/token_file.py TokenFile": 9,
    # Records of facts.
    "analysis/hardware.py Hardware": 11,
    "audit/inject.py Fault": 14,
    "core/state.py TrainState": 9,
    "distributed/protocol.py Settings": 12,
    "distributed/world.py Variables": 9,
}


def lines():
    files = {f.relative_to(ROOT).as_posix(): f.read_text() for f in ROOT.rglob("*.py")}
    assert len(files) > 100
    return {name: len(text.splitlines()) for name, text in files.items()}


def test_the_package_and_its_files_stay_small():
    sizes = lines()
    assert sum(sizes.values()) <= BUDGET["package"]
    assert sum(sizes[name] for name in ONE_UPDATE) <= BUDGET["one update"]
    assert not {name: n for name, n in sizes.items() if n > LONG_FILES.get(name, BUDGET["file"])}
    assert all(sizes[name] > BUDGET["file"] for name in LONG_FILES)  # an exception ends with its cause


def test_functions_stay_short():
    longest = {}
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                name = f"{file.relative_to(ROOT).as_posix()} {node.name}"
                longest[name] = max(longest.get(name, 0), node.end_lineno - node.lineno + 1)
    assert len(longest) > 1000
    assert not {name: n for name, n in longest.items() if n > LONG_FUNCTIONS.get(name, BUDGET["function"])}
    assert all(longest[name] > BUDGET["function"] for name in LONG_FUNCTIONS)


def parameters():
    """{file and name: number of parameters} of functions and constructors; `rngs` of a Flax module is no setting."""
    numbers = {}
    for file in ROOT.rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                record = {"NamedTuple", "struct.PyTreeNode"} & {ast.unparse(base) for base in node.bases}
                if record or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                    numbers[f"{name} {node.name}"] = sum(isinstance(x, ast.AnnAssign) for x in node.body)
            for f in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
                if isinstance(f, ast.FunctionDef):
                    arguments = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
                    count = sum(x.arg not in ("self", "cls", "rngs") for x in arguments)
                    key = f"{name} {node.name if f.name == '__init__' else f.name}"
                    numbers[key] = max(count, numbers.get(key, 0))
    return numbers


def test_functions_have_few_parameters():
    numbers = parameters()
    assert len(numbers) > 1000
    assert not {name: n for name, n in numbers.items() if n > MANY_PARAMETERS.get(name, PARAMETERS)}
    assert all(numbers[name] > PARAMETERS for name in MANY_PARAMETERS)  # an exception ends with its cause


def test_from_an_update_to_the_module_in_eight_calls_and_four_files():
    frames = []

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(int(np.prod(toys.SHAPE)), toys.CLASSES, rngs=rngs)

        def __call__(self, x):
            files = [pathlib.Path(frame.filename) for frame in traceback.extract_stack()]
            frames.append([f.relative_to(ROOT).as_posix() for f in files if f.is_relative_to(ROOT)])
            return self.out(x.reshape(len(x), -1))

    settings = {"backend": "pjit", "devices": 2, "layout": {"zero": 3}}
    strategy, step, batch = toys.build(as_model(Net), toys.data(), **settings)
    state, program = strategy.init(), strategy.compile(step)
    frames.clear()
    jax.block_until_ready(program.update(state, batch(0)))
    assert frames and frames[0][0] == "parallel/pjit.py"
    assert max(len(f) for f in frames) <= 8 and max(len(set(f)) for f in frames) <= 4


def test_private_jax_is_named_in_one_file():
    private = re.compile(r"jax\._src|jaxlib\._|from jaxlib import|import jaxlib\.")
    lines = {f: [*filter(private.search, f.read_text().splitlines())] for f in ROOT.rglob("*.py")}
    assert {f.relative_to(ROOT).as_posix() for f, found in lines.items() if found} == {"distributed/private_jax.py"}


def test_the_backend_chooses_a_formula_in_one_file():
    """The others ask for other reasons: the transport between processes, cuDNN, buffers of the host, devices, cache."""
    others = ["parallel/__init__", "optim/zero", "distributed/kernels", "models/attention", "checkpoint/store"]
    others += ["checkpoint/local", "distributed/private_jax", "supervise/generations"]
    asking = {f.relative_to(ROOT).as_posix() for f in ROOT.rglob("*.py") if "default_backend()" in f.read_text()}
    assert asking == {"cpu.py", "cli/verify.py", *(f"{name}.py" for name in others)}


def test_a_reduction_is_named_in_at_most_four_files():
    for name in ("exact", "exact8", "exact16", "bucket"):
        named = re.compile(rf"(reduction|FORMATS|REDUCTIONS|bits)\b.*[\"']{name}[\"']")
        files = [f.relative_to(ROOT).as_posix() for f in ROOT.rglob("*.py") if named.search(f.read_text())]
        assert 1 <= len(files) <= 4, (name, files)
