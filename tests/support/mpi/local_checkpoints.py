"""Two processes with separate directories: saves, and what each restores after its files were lost;
for test_local_checkpoints."""

import pathlib
import shutil
import sys

import jax

import jaxdp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

context = jaxdp.init()

import toys  # noqa: E402
from checkpoints import META, digest, strategy  # noqa: E402
from jaxdp.checkpoint.local import LocalCheckpoints  # noqa: E402

base, rank, scaled = pathlib.Path(sys.argv[1]), context.rank, toys.MODELS["mlp"]()
own = strategy(("pjit", 3), len(jax.devices()), scaled)
states = [own.export(own.init())]
states += [jax.tree.map(lambda x: x + 1, states[0]), jax.tree.map(lambda x: x + 2, states[0])]
digests = [digest(state) for state in states]


def start(name, *steps):
    """Checkpoints of a job in `name`, each process with its own directory, after saves of the
    states of `steps`.
    """
    checkpoints = LocalCheckpoints(base / f"{name}{rank}" / "checkpoints", keep=9)
    checkpoints.attach("")
    assert not checkpoints.is_shared and checkpoints.writes
    for step in steps:
        checkpoints.save(step, states[step], META, lambda text: None)
        assert checkpoints.wait() is None
    assert checkpoints.steps() == list(steps)
    return checkpoints


def folder(name, of, step):
    return base / f"{name}{of}" / "checkpoints" / str(step)


def resumed(name, step, *words, state=None):
    """Another job restores `step` on both hosts; root and rank 1 say these words."""
    said, checkpoints = [], LocalCheckpoints(base / f"{name}{rank}" / "checkpoints", keep=9)
    checkpoints.attach("")
    assert checkpoints.latest(said.append) == step
    texts = "\n".join(context.exchange("said", "\n".join(said))).strip()
    assert all(word in texts for word in words), texts
    assert (not words) == (not texts), texts
    if step:
        restored = checkpoints.restore(step, own.abstract())
        assert digest(restored) == digests[step if state is None else state]
        assert (folder(name, rank, step) / "manifest.json").is_file()
    context.barrier("resumed")


def on(of, act, *paths):
    """Let one process change its files."""
    if rank == of:
        act(*paths)
    context.barrier("changed")


start("same", 1, 2)
resumed("same", 2)

start("older", 1, 2)
on(1, shutil.rmtree, folder("older", 1, 2))
resumed("older", 2, f"checkpoint 2 copied from {context.title(0)} to {context.title(1)}")

start("torn", 1, 2)
on(0, lambda: (folder("torn", 0, 2) / "manifest.json").unlink())
resumed("torn", 2, "checkpoint 2 was not finished", "copied from rank 1")

start("manifest", 1, 2)
on(0, lambda: (folder("manifest", 0, 2) / "manifest.json").write_text("{"))
resumed(
    "manifest", 2, "checkpoint 2 is damaged: its manifest.json cannot be read", "copied from rank 1"
)

start("both", 1, 2)
(folder("both", rank, 2) / "manifest.json").write_text("{")
context.barrier("changed")
resumed("both", 1, "checkpoint 2 is damaged", f"{context.title(1)}: checkpoint 2 is damaged")

start("crossed", 1, 2)
on(0, shutil.rmtree, folder("crossed", 0, 2))
on(1, shutil.rmtree, folder("crossed", 1, 1))
on(1, lambda: next((folder("crossed", 1, 2) / "state" / "d").iterdir()).write_bytes(b""))
resumed("crossed", 1, "rank 1", "checkpoint 2 is damaged", "checkpoint 1 copied from rank 0")

start("none", 1)
(folder("none", rank, 1) / "manifest.json").unlink()
context.barrier("changed")
resumed("none", 0, "checkpoint 1 was not finished", "no host has a complete checkpoint")

start("mine", 1)  # both hosts have an update 1, of different jobs and states
states[1] = states[2]
start("other", 1)
on(1, shutil.rmtree, folder("mine", 1, 1))
on(1, shutil.copytree, folder("other", 1, 1), folder("mine", 1, 1))
resumed("mine", 1, "checkpoint 1 is damaged: another job has saved it", "copied from rank 0")

print(f"rank {rank} is done")
