"""400 gradient tensors of 1,000 floats summed over two processes: packed into a bucket against
`lax.psum` of the tree.

    mpirun -np 2 python benchmarks/small_tensors.py [--tensors 400] [--repeats 15]

Both are the same jitted program but for the reduction. Prints the operands of each program's
all-reduces and the medians of interleaved repeats.
"""

import argparse
import json
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.parallel.placement import data_mesh, ordered_devices
from jaxdp.run.components import REDUCTIONS
from jaxdp.split import DATA

SIZE = 1000


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    context = jaxdp.init()
    mesh = data_mesh(ordered_devices(None))
    split = NamedSharding(mesh, P(DATA))
    rng = np.random.default_rng(context.rank)
    local = jax.local_device_count()
    tree = [
        jax.make_array_from_process_local_data(
            split, rng.normal(size=(local, SIZE)).astype(np.float32)
        )
        for _ in range(options.tensors)
    ]

    def program(name: str):
        reduce = REDUCTIONS[name](25.0).reduce

        def step(tree):
            return [g * 0.5 for g in reduce([2.0 * x[0] for x in tree], DATA)]

        mapped = jax.shard_map(step, mesh=mesh, in_specs=P(DATA), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(tree).compile()

    programs = {name: program(name) for name in ("bucket", "xla")}
    sums = {name: f(tree) for name, f in programs.items()}
    for a, b in zip(sums["bucket"], sums["xla"], strict=True):
        np.testing.assert_allclose(
            a.addressable_data(0), b.addressable_data(0), rtol=1e-5, atol=1e-5
        )

    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(options.repeats):
        for name in list(programs)[:: 1 if repeat % 2 else -1]:
            context.barrier("repeat")
            began = time.perf_counter()
            jax.block_until_ready(programs[name](tree))
            times[name].append(1e3 * (time.perf_counter() - began))
    if context.is_root:
        median = {name: statistics.median(t) for name, t in times.items()}
        result = {
            "processes": context.size,
            "all_reduce_operands": {name: operands(f.as_text()) for name, f in programs.items()},
            "median_ms": {name: round(m, 2) for name, m in median.items()},
            "ratio": round(median["xla"] / median["bucket"], 1),
            "jax": jax.__version__,
        }
        print(json.dumps(result))
    assert jnp.isfinite(sums["bucket"][0].addressable_data(0)).all()


def operands(text: str) -> list[int]:
    """The number of operands of each all-reduce in a compiled program."""
    return [
        m.group(1).count(",") + 1 for m in re.finditer(r" all-reduce(?:-start)?\(([^)]*)\)", text)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
