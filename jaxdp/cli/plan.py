"""The verb `plan`: predict memory, communication and time of a config, as a table or JSON."""

import json
import math
import re
from typing import Any

import jax

from jaxdp.cli import Call
from jaxdp.config import Config
from jaxdp.errors import UsageError
from jaxdp.metrics.numbers import size, table
from jaxdp.parallel.placement import group_size
from jaxdp.parallel.sums import arithmetic
from jaxdp.plan.chips import CompilerFailed, Target, compile_plans, plan_stages, read_target
from jaxdp.plan.hardware import NETWORK, OVERLAP, Hardware, load_hardware, rate
from jaxdp.plan.prediction import (
    Plan,
    describe,
    predict,
    read_network,
    recommend,
    summarize,
)
from jaxdp.plan.timeline import MEMORY, write_page
from jaxdp.run.build import changes_for
from jaxdp.run.components import (
    Parts,
    make_parts,
    make_reduction,
    make_the_step,
    set_jax,
    state_maker,
)
from jaxdp.run.preflight import rehearse

DEVICES, DEFAULT = 8, "h100-nvlink-ib400"  # without --devices, --hardware


def devices_of(options: dict[str, Any]) -> int:
    """Return the number of devices to plan for. Raises UsageError for a wrong target."""
    if options["target"] is None:
        if options["output"] is not None:
            raise UsageError(
                "--output: only a program for --target has a schedule to show; give both"
            )
        return options["devices"] or DEVICES
    for name in ("devices", "hardware"):
        if options[name] is not None:
            raise UsageError(
                f"--{name}: {options[name]}, but --target says it too; give one of them"
            )
    return read_target(options["target"]).devices


def run(call: Call) -> None:
    """Print memory, communication and time of an update for each ZeRO stage, and recommend a stage."""
    set_jax(call.config)
    print(report(call.config, make_parts(call.config), call.options))


def report(config: Config, parts: Parts, options: dict[str, Any]) -> str:
    """Return the plan of every requested stage, as text or JSON."""
    devices, outer = options["devices"], config.outer
    target = options["target"] and read_target(options["target"])
    hardware = target.hardware if target else load_hardware(options["hardware"] or DEFAULT)
    network = None if options["network"] is None else read_network(options["network"])
    limit = hardware.memory if options["memory"] is None else read_bytes(options["memory"])
    group_size(config.parallel.shard_size, devices)
    stages = read_stages(options["zero"], config.parallel.zero)
    if outer.replicas > 1 and stages != [0]:
        raise UsageError(
            f"--zero: {options['zero']}, but a run with outer.replicas has stage 0 only; leave it out"
        )
    make_state = state_maker(config, parts)
    rehearse(config, parts, make_the_step(config, parts), make_state)
    per_device = math.ceil(max(config.microbatches, devices) / devices)
    needs = {
        z: ", ".join(
            f"parallel.{name}: {json.dumps(value)}".replace('"', "")
            for name, value in changes_for(config.parallel, z).items()
        )
        for z in stages
    }
    plans, notes = make_plans(config, parts, target, stages, per_device, devices)
    dtype = rate(
        config.precision.compute or config.precision.params, config.precision.matmul, hardware.flops
    )
    seconds = [
        predict(p, hardware, dtype) if p.schedule or dtype in hardware.flops else None
        for p in plans
    ]
    best = recommend(plans, limit)
    tried_all = len(stages) > 1 or outer.replicas > 1
    enough = devices <= config.microbatches
    uneven = 0 < config.microbatches % devices < config.microbatches
    examples = (
        config.largest_batch
        if enough
        else per_device * devices * parts.order.examples_per_microbatch
    )
    notes += [f"zero {p.zero} needs {needs[p.zero]}" for p in plans if needs[p.zero]]
    notes += remarks(config, plans, hardware, dtype, per_device, devices, examples)
    if options["output"] is not None:
        schedules = {p.zero: p.schedule for p in plans if p.schedule is not None}
        write_page(options["output"], schedules, f"{config.model.target} on {options['target']}")
    shapes = jax.eval_shape(make_state)
    if outer.replicas > 1 or network is not None:
        data = sent(
            parts.rule.trainable(shapes.params), outer.reduction or config.parallel.reduction
        )
        sites, every = (
            (min(outer.replicas, devices), outer.every) if outer.replicas > 1 else (devices, 1)
        )
        notes += describe(
            sites, data, every, seconds[0]["compute"] if seconds[0] else None, network
        )
    count = sum(x.size for x in jax.tree.leaves(shapes.params))
    dtypes = config.precision
    title = (
        f"{config.model.target} {count:,} parameters; {config.data.target}; {config.optimizer.target}; "
        f"{' parameters, '.join(dict.fromkeys((dtypes.params, dtypes.state or dtypes.widest)))} state, "
        f"{dtypes.compute} compute",
        f"{devices:,} devices ({hardware.name}), {'up to ' * uneven}{per_device} microbatch{'es' * (per_device > 1)} "
        f"of {parts.order.examples_per_microbatch} on each: {examples:,} examples an update",
    )
    if options["json"]:
        figures_of = [
            {
                **as_dict(p),
                "compiled_by": p.compiled_by,
                "peak_bytes": p.memory.peak,
                "step_seconds": s and s["expected"],
                "hidden_share": p.schedule and p.schedule.hidden_share,
                "mfu": p.flops / s["expected"] / hardware.flops[dtype]
                if s and dtype in hardware.flops
                else None,
                "needs": needs[p.zero],
                "seconds": s,
                "examples_per_s": s and examples / s["expected"],
            }
            for p, s in zip(plans, seconds)
        ]
        content = {
            "model": config.model.target,
            "parameters": count,
            "devices": devices,
            "hardware": hardware._asdict(),
            "target": options["target"],
            "examples": examples,
            "microbatches_per_device": per_device,
            "memory": limit,
            "plans": figures_of,
            "recommended": best.zero if best and tried_all else None,
            "notes": notes,
        }
        return json.dumps(content, indent=1)
    last = verdict(plans, best, limit, tried_all)
    last += f"; it needs {needs[best.zero]}" if best and needs[best.zero] else ""
    shown = [*title, "", *figures(plans, seconds, examples), "", last, "", *notes]
    for plan in plans if len(plans) == 1 or best is None else ():
        shown += details(plan, limit)
    return "\n".join(shown)


