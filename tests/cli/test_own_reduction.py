"""A reduction of one's own: the page's example trains to the bits of the built-in one, and mistakes
are one line.
"""

import pathlib
import re

import pytest

from cli_runs import ended, jaxdp, records, write
from jaxdp.errors import UsageError
from jaxdp.run.components import make_reduction

ROOT = pathlib.Path(__file__).parents[2]
(CODE,) = re.findall(
    r"```python\n(# counted.py.*?)```", (ROOT / "docs/exact.md").read_text(), re.DOTALL
)
CONFIG = """
model: {target: MLP, args: {hidden: [16]}}
data: {target: Digits}
steps: 5
batch_size: 64
"""


@pytest.mark.slow
def test_the_example_trains_as_the_reduction_it_wraps(tmp_path):
    (tmp_path / "counted.py").write_text(CODE)
    argv, env = (
        ["--config", write(tmp_path, CONFIG), "--parallel.reduction"],
        {"PYTHONPATH": str(tmp_path)},
    )
    jaxdp(
        *argv,
        "counted.counted",
        "--run_dir",
        tmp_path / "own",
        "--log.every",
        1,
        env=env,
        devices=4,
    )
    jaxdp(*argv, "xla", "--run_dir", tmp_path / "xla", devices=4)
    found = {record["gradient_bytes"] for record in records(tmp_path / "own", "train")}
    assert found == {4 * 1210}  # the gradients of the MLP, of 4 bytes each
    finals = [records(tmp_path / name, "final")[0]["params_sha256"] for name in ("own", "xla")]
    assert finals[0] == finals[1]


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "bukcet",
            "parallel.reduction: 'bukcet' is neither built in nor a dotted path; did you mean 'bucket'",
        ),
        ("optax.sgd", "parallel.reduction.args.learning_rate: sgd needs it"),
        (
            "builtins.dict",
            "parallel.reduction: 'builtins.dict' must return a jaxdp.parallel.reduction.Reduction",
        ),
        ("jaxdp.parallel.pjit.PJit", "parallel.reduction.args.make: PJit needs it"),
    ],
)
def test_what_is_no_reduction_is_refused(name, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        make_reduction(name)


def test_a_misspelled_one_ends_with_code_2(tmp_path):
    done = ended(
        "train", "--config", write(tmp_path, CONFIG), "--parallel.reduction", "exat", code=2
    )
    assert (
        done.stderr.startswith("jaxdp: parallel.reduction: 'exat' is neither")
        and done.stderr.count("\n") == 1
    )
