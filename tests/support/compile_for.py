"""Compile the update of a config for a target, and print what the program has, as JSON.

    python compile_for.py TARGET [--fault NAME] --config configs/digits.yaml ...

A fault is planted in the program: see FAULTS."""

import argparse
import json
import math
import os
import re
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp

from jaxdp import cpu, losses
from jaxdp.api import set_environment
from jaxdp.cli.parse import load
from jaxdp.parallel.pjit import PJit
from jaxdp.plan import chips
from jaxdp.plan.hlo import collectives
from jaxdp.plan.prediction import peak
from jaxdp.plan.timeline import play
from jaxdp.run.build import make_case
from jaxdp.run.components import make_parts, set_jax

FAULTS = ("sum after the loop", "float64", "not donated")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--fault", choices=FAULTS)
    given, words = parser.parse_known_args()
    config, *_ = load(words, "train")
    chips.allow_compilers()
    set_environment(config)
    set_jax(config)
    target = chips.read_target(given.target)
    devices = chips.open_target(target)
    cpu.target = devices[0].platform
    chips.assume_cudnn()
    if given.fault == "float64":
        jax.config.update("jax_enable_x64", True)
    parts = make_parts(config)
    per_device = math.ceil(max(config.microbatches, len(devices)) / len(devices))
    case = make_case(config, parts, config.parallel.zero, per_device, devices)
    plant(given.fault, case)
    state, batch = case.strategy.argument_shapes(case.example)
    lowered = case.strategy.compile(case.step).update.lower(state, batch)
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    text, memory = compiled.as_text(), compiled.memory_analysis()
    schedule = play(text, target.hardware)
    sent = [[c.kind, c.dtype, c.count, c.bytes] for c in collectives(text, lowered.as_text())]
    parameters = jax.tree.leaves(case.strategy.shapes.params)
    facts = {
        "seconds_to_compile": seconds,
        "parameters": sum(x.size for x in parameters),
        "state": memory.alias_size_in_bytes,
        "copied": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "peak": peak(memory),
        "memory": target.hardware.memory,
        "sent": sent,
        "float64": len(re.findall(r"\bf64\[", text)),
        "callbacks": re.findall(r'custom_call_target="([^"]*callback[^"]*)"', text),
        "hidden": schedule.hidden_share,
        "step_seconds": schedule.seconds,
        "kernels": schedule.kernels,
    }
    print(json.dumps(facts))


def plant(fault: str | None, case) -> None:
    if fault == "sum after the loop":
        strategy = case.strategy
        strategy.reduction = strategy.reduction._replace(overlaps=False)
    elif fault == "float64":
        plain = losses.CausalLM.__call__

        def wide(self, outputs, batch):
            loss, *more = plain(self, outputs, batch)
            return (loss * jnp.float64(1.0000000001)).astype(loss.dtype), *more

        losses.CausalLM.__call__ = wide
    elif fault == "not donated":
        compiled = PJit.compiled
        PJit.compiled = lambda self, f, out_specs, donate=False: compiled(self, f, out_specs)


if __name__ == "__main__":
    main()