def make_plans(
    config: Config,
    parts: Parts,
    target: Target | None,
    stages: list[int],
    per_device: int,
    devices: int,
) -> tuple[list[Plan], list[str]]:
    """Return the plans of ZeRO stages, and notes on those that are left out.

    They are compiled for the target if its compiler is installed and works, else for simulated
    devices.
    """
    notes = list[str]()
    if target is not None:
        try:
            return compile_plans(config, target, stages, per_device)
        except CompilerFailed as error:
            notes = [f"not compiled for {target.name}, but simulated on CPU: {error}"]
    if devices > len(jax.devices()):
        raise UsageError(
            f"--devices: {devices}, but only {len(jax.devices())} can be simulated; plan for fewer"
        )
    plans, others = plan_stages(config, parts, stages, per_device, jax.devices()[:devices])
    return plans, notes + others


def details(plan: Plan, limit: float) -> list[str]:
    """Return the operations of an update that take most, and its largest arrays if it does not fit."""
    if (schedule := plan.schedule) is None:
        return []
    rows = [
        [name, f"{count} x", f"{1e3 * seconds:.3g} ms"] for name, seconds, count in schedule.longest
    ]
    lines = ["", "operations that take most", *table(rows, ">")]
    if plan.memory.peak > limit:
        rows = [[name, shape, size(count)] for shape, name, count in schedule.largest]
        lines += ["", "the largest arrays", *table(rows, ">")]
    return lines


def sent(gradients: Any, reduction: str) -> float:
    """Return the bytes that a reduction sends for gradients of these shapes."""
    width = arithmetic(make_reduction(reduction)).width
    return sum(x.size * width(x.dtype.itemsize) for x in jax.tree.leaves(gradients))


def figures(plans: list[Plan], seconds: list[Any], examples: int) -> list[str]:
    """Return the lines of a table with one column for each stage."""
    totals = [summarize(p.collectives) for p in plans]
    kinds = sorted({kind for total in totals for kind in total})

    def collective(t, kind):
        return f"{t[kind].count} x, {size(t[kind].bytes)}" if kind in t else "-"

    def ms(s, key):
        return f"{1e3 * s[key]:.3g} ms" if s else "-"

    times = {
        "compute": "compute",
        "communication": "communication",
        "one after the other": "no_overlap",
        "overlapped": "full_overlap",
        "expected": "expected",
    }
    rows = [
        ("per device", [f"zero {p.zero}" for p in plans]),
        ("  split", [f"{100 * p.share.split:.1f} %" for p in plans]),
        *(
            (f"  {name}", [size(getattr(p.memory, name)) for p in plans])
            for name in plans[0].memory._fields[:-1]
        ),
        ("  peak", [size(p.memory.peak) for p in plans]),
        ("an update moves", [""] * len(plans)),
        *((f"  {kind}", [collective(t, kind) for t in totals]) for kind in kinds),
        ("an update takes", [""] * len(plans)),
        *((f"  {name}", [ms(s, key) for s in seconds]) for name, key in times.items()),
        *([("  hidden", [hidden(p) for p in plans])] if any(p.schedule for p in plans) else []),
        ("  examples/s", [f"{examples / s['expected']:,.0f}" if s else "-" for s in seconds]),
        (
            "  efficiency",
            [
                f"{s['efficiency']:.2f} to {s['efficiency_overlap']:.2f}" if s else "-"
                for s in seconds
            ],
        ),
    ]
    return table([[name, *cells] for name, cells in rows], ">")


