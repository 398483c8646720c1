"""Restores under every strategy, over all processes, what one process saved, and saves it; for
test_checkpoint.
"""

import pathlib
import sys

import jax

import jaxdp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

context = jaxdp.init()

import toys  # noqa: E402
from checkpoints import META, WAYS, digest, strategy  # noqa: E402
from jaxdp.checkpoint.store import Checkpoints  # noqa: E402

directory, expected = pathlib.Path(sys.argv[1]), sys.argv[2]
model = toys.MODELS["mlp"]()
source = Checkpoints(directory / "one")
for way in WAYS:
    own = strategy(way, len(jax.devices()), model)
    state = own.adopt(source.restore(1, own.abstract()))
    assert digest(own.export(state)) == expected, way
    target = Checkpoints(directory / f"{len(jax.devices())}-{way[0]}{way[1]}")
    target.save(1, own.export(state), META, lambda text: None)
    assert target.wait() is None, way
    assert target.latest() == 1
context.barrier("done")
if context.is_root:
    print(f"{len(WAYS)} ways on {len(jax.devices())} devices")
