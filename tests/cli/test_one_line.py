"""What is wrong around a run (memory, a platform, a signal at the start, an argument) ends it in
one line.
"""

import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cli_runs import ended
from jaxdp import cli
from jaxdp.errors import RunFailed, UsageError, explained
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import JsonLines
from jaxdp.process.context import Context
from jaxdp.run.build import make_run, prepare_on_all_ranks
from jaxdp.run.callbacks import EarlyStopping
from jaxdp.run.start import advice
from launch import mpirun

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = ["--config", "configs/digits.yaml", "--epochs", "null", "--steps", "20"]
TRAIN = ["-m", "jaxdp", "train", *DIGITS]


def run(*argv, code, env=None):
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "XLA_FLAGS": "", **(env or {})},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def made(tmp_path, *more):
    """(the run of a config, the config, what the run was prepared with)"""
    config, _, _ = cli.load([*DIGITS, "--parallel.devices", "1", *map(str, more)])
    prepared = prepare_on_all_ranks(config, Context())
    return make_run(config, tmp_path, Context(), prepared=prepared), config, prepared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"])
@pytest.mark.parametrize("launch", [[], ["launch", "-n", "2"]])
def test_a_variable_that_jax_refuses_is_one_line(tmp_path, name, launch):
    """One of each process: they cannot join a job without JAX."""
    words = [*launch, "train", *DIGITS, "--run_dir", str(tmp_path / "run")]
    environment = os.environ | {name: "maybe"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and done.stderr.count("\n") == (2 if launch else 1)
    assert (
        name.lower() in done.stderr.lower() and "maybe" in done.stderr and "unset it" in done.stderr
    )


@pytest.mark.parametrize("bytes_", [10**15, 10**17])
def test_memory_that_there_is_not_is_one_line(bytes_):
    for allocate in (
        lambda: jax.jit(lambda: jnp.zeros(bytes_ // 4))(),
        lambda: np.ones(bytes_ // 8),
    ):
        with pytest.raises(Exception, match=r"(?i)allocat") as raised:
            jax.block_until_ready(allocate())
        found = explained(raised.value)
        assert isinstance(found, RunFailed) and "\n" not in str(found)
        assert (
            str(found).startswith("out of memory: ")
            and "parallel.remat" in str(found)
            and "plan" in str(found)
        )
    assert explained(ValueError("out of memory")) is None  # anybody's


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--config", "x: 3\n" * 100],
        ["report", "x" * 300],
        ["export", "--run_dir", "x" * 300],
        ["plan", *DIGITS, "--devices", 1, "--hardware", "x" * 300],
    ],
)
def test_a_path_that_is_too_long_is_one_line(argv):
    done = ended(*argv, code=2)
    assert done.stderr.startswith("jaxdp: '") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("' cannot be used: File name too long; give another path\n")


@pytest.mark.parametrize(
    ("argv", "name", "words"),
    [
        (
            ["train", *DIGITS],
            "checkpoints",
            "run_dir: cannot write in '{}': it is not a folder; choose another with ",
        ),
        (
            ["sweep", *DIGITS, "--seed", "0,1"],
            "",
            "run_dir: cannot write in '{}': it is not a folder; ",
        ),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path, argv, name, words):
    directory = tmp_path / "run"
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    done = ended(*argv, "--run_dir", directory, code=2)
    assert done.stderr.startswith(f"jaxdp: {words.format(file)}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["eval", "export", "sample", "report"])
def test_a_directory_that_is_no_run_is_named(tmp_path, verb):
    for directory in (tmp_path, tmp_path / "typo"):
        done = ended(verb, *["--run_dir"][: verb != "report"], directory, code=2)
        assert str(directory) in done.stderr and done.stderr.count("\n") == 1
        if verb == "eval":
            text = f"run_dir: no run in {str(directory)!r}; give the directory of a run, such as runs/digits"
            assert done.stderr == f"jaxdp: {text}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--run_dir: none given; e.g. jaxdp eval --run_dir runs/digits"),
        (["--eval.ema", "true"], "--run_dir: none given"),
        (["configs"], "command line: 'configs' belongs to no option; write --config configs"),
        (
            ["--rundir", "runs/digits"],
            "command line: unknown key 'rundir'; did you mean 'run_dir'?",
        ),
    ],
)
def test_an_evaluation_without_a_run_is_one_line(argv, words):
    assert ended("eval", *argv, code=2).stderr.startswith(f"jaxdp: {words}")


def test_a_run_directory_not_in_utf8_is_one_line(tmp_path):
    directory = tmp_path / "caf\udce9"
    done = ended("train", *DIGITS, "--run_dir", directory, code=2)
    assert (
        done.stderr.startswith(f"jaxdp: run_dir: {str(directory)!r} is not UTF-8, ")
        and done.stderr.count("\n") == 1
    )
    assert not directory.exists()


@pytest.mark.slow
def test_a_file_in_the_way_of_traces_stops_no_run(tmp_path):
    (tmp_path / "profile").touch()
    done = ended("train", *DIGITS, "--steps", 2, "--profile.start", 0, "--run_dir", tmp_path)
    text = "jaxdp: profile: no trace is written, and the run continues: [Errno 17] File exists: "
    assert done.stderr == f"{text}'{tmp_path / 'profile'}'\n" and "final 2/2" in done.stdout


PLATFORMS = [("cuda", "JAX_PLATFORMS: 'cuda'"), *(pytest.param(p, w, marks=pytest.mark.slow) for p, w in [
    ("tpu", "libtpu.so"), ("cpuu", "not in the list of known backends"), ("rocm", "known backends"),
])]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "words"), PLATFORMS)
def test_a_platform_that_there_is_not_is_one_line(tmp_path, platform, words):
    if jax.default_backend() != "cpu":
        pytest.skip("it may be there")
    done = run(*TRAIN, "--run_dir", tmp_path / "run", code=2, env={"JAX_PLATFORMS": platform})
    assert words in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_beyond_the_memory_is_one_line(tmp_path):
    done = run(*TRAIN, "--run_dir", tmp_path, "--model.args.hidden", "[1000000000000]", code=1)
    assert (
        "memory     " in done.stdout and " a device, without activations: parameters" in done.stdout
    )
    assert done.stderr.count("\n") == 1 and "out of memory: " in done.stderr


