"""How the time of an update grows: with parameters, batch, microbatches and simulated devices.

    python -m benchmarks.scaling [--repeats 5] [--updates 4] [--tiny] [--curves batch ...] [--out benchmarks/results]

A GPT on bytes of the Python source; the points of a curve are measured interleaved, as contenders.
Writes scaling.json. Other arguments go to the config.
"""

import argparse
import json
import math
import pathlib
import sys
import tempfile
from typing import Any

from benchmarks import harness, job

BASE = {
    "--model.args.layers": "2",
    "--model.args.dim": "128",
    "--batch_size": "16",
    "--microbatches": "1",
}
# curve: its points, each (what is on the axis, what differs from BASE, simulated devices)
CURVES: dict[str, list[tuple[int, dict[str, str], int]]] = {
    "parameters": [(dim, {"--model.args.dim": str(dim)}, 1) for dim in (64, 128, 256, 384)],
    "batch": [(n, {"--batch_size": str(n)}, 1) for n in (4, 8, 16, 32)],
    "microbatches, vmap": [(n, {"--microbatches": str(n)}, 1) for n in (1, 2, 4, 8)],
    "microbatches, loop": [
        (n, {"--microbatches": str(n), "--parallel.accumulate": "scan"}, 1) for n in (1, 2, 4, 8)
    ],
    "devices": [(n, {"--microbatches": "8"}, n) for n in (1, 2, 4, 8)],
}
SAME = ("microbatches, vmap", "microbatches, loop", "devices")  # curves along which the losses stay


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument(
        "--tiny", action="store_true", help="the first two points of each curve, of a small model"
    )
    parser.add_argument("--out", type=pathlib.Path, default=job.ROOT / "benchmarks" / "results")
    parser.add_argument("--curves", nargs="+", choices=[*CURVES], default=[*CURVES])
    options, more = parser.parse_known_args(argv)
    curves = {name: curve(name, CURVES[name], options, more) for name in options.curves}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scaling.json").write_text(
        json.dumps({"curves": curves, **harness.machine()}, indent=1) + "\n"
    )
    points = sum(
        len(points[: 2 if options.tiny else None])
        for points in map(CURVES.__getitem__, options.curves)
    )
    return 0 if sum(map(len, curves.values())) == points else 1


def curve(
    name: str,
    points: list[tuple[int, dict[str, str], int]],
    options: argparse.Namespace,
    more: list[str],
) -> dict[str, Any]:
    total = 4 + (options.repeats + 1) * (options.updates + 1)
    with tempfile.TemporaryDirectory() as folder:
        contenders = []
        for x, changes, devices in points[:2] if options.tiny else points:
            keys = {**BASE, **({"--data.args.length": "32"} if options.tiny else {}), **changes}
            flags = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
            words = [word for pair in keys.items() for word in pair]
            command = [
                *(
                    sys.executable,
                    "-m",
                    "benchmarks.contender",
                    "benchmarks.jaxdp_loop",
                    f"{folder}/{x}",
                ),
                *(
                    "--config",
                    str(job.ROOT / "configs/gpt_3m.yaml"),
                    "--steps",
                    str(total),
                    *words,
                    *more,
                ),
            ]
            contenders.append(job.Contender(str(x), command, env={"XLA_FLAGS": flags}))
        found = harness.measure(
            contenders,
            pathlib.Path(folder) / "logs",
            updates=options.updates,
            repeats=options.repeats,
            check=4,
            tolerance=1e-4 if name in SAME else math.inf,
        )
    rows = {x: (own["median"], own["quartiles"]) for x, own in found["contenders"].items()}
    print(
        f"{name:20} " + "  ".join(f"{x}: {1e3 * median:.1f} ms" for x, (median, _) in rows.items()),
        flush=True,
    )
    for x, why in found["left_out"].items():
        print(f"  left out: {x}: {why}", flush=True)
    return {x: own["seconds_per_update"] for x, own in found["contenders"].items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
