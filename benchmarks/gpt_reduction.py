"""Training a GPT of 3.2M parameters over two processes: gradients in buckets against one operand a leaf.

    mpirun -np 2 --bind-to none python benchmarks/gpt_reduction.py [--parallel.zero 1 ...]

The same config (configs/gpt_3m.yaml), step and batches; the programs differ in `parallel.reduction` alone. Prints the
collectives of each program's update and the medians of interleaved repeats. Arguments go to the config.
"""

import dataclasses
import json
import statistics
import sys
import time

import jax

import jaxdp
from jaxdp.analysis.hlo import collectives, summarize
from jaxdp.assemble.components import make_parts, make_strategy, make_the_step, set_jax, state_maker
from jaxdp.cli import load
from jaxdp.data.prefetch import read_batch

REPEATS, UPDATES = 11, 3


def main() -> None:
    context = jaxdp.init()
    config, *_ = load(["--config", "configs/gpt_3m.yaml", *sys.argv[1:]])
    set_jax(config)
    parts = make_parts(config)
    step, make_state = make_the_step(config, parts), state_maker(config, parts)

    runs, moved = {}, {}
    for name in ("bucket", "xla"):
        asked = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, reduction=name))
        strategy = make_strategy(asked, parts, make_state, jax.devices())
        batch = strategy.shard_batch(read_batch(parts.dataset, parts.order, 0, strategy.local_microbatches))
        program, state = strategy.compile(step), strategy.init()
        found = collectives(program.lowered(state, batch)["update"].compile().as_text())
        moved[name] = {kind: [t.count, t.bytes] for kind, t in summarize(found).items()}
        state, metrics = program.update(state, batch)
        runs[name] = [program, state, batch, jax.block_until_ready(metrics)["loss"]]
    losses = {name: float(run[3]) for name, run in runs.items()}

    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            program, state, batch, _ = runs[name]
            context.barrier("repeat")
            began = time.perf_counter()
            for _ in range(UPDATES):
                state, metrics = program.update(state, batch)
            jax.block_until_ready((state, metrics))
            times[name].append(1e3 * (time.perf_counter() - began) / UPDATES)
            runs[name][1] = state
    if context.is_root:
        median = {name: statistics.median(t) for name, t in times.items()}
        tokens = config.batch_size * parts.dataset.input_shape[0]  # type: ignore[attr-defined]
        result = {
            "processes": context.size,
            "devices": len(jax.devices()),
            "backend": config.parallel.backend,
            "zero": config.parallel.zero,
            "collectives (count, bytes)": moved,
            "first loss": losses,
            "median_ms": {name: round(m, 1) for name, m in median.items()},
            "tokens_per_s": {name: round(1e3 * tokens / m) for name, m in median.items()},
            "ratio": round(median["xla"] / median["bucket"], 2),
            "jax": jax.__version__,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