def interrupted(argv, number, code):
    """Its output, where the signal comes as soon as the command has blocked it, in the middle of
    its imports.
    """
    job = subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status = pathlib.Path(f"/proc/{job.pid}/status")

    def masks():
        return dict(
            line.split(":\t") for line in status.read_text().splitlines() if line.startswith("Sig")
        )

    while job.poll() is None and not any(
        int(masks()[m], 16) >> (number - 1) & 1 for m in ("SigBlk",)
    ):
        time.sleep(0.002)
    job.send_signal(number)
    out, err = job.communicate(timeout=100)
    assert job.returncode == code and "Traceback" not in err, (job.returncode, out, err)
    return out + err


@pytest.mark.parametrize("verb", ["eval", "plan", "doctor"])
def test_ctrl_c_in_the_imports_is_one_line(verb):
    options = (
        DIGITS if verb != "doctor" else []
    )  # it takes none of these, and would end with 2 before its imports
    said = interrupted(["-m", "jaxdp", verb, *options], signal.SIGINT, 130)
    assert said == "jaxdp: interrupted by Ctrl-C (SIGINT)\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_in_the_imports_preempts(tmp_path, name):
    said = interrupted([*TRAIN, "--run_dir", str(tmp_path)], getattr(signal, name), 75)
    assert (
        f"jaxdp: {name} before the first update: nothing to save; run the same command to start again\n"
        in said
    )


PYTHON = ["--data.target", "PythonSource", "--data.args", "{length: 8, max_mb: 0.1}"]
ARGUMENTS = {
    "model.args.hidden": ["32", "abc", "[1.5]", "[[3]]", "{a: 3}", "null"],
    "model.args.dropout": ["[1]", "true", "abc", "{a: 1}"],
    "data.args.augment": ["[1]", "3", "maybe"],
    "loss.args.label_smoothing": ["[1]", "x"],
    "loss.args.top_k": ["3", "[a]"],
    "optimizer.args.b1": ["[1]", "{a: 1}", "true", "x"],
    "optimizer.args.nesterov": ["[1]", "2"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in ARGUMENTS.items() for value in values]
)
def test_an_argument_of_another_type_is_named(tmp_path, key, value):
    with pytest.raises(UsageError, match=rf"^{key}: .* is (not|a text)"):
        made(tmp_path, f"--{key}", value)


