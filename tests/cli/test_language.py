"""Language models by the command: an LSTM that carries its state across processes, texts, packed
documents, samples.
"""

import functools
import json
import re

import numpy as np
import pytest

from jaxdp.models import MODELS
from jaxdp.models.gpt import GPT as GPTModule
from launch import mpirun
from texts import GPT, check_sample, jaxdp, records

WORDS = ["the", "cat", "dog", "saw", "a", "ran", "to", "big", "red", "<unk>"]


@pytest.fixture(scope="module")
def treebank(tmp_path_factory):
    """Files as those of the Penn Treebank: what follows a word is one of two, so there is something
    to learn.
    """
    folder, rng = tmp_path_factory.mktemp("ptb"), np.random.default_rng(0)
    for name, lines in (("train", 45), ("valid", 12), ("test", 12)):
        text = []
        for _ in range(lines):
            word, line = int(rng.integers(len(WORDS))), []
            for _ in range(int(rng.integers(4, 12))):
                line.append(WORDS[word])
                word = (3 * word + int(rng.integers(2))) % len(WORDS)
            text.append(f" {' '.join(line)} \n")
        (folder / f"ptb.{name}.txt").write_text("".join(text))
    return folder


LSTM = """
model: {{target: {model}, args: {{dim: 12, hidden: 16, layers: 2}}}}
data: {{target: PennTreebank, args: {{root: {root}, length: 7}}}}
loss: {{target: CausalLM}}
epochs: 5
batch_size: 6
microbatches: 4
optimizer: {{target: adamw, lr: 3.0e-2, clip_norm: 0.5}}
eval: {{every: 40}}
log: {{every: 1}}
precision: {{params: float64}}
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("model", ["LSTM", "RNN"])
def test_a_recurrent_state_is_carried_across_processes(treebank, tmp_path, model):
    """One process and two have one curve, in training and in evaluation, and it falls."""
    config = tmp_path / "lstm.yaml"
    config.write_text(LSTM.format(model=model, root=treebank))
    train = ["train", "--config", str(config), "--run_dir"]
    jaxdp(*train, tmp_path / "one")
    two = mpirun(2, ["-m", "jaxdp", *train, str(tmp_path / "two"), "--parallel.backend", "pjit"])
    assert two.returncode == 0, two.output
    for split in ("train", "eval", "final"):
        one, other = (records(tmp_path / name, split) for name in ("one", "two"))
        assert [r["step"] for r in one] == [r["step"] for r in other] and one
        for key in ("loss", "perplexity"):
            np.testing.assert_allclose([r[key] for r in other], [r[key] for r in one], rtol=1e-9)
    curve = [r["perplexity"] for r in records(tmp_path / "one")]
    final = records(tmp_path / "one", "final")[0]
    assert (
        curve[0] > 9
        and np.mean(curve[-5:]) < 0.5 * curve[0]
        and final["perplexity"] < 0.7 * curve[0]
    )
    assert final["perplexity"] == pytest.approx(np.exp(final["loss"]), rel=1e-12)
    text = jaxdp("sample", "--run_dir", tmp_path / "one", "--prompt", "the cat", "--tokens", 12)
    assert (
        text.startswith("the cat ")
        and set(text.split()) <= {*WORDS, "<eos>"}
        and len(text.split()) >= 10
    )


@pytest.mark.slow
def test_a_sample_goes_on_as_the_text_does(tmp_path, monkeypatch):
    sample = check_sample(tmp_path)
    drawn = [
        jaxdp(*sample, "--prompt", "a", "--tokens", 9, "--temperature", 9, "--seed", s)
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and set(drawn[0]) <= set("abcdefgh\n")
    assert "'x'" in jaxdp(*sample, "--prompt", "abx", code=2)
    assert "--prompt: '' has no tokens" in jaxdp(*sample, "--prompt", "", code=2)
    assert "--top_k: 0 is too small" in jaxdp(*sample, "--top_k", 0, code=2)
    assert "--step: 7 is not in" in jaxdp(*sample, "--step", 7, code=2)
    monkeypatch.setitem(
        MODELS, "GPT", functools.partial(GPTModule, hidden=7)
    )  # as code that has changed
    line = jaxdp(*sample, code=2)
    assert re.match(
        r"jaxdp: --run_dir: '.*' has no '\S+' \[.*\]: the code of the model has changed",
        line,
    )


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other(tmp_path):
    """What follows a document's begin is learned from its own tokens: the order of documents tells
    nothing.
    """
    rng = np.random.default_rng(0)
    kinds = ["aaaaa", "bbbbb", "ccccc"]
    text = "\n".join(json.dumps({"text": kinds[k]}) for k in rng.integers(3, size=300))
    (tmp_path / "text.jsonl").write_text(text)
    data = (
        f"{{target: Documents, args: {{path: {tmp_path}/text.jsonl, tokenizer: char, length: 24}}}}"
    )
    (tmp_path / "gpt.yaml").write_text(GPT.format(data=data, steps=120))
    jaxdp("train", "--config", tmp_path / "gpt.yaml", "--run_dir", tmp_path / "run", devices=2)
    assert records(tmp_path / "run", "final")[0]["loss"] < 0.05


@pytest.mark.slow
def test_a_run_without_text_has_nothing_to_sample(tmp_path):
    jaxdp("train", "--config", "configs/digits.yaml", "--epochs", 1, "--run_dir", tmp_path / "run")
    line = jaxdp("sample", "--run_dir", tmp_path / "run", code=2)
    assert re.fullmatch(
        r"jaxdp: --run_dir: '.*' was not trained on text with a tokenizer; name another\n", line
    )
