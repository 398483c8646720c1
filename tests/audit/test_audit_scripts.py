"""The benchmark of the audit at its smallest."""

import re

import pytest

from scripts import HIDDEN, run_script, runs


@pytest.fixture
def script():
    return run_script


@runs("audit")
def test_audit(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    result = script("audit", "flips", "--flips", 1, "--part", 1, *words)[-1]
    verdicts = [name for name in result if re.match(r"(grads|output|params|opt_state): ", name)]
    assert result["mode"] == "flips" and [result[name] for name in verdicts] == [1]


@pytest.mark.slow
def test_the_cost_of_an_audit(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    [result] = script("audit", "cost", "--updates", 4, *words)
    assert result["audit_ms"] > 0 and result["update_ms"] > 0 and result["every"] == 2


@pytest.mark.slow
def test_audit_of_an_undisturbed_run(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    [result] = script("audit", "alarms", "--updates", 4, *words)
    assert (
        result["audits"] == 2
        and [event["kind"] for event in result["named"]].count("audit_failed") == 0
    )