@pytest.mark.parametrize(
    "more",
    [
        ["--model", "{target: CNN, args: {widths: 8}}"],
        ["--model", "{target: ViT, args: {dim: [1]}}"],
        ["--data.transform", "{target: Mixup, args: {classes: ten}}"],
        [
            "--loss",
            "{target: MultiTask, args: {tasks: {a: {target: SoftmaxCrossEntropy, args: {top_k: 3}}}}}",
        ],
    ],
)
def test_a_nested_argument_of_a_wrong_type_is_one_line(tmp_path, more):
    with pytest.raises(
        UsageError,
        match=r"args\.(widths|dim|classes|top_k): .* is not (a list of integers|an integer)",
    ):
        made(tmp_path, *more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model.args.dropout", "1.5"], "model.args.dropout: 1.5 is not in"),
        (["--model", "{target: CNN, args: {dropout: -1}}"], "model.args.dropout: -1 is not in"),
        (["--model.args.rngs", "3"], "model.args.rngs: leave it out"),
        (["--model.args.rngs", "null"], "model.args.rngs: leave it out"),
        (
            ["--model.args.input_shape", "[1]"],
            r"model: its arguments do not fit the data: .*\(64,\) and \(1,\)",
        ),
        (
            ["--model", "{target: GPT, args: {positions: rotary, rotary_base: 0}}", *PYTHON],
            "model.args.rotary_base: 0 must be greater than 0",
        ),
        (
            ["--model", "{target: GPT, args: {input_shape: [-1]}}"],
            "model.args.input_shape: .* is too short",
        ),
        (
            ["--data.transform", "{target: Mixup, args: {classes: -1}}"],
            "data.transform.args.classes: -1 must",
        ),
    ],
)
def test_an_argument_of_bad_range_or_shape_is_one_line(tmp_path, more, words):
    with pytest.raises(UsageError, match=f"^{words}"):
        made(tmp_path, *more)


def test_arguments_of_the_right_types_stand(tmp_path):
    more = ["--model.args.dropout", 0, "--loss.args.top_k", "[1, 3]", "--optimizer.args.b1", 0.5]
    made(tmp_path, *more, "--optimizer.args.mu_dtype", "bfloat16", "--model.args.hidden", "[]")


def lookahead(learning_rate):
    return optax.lookahead(optax.sgd(learning_rate), 5, 0.5)


def plateau(learning_rate):
    return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau())


def no_transformation(learning_rate):
    return optax.cosine_decay_schedule(learning_rate, 10)


def other_updates(learning_rate):
    return optax.GradientTransformation(
        lambda params: {}, lambda grads, state, params=None: ([1.0], state)
    )


def other_state(learning_rate):
    return optax.GradientTransformation(
        lambda params: {}, lambda grads, state, params=None: (grads, {"n": 1})
    )


def other_dtype(learning_rate):
    return optax.GradientTransformation(
        lambda params: np.zeros((), np.int32),
        lambda grads, state, params=None: (grads, state + 0.5),
    )


@pytest.mark.parametrize(
    "make",
    [lookahead, plateau, no_transformation, other_updates, other_state, other_dtype, optax.lbfgs],
)
def test_an_optimizer_that_cannot_be_called_is_named(tmp_path, make):
    name = f"{make.__module__}.{make.__name__}" if make is not optax.lbfgs else "optax.lbfgs"
    with pytest.raises(
        UsageError, match=rf"^optimizer.target: '{name}' (cannot be used|returns function)"
    ):
        made(tmp_path, "--optimizer.target", name, "--optimizer.weight_decay", 0)


def multi_steps(learning_rate):
    return optax.MultiSteps(optax.sgd(learning_rate), 2)


