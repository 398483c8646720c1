"""Local updates in a config: what is planned, refused, evaluated and counted."""

import re

import pytest

import toys
from averaging import FREE, Plain, fit, loss_of
from checks import check_figures
from cli_runs import DIGITS
from jaxdp.cli import load
from jaxdp.config import Config, Outer
from jaxdp.errors import UsageError
from jaxdp.extras import extras_of
from jaxdp.metrics.numbers import size
from launch import in_process
from plain_runs import fit as fit_plain
from plain_runs import make_run
from planning import run


@pytest.mark.slow
def test_flops_and_bytes_do_not_depend_on_the_sums():
    check_figures("--outer.replicas", "4", "--outer.every", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "each"),
    [
        (["--parallel.reduction", "exact", "--precision.params", "bfloat16"], 4),
        (["--parallel.reduction", "exact", "--outer.reduction", "exact8"], 1),
        (["--outer.reduction", "exact16"], 2),
        (["--precision.params", "bfloat16"], 2),
        (["--optimizer.frozen", "[layers]"], 4 * 170 / 1210),
    ],
    ids=str,
)
def test_a_site_sends_trained_parameters_in_its_bytes(more, each):
    """Two sites send all of it once; an MLP of 1,210 parameters, of which 170 are the head's."""
    argv = [
        "--model.args.hidden",
        "[16]",
        "--devices",
        "2",
        "--outer.replicas",
        "2",
        "--outer.every",
        "5",
        *more,
    ]
    done = run("--epochs", "null", "--steps", "10", *argv, config="digits")
    assert done.returncode == 0, done.stderr
    (sent,) = re.findall(r"2 sites: each sends (\S+ k?B) once in 5 updates", done.stdout)
    assert sent == size(1210 * each), done.stdout


def test_a_plan_has_stage_0_only():
    argv = ["--zero", "all", "--outer.replicas", "2"]
    done = in_process("plan", "--config", "configs/digits.yaml", *argv)
    words = "--zero: all, but a run with outer.replicas has stage 0 only"
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


def test_replicas_with_such_an_optimizer_are_refused():
    with pytest.raises(
        UsageError, match=r"outer.replicas: 2 .* which evaluates other parameters than it trains"
    ):
        fit(Plain, FREE(), outer={"replicas": 2, "every": 2})


@pytest.mark.slow
def test_a_schedule_free_outer_optimizer_is_evaluated(tmp_path):
    outer = {
        "replicas": 2,
        "every": 2,
        "optimizer": {"target": "optax.contrib.schedule_free_sgd", "lr": 0.7, "args": {"b1": 0.6}},
    }
    trained = fit(Plain, {"target": "sgd", "lr": 0.1}, run_dir=tmp_path / "run", outer=outer)
    assert trained.final["loss"] == pytest.approx(loss_of(trained.params), rel=1e-5)


@pytest.mark.parametrize(
    "every, lost", [(4, "the last 2 updates came after the last outer step"), (3, ""), (1, "")]
)
def test_updates_without_an_outer_step_are_counted(tmp_path, every, lost):
    """The data may end between two outer steps."""
    outer = Config(outer=Outer(replicas=2, every=every))
    run = make_run(tmp_path, toys.MODELS["mlp"](), extras=extras_of(outer))
    fit_plain(run)
    said = "\n".join(run.log.writer.said)
    assert lost in said and ("outer step" in said) == bool(lost)


def test_states_between_two_outer_steps_are_refused():
    argv = ["--spike.factor", "20", "--spike.action", "rollback", "--spike.every", "4"]
    with pytest.raises(
        UsageError, match=r"spike.every: 4 is no multiple of outer.every: 3, .*; set it to 6"
    ):
        load([*DIGITS, *argv, "--outer.replicas", "2", "--outer.every", "3"])
