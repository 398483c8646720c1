"""Small GPTs on texts: trained in processes of their own, sampled in this one."""

import json

from launch import in_process, processes


def jaxdp(*argv, code=0, devices=1):
    """Run the command; `sample`, which needs no devices, in this process."""
    if argv[0] == "sample":
        done = in_process(*argv)
    else:
        done = processes(["-m", "jaxdp", *map(str, argv)], [{}], timeout=300, devices=devices)[0]
    assert done.returncode == code, done.output
    return done.stdout if not code else done.stderr


def records(run_dir, split="train"):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


GPT = """
model: {{target: GPT, args: {{layers: 1, heads: 2, dim: 32}}}}
data: {data}
loss: {{target: CausalLM}}
steps: {steps}
batch_size: 8
optimizer: {{target: adamw, lr: 1.0e-2}}
eval: {{every: null}}
"""


def check_sample(tmp_path, *more):
    """Train a small GPT on a text, and let it continue a prompt. Return the words of the command."""
    (tmp_path / "text.txt").write_text("abcdefgh\n" * 200)
    data = f"{{target: TextFile, args: {{path: {tmp_path}/text.txt, tokenizer: char, length: 16, stride: 1}}}}"
    (tmp_path / "gpt.yaml").write_text(GPT.format(data=data, steps=150))
    train = ["train", "--config", tmp_path / "gpt.yaml", "--run_dir", tmp_path / "run"]
    jaxdp(*train, *more)
    assert records(tmp_path / "run", "final")[0]["accuracy"] > 0.9
    (tmp_path / "text.txt").unlink()  # a checkpoint knows its model and tokenizer
    sample = ["sample", "--run_dir", tmp_path / "run"]
    found = jaxdp(*sample, "--prompt", "fgh\nab", "--tokens", 30, "--temperature", 0)
    assert found == ("fgh\n" + "abcdefgh\n" * 4)[:36] + "\n"
    return sample