def test_a_wrapped_transformation_is_an_optimizer(tmp_path):
    made(tmp_path, "--optimizer.target", f"{__name__}.multi_steps", "--optimizer.weight_decay", 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--optimizer.warmup_steps", 21],
            r"optimizer.warmup_steps: 21, but the run ends after 20 updates: .* 95% of lr",
        ),
        (
            ["--optimizer.warmup_steps", 80],
            r"optimizer.warmup_steps: 80, but the run ends after 20 updates: .* 25% of lr",
        ),
        (
            ["--optimizer.schedule_steps", 10],
            r"optimizer.warmup_steps: 20, but optimizer.schedule_steps ends",
        ),
        (["--batch_size", 1438], "batch_size: 1438 is beyond the 1437 examples of the data"),
        (["--batch_size", 1437, "--optimizer.warmup_steps", 20], None),
    ],
)
def test_too_long_a_warm_up_or_batch_is_a_warning(tmp_path, more, words):
    base = ["--optimizer.warmup_steps", 20 if "schedule_steps" in more[0] else 0]
    found = [
        text
        for text in advice(*made(tmp_path, *base, *more))
        if "warmup" in text or "beyond" in text
    ]
    assert len(found) == (words is not None) and all(re.match(words, text) for text in found), found


@pytest.mark.parametrize(
    ("steps", "warmup", "first"), [(300, 3, 61), (70, 3, 61), (300, 0, 61), (60, 3, None)]
)
def test_updates_behind_the_schedule_are_counted(tmp_path, steps, warmup, first):
    """Also where the first rate of the warm-up is that of the end, 0."""
    more = ["--optimizer.schedule_steps", 60, "--optimizer.warmup_steps", warmup, "--steps", steps]
    found = [x for x in advice(*made(tmp_path, *more)) if "the learning rate" in x]
    said = f"updates {first} to {steps} have the learning rate 0 (0% of lr), which changes no param"
    assert len(found) == (first is not None) and all(said in text for text in found), found


@pytest.mark.parametrize(
    ("shape", "keys"),
    [("constant", ["final_lr"]), ("cosine", []), ("one_cycle", ["final_lr", "warmup_steps"])],
)
def test_a_key_the_schedule_does_not_use_is_a_warning(tmp_path, shape, keys):
    more = [
        "--optimizer.schedule",
        shape,
        "--optimizer.final_lr",
        0.1,
        "--optimizer.warmup_steps",
        5,
    ]
    found = [
        re.match(r"optimizer\.(final_lr|warmup_steps)", text)
        for text in advice(*made(tmp_path, *more))
    ]
    assert [x[1] for x in found if x] == keys


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--optimizer.schedule_steps", 12],
            r"schedule_steps: 12: updates 13 to 20 have .* rate 0 \(0% of lr\), which changes",
        ),
        (
            ["--optimizer.schedule", "sgd_rates.quits"],
            r"schedule: sgd_rates.quits: updates 6 to 20 have .* rate 0 .* end with the run",
        ),
        (
            ["--optimizer.target", "sgd_rates.own"],
            r"lr: 0.002 and its schedule have no effect: sgd_rates.own has a rate of its own",
        ),
        (
            ["--optimizer.schedule_steps", 12, "--optimizer.final_lr", 0.25],
            r"schedule_steps: 12: updates 13 to 20 .* 0.0005 \(25% of lr\); set",
        ),
        (
            ["--optimizer.schedule_steps", 12, "--optimizer.schedule", "linear"],
            r"schedule_steps: 12: updates 13 to 20 have .* rate 0 ",
        ),
        (
            ["--optimizer.schedule_steps", 12, "--optimizer.schedule", "one_cycle"],
            r"schedule_steps: 12: updates 13 to 20 have",
        ),
        (
            ["--optimizer.schedule_steps", 12, "--optimizer.warmup_steps", 3],
            r"schedule_steps: 12: updates 13 to 20 have",
        ),
        (
            ["--optimizer.schedule_steps", 12, "--epochs", 2, "--steps", "null"],
            r"schedule_steps: 12: updates 13 to 46 have",
        ),
        (["--optimizer.schedule_steps", 12, "--optimizer.schedule", "constant"], None),
        (["--optimizer.schedule_steps", 20], None),
        (["--optimizer.schedule_steps", 40], None),
        (
            [
                "--optimizer.schedule",
                "optax.exponential_decay",
                "--optimizer.schedule",
                "sgd_rates.falls",
            ],
            None,
        ),
        (["--optimizer.schedule_steps", 5, "--optimizer.target", "sgd_rates.four_to_one"], None),
    ],
)
def test_a_rate_that_misses_some_updates_is_a_warning(tmp_path, more, words, monkeypatch):
    (tmp_path / "sgd_rates.py").write_text(RATES)
    monkeypatch.syspath_prepend(tmp_path)
    base = [
        "--optimizer.lr",
        0.002,
        "--optimizer.warmup_steps",
        0,
        "--steps",
        20,
        "--epochs",
        "null",
    ]
    base += ["--optimizer.weight_decay", 0]
    found = [
        text
        for text in advice(*made(tmp_path, *base, *more))
        if re.match(r"optimizer\.(schedule|lr)", text)
    ]
    assert len(found) == (words is not None) and all(
        re.match(rf"optimizer\.{words}", text) for text in found
    ), found


