"""The verb `profile`: trace a few updates, and print a page of text on where their time goes."""

import time
from typing import Any

import jax

from jaxdp import config as schema
from jaxdp.cli import Call
from jaxdp.config import Config
from jaxdp.metrics.numbers import number, table
from jaxdp.parallel.placement import open_collectives
from jaxdp.plan import trace
from jaxdp.process.context import Context
from jaxdp.run.build import make_run
from jaxdp.run.profile_window import folder

WARM_UP = 3  # updates before the trace: compilation, and other work of the first ones
WIDTH = 72  # characters of a name in the table


def run(call: Call) -> None:
    text = profile(call.config, call.path, call.context, call.options)
    if call.context.is_root:
        print(text)


def profile(config: Config, path: str | None, context: Context, options: dict[str, Any]) -> str:
    """Trace some updates of a config into its run directory; return a text on the time of this
    process's devices.
    """
    updates, rows = options["updates"], options["top"]
    directory = schema.run_dir(config, path)
    (directory / "profile").mkdir(
        parents=True, exist_ok=True
    )  # JAX would say only after the trace that it cannot
    run, directory = make_run(config, directory, context), folder(directory)
    open_collectives(context)
    program, strategy = run.strategy.compile(run.step), run.strategy
    state = strategy.init()
    with run.data.train.batches(0, WARM_UP + updates, strategy) as batches:
        items = iter(batches)
        _, first = next(items)
        texts = [part.compile().as_text() for part in program.lowered(state, first).values()]
        state, metrics = program.update(state, first)
        for _ in range(WARM_UP - 1):
            state, metrics = program.update(state, next(items)[1])
        jax.block_until_ready((state, metrics))
        context.barrier("profile")
        profiler_options = jax.profiler.ProfileOptions()
        profiler_options.python_tracer_level = 0
        with jax.profiler.trace(str(directory), profiler_options=profiler_options):
            began = time.perf_counter()
            for i in range(updates):
                with jax.profiler.StepTraceAnnotation(trace.ANNOTATION, step_num=i):
                    state, metrics = program.update(state, next(items)[1])
            jax.block_until_ready((state, metrics))
            milliseconds = 1e3 * (time.perf_counter() - began) / updates
    operations, called = trace.read(directory)
    kinds: dict[str, str] = {}
    origins: dict[str, str] = {}
    for text in texts:
        kinds |= trace.opcodes(text)
        origins |= trace.origins(text)
    if not operations or not called:
        return f"{updates} updates of {milliseconds:.2f} ms; the trace in {directory} has no operations of a device"
    devices = len({o.device for o in operations})
    window = (called[0][0], max(called[-1][1], *(o.end for o in operations)))
    return "\n".join(
        [
            f"{updates} updates, {number('step_time_ms', milliseconds)} ms each; trace in {directory} "
            "(TensorBoard, or ui.perfetto.dev)",
            "",
            *_shares(trace.shares(operations, window, kinds)),
            "",
            *_top(trace.top(operations, window), origins, kinds, updates * devices, rows),
        ]
    )


def _shares(devices: list[trace.Shares]) -> list[str]:
    rows = [["device", "compute", "communication", "idle", "communication hidden behind compute"]]
    for s in devices:
        communication = s.communication + s.hidden
        shares = [f"{part / s.window:.1%}" for part in (s.compute, s.communication, s.idle)]
        rows.append(
            [s.device, *shares, f"{s.hidden / communication:.0%}" if communication else "-"]
        )
    return table(rows, ">")


def _top(
    rows: list[trace.Row], origins: dict[str, str], kinds: dict[str, str], updates: int, most: int
) -> list[str]:
    """Return the lines of a table of the first `most` rows; updates: of each device, added up."""
    total = sum(row.time for row in rows) or 1.0

    def figures(time):
        return [f"{time / updates / 1e6:.3f}", f"{time / total:.1%}"]

    lines = [["operation", "ms/update", "share", "runs"]]
    for row in rows[:most]:
        kind, where = kinds.get(row.name, "fusion"), origins.get(row.name, "")
        text = f"{row.name if kind == 'fusion' else f'{row.name} ({kind})'}  {where}"
        text = text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
        lines.append([text, *figures(row.time), str(row.count // updates)])
    if len(rows) > most:
        lines.append(
            [f"{len(rows) - most} more (--top)", *figures(sum(row.time for row in rows[most:])), ""]
        )
    return table(lines, ">")