def hidden(plan: Plan) -> str:
    """Return the share of the communication during which the device computes."""
    share = plan.schedule and plan.schedule.hidden_share
    return "-" if share is None else f"{share:.0%}"


def verdict(plans: list[Plan], best: Plan | None, limit: float, tried_all: bool) -> str:
    if best is None:
        least = min(plans, key=lambda p: p.memory.peak)
        failed, other = (
            ("nothing fits", "")
            if tried_all
            else (f"zero {least.zero} does not fit", "--zero all, ")
        )
        return (
            f"{failed} {size(limit)}: zero {least.zero} needs {size(least.memory.peak)}; try {other}more devices, "
            "parallel.accumulate scan with more microbatches, parallel.remat full, or smaller batches"
        )
    fits = "is the lowest stage that fits" if tried_all else "fits"
    return f"zero {best.zero} {fits} {size(limit)} (peak {size(best.memory.peak)})"


def remarks(
    config: Config,
    plans: list[Plan],
    hardware: Hardware,
    dtype: str,
    per_device: int,
    devices: int,
    examples: int,
) -> list[str]:
    """Return notes on the accuracy of the figures."""
    if plans[0].schedule is None:
        notes = [
            "activations, peak and counts are XLA's for CPU: it keeps attention scores T x T that a fused kernel",
            "  does not, computes bfloat16 in float32, and does not merge collectives as on a GPU; collectives have",
            "  their own dtypes",
        ]
        times = [
            f"times: {hardware.efficiency:.1%} of {hardware.name}'s {dtype} peak, latency and bandwidth of its links;",
            f"  not measured. Expected: {NETWORK:.0%} of the bandwidth, {OVERLAP:.0%} of the shorter part hidden "
            "(docs/plan.md)",
        ]
        none = [f"no times: {hardware.name} states no rate for {dtype}"]
        notes += times if dtype in hardware.flops else none
    else:
        notes = [
            "compiled, not run: memory, kernels, collectives and their order are of the target's own compiler; each",
            f"  operation takes its roofline time: {hardware.products:.1%} of the peak, "
            f"{MEMORY:.0%} of the memory's bandwidth, all of a link's",
        ]
    if devices > config.microbatches:
        notes.append(
            f"microbatches: {config.microbatches} cannot be split over {devices:,} devices; planned with microbatches "
            f"{per_device * devices:,} and batch_size {examples:,}, which changes the numbers"
        )
    for p in plans:
        if p.unknown_loops:
            notes.append(
                f"zero {p.zero}: only a run knows the iterations of {len(p.unknown_loops)} of its loops; each "
                f"counts as one, such as {p.unknown_loops[0]}"
            )
        if p.unknown_groups:
            notes.append(
                f"zero {p.zero}: {len(p.unknown_groups)} collectives are between groups of devices in an unknown "
                f"syntax, such as {p.unknown_groups[0]}; they count as collectives of all devices"
            )
        if p.gathered_whole:
            notes.append(
                "zero 3: this model does not scan blocks, so all its parameters are gathered at once"
            )
        if p.zero and p.share.replicated_bytes > 0.01 * p.share.total_bytes:
            replicated = f"{p.share.replicated} leaves of {size(p.share.replicated_bytes)}"
            group = max(k for k in range(1, hardware.devices_per_host + 1) if devices % k == 0)
            hint = (
                f"; parallel.shard_size {group} shards over smaller groups"
                if 1 < group < devices
                else ""
            )
            notes.append(
                f"zero {p.zero}: {replicated} stay replicated, since none of their dims divides evenly{hint}"
            )
    return notes


def as_dict(plan: Plan) -> dict[str, Any]:
    total = {kind: t._asdict() for kind, t in summarize(plan.collectives).items()}
    share = {**plan.share._asdict(), "split": plan.share.split}
    simple = {
        k: v
        for k, v in plan._asdict().items()
        if k not in ("collectives", "memory", "share", "schedule")
    }
    if plan.schedule is not None:
        figures_of = plan.schedule._asdict()
        del figures_of["events"]
        simple["schedule"] = figures_of
    return {**simple, "memory": plan.memory._asdict(), "share": share, "collectives": total}


def read_stages(text: str, default: int) -> list[int]:
    """Parse --zero. default: the stage of the config."""
    stages = {"config": [default], "all": [*range(4)], **{str(z): [z] for z in range(4)}}
    if text not in stages:
        raise UsageError(f"--zero: {text!r} is not 0, 1, 2, 3, all or config")
    return stages[text]


def read_bytes(text: str) -> float:
    """Parse a number of bytes such as 80GB, 80 GiB or 80e9."""
    match = re.fullmatch(
        r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper().replace("E", "e")
    )
    if not match or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"--memory: {text!r} is not a number of bytes, such as 80GB")
    return float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