RATES = """
import jax.numpy as jnp, optax

def quits(lr, steps):
    return lambda i: jnp.where(i < 5, lr, 0.0)

def falls(lr, steps):
    return lambda i: lr / (1 + i)

def own(learning_rate):
    return optax.sgd(0.1)

def four_to_one(learning_rate):
    return optax.MultiSteps(optax.sgd(learning_rate), 4)
"""


@pytest.mark.parametrize(
    "target, args", [("MLP", "hidden: [0]"), ("CNN", "widths: [8, 0]"), ("ResNet9", "width: 0")]
)
def test_a_width_of_0_is_one_line(tmp_path, target, args):
    with pytest.raises(
        UsageError, match=r"model\.args\.\w+: 0 is too small; it must be at least 1"
    ):
        made(tmp_path, "--model.target", target, "--model.args", f"{{{args}}}")


@pytest.mark.parametrize("target", ["CNN", "ResNet9", "ViT"])
def test_images_without_channels_are_one_line(tmp_path, target):
    np.savez(
        tmp_path / "gray.npz", inputs=np.zeros((20, 8, 8), np.float32), labels=np.arange(20) % 2
    )
    model = ["--model.target", target, "--model.args", "{dropout: 0}"]
    with pytest.raises(
        UsageError,
        match=r"model.args.input_shape: \(8, 8\) is not \(height, width, channels\); add",
    ):
        made(tmp_path, *model, "--data", f"{{target: Npz, args: {{path: {tmp_path}/gray.npz}}}}")


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_carried_state_in_shuffled_order_is_a_warning(tmp_path, order):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 99)
    more = [
        "--model.target",
        "LSTM",
        "--model.args",
        "{dim: 8, hidden: 8}",
        "--loss.target",
        "CausalLM",
    ]
    more += [
        "--data.target",
        "TextFile",
        "--data.args",
        f"{{path: {text}, length: 8}}",
        "--data.order",
        order,
    ]
    found = [line for line in advice(*made(tmp_path, *more)) if "carries state" in line]
    assert len(found) == (order == "shuffled"), found


def test_sequential_order_refuses_windows_with_gaps(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh" * 99)
    more = [
        "--model.target",
        "LSTM",
        "--model.args",
        "{dim: 8, hidden: 8}",
        "--loss.target",
        "CausalLM",
    ]
    more += [
        "--data.target",
        "TextFile",
        "--data.args",
        f"{{path: {tmp_path}/text.txt, length: 8, stride: 1}}",
    ]
    with pytest.raises(
        UsageError, match=r"data.args.stride: 1: windows do not .* set it to length: 8"
    ):
        made(tmp_path, *more)
    made(tmp_path, *more, "--data.order", "shuffled")


@pytest.mark.parametrize(
    "model",
    [
        "{target: GPT, args: {layers: 1, heads: 2, dim: 16}}",
        "{target: LSTM, args: {dim: 8, hidden: 8}}",
    ],
)
@pytest.mark.quick(2)
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_segments_the_model_does_not_use_are_a_warning(tmp_path, model, accumulate):
    (tmp_path / "text.jsonl").write_text('{"text": "abcdefgh"}\n' * 99)
    more = [
        "--model",
        model,
        "--loss.target",
        "CausalLM",
        "--data.target",
        "Documents",
        "--parallel.accumulate",
    ]
    more += [
        accumulate,
        "--data.args",
        f"{{path: {tmp_path}/text.jsonl, length: 16}}",
        "--data.order",
        "shuffled",
    ]
    found = [line for line in advice(*made(tmp_path, *more)) if "segments" in line]
    assert len(found) == ("LSTM" in model), found


@pytest.mark.parametrize(
    ("every", "best", "callbacks", "words"),
    [
        (
            "null",
            "loss",
            [],
            "eval.every: null gives checkpoint.best only one evaluation; set it below 20",
        ),
        (
            20,
            "null",
            [EarlyStopping()],
            "eval.every: 20 gives EarlyStopping only one evaluation; set it below 20",
        ),
        (19, "loss", [EarlyStopping()], None),
        ("null", "null", [], None),
    ],
)
def test_evaluating_only_at_the_end_may_be_a_warning(tmp_path, every, best, callbacks, words):
    run, config, prepared = made(tmp_path, "--eval.every", every, "--checkpoint.best", best)
    found = [text for text in advice(run, config, prepared, 0, callbacks) if "eval.every" in text]
    assert len(found) == (words is not None) and all(text.startswith(words) for text in found), (
        found
    )


@pytest.mark.parametrize("act", ["removed", "moved", "file"])
def test_metrics_that_would_be_lost_end_the_run(tmp_path, act):
    (tmp_path / "run").mkdir()
    lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
    lines.write({"step": 1, "split": "train"})
    if act == "removed":
        shutil.rmtree(tmp_path / "run")
    elif act == "moved":
        (tmp_path / "run").rename(tmp_path / "other")
    else:
        lines.path.unlink()
    with pytest.raises(RunFailed, match=r"metrics\.jsonl' was removed or replaced"):
        lines.write({"step": 2, "split": "train"})
    lines.close()


def test_lines_that_are_no_records_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    steps = ['"a"', "null", "1.5", "1", "2", "9"]
    file.write_text("".join(f'{{"step": {step}, "split": ["x"]}}\n' for step in steps))
    JsonLines(file, 5).close()
    assert file.read_text().splitlines() == [
        f'{{"step": {step}, "split": ["x"]}}' for step in (1, 2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.mpi)])
@pytest.mark.parametrize(
    "more", [["--log.every", "50"], ["--log.every", "90000", "--checkpoint.every", "500"]]
)
def test_a_removed_run_directory_ends_all_ranks(tmp_path, processes, more):
    folder = tmp_path / "run"

    def remove(process):
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            time.sleep(0.05)
        folder.rename(tmp_path / "moved")

    argv = [*TRAIN, "--steps", "100000", "--eval.every", "100", "--run_dir", str(folder), *more]
    done = mpirun(processes, argv, during=remove, timeout=100)
    assert done.returncode == 1 and not done.left and not folder.exists(), done.output
    assert done.output.count("was removed or replaced while the run was going on") >= 1


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {**ASCII, "PYTHONIOENCODING": "cp1252"}]
)
def test_no_command_fails_for_encoding_or_locale(tmp_path, env):
    directory = tmp_path / "Ω"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(
        '{"step": 1, "split": "train", "loss": 1.0, "time": 1.0}\n'
    )
    done = run("-m", "jaxdp", "report", directory, code=0, env=env)
    assert (directory / "report.html").is_file() and "1 run" in done.stdout
    (tmp_path / "config.yaml").write_text(
        "run_dir: Ω\nsteps: 1\nmodel: {target: Ω}\n", encoding="utf-8"
    )
    done = run(
        "-m",
        "jaxdp",
        "train",
        "--config",
        tmp_path / "config.yaml",
        "--eval.every",
        "Ω",
        code=2,
        env=env,
    )
    assert done.stderr.startswith("jaxdp: eval.every: '\\u") and done.stderr.count("\n") == 1


def test_a_line_of_a_script_is_printed_in_any_encoding(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, "ascii"))
    safe_print.say("a Ω")
    safe_print.escape()
    print("a Ω \udcff", flush=True)
    assert buffer.getvalue() == b"a ?\na \\u03a9 \\udcff\n"
