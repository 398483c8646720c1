"""Starts of a run with a cache of programs of their own."""

import json
import subprocess
import sys
from typing import NamedTuple

from jaxdp.process.environment import processor
from launch import ROOT, environment

# Trains, and prints how many programs came from the cache, and how many were compiled.
SCRIPT = """
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **more: events.update([name.rpartition("/")[2]]))
from jaxdp.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    names = ["compile_requests_use_cache", "cache_hits"]
    print("\\nevents", jax.process_index(), json.dumps([events[name] for name in names]), flush=True)
    raise
"""


RUN = [
    "train", "--config", str(ROOT / "configs" / "digits.yaml"), "--steps", "1", "--batch_size", "16",
    "--microbatches", "2", "--model.args.hidden", "[4]",
]  # fmt: skip


def home(folder):
    """The environment of a user whose caches are in `folder`, without what the tests have set."""
    ours = dict.fromkeys(
        ["JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    )
    return {**ours, "XDG_CACHE_HOME": str(folder)}


class Start(NamedTuple):
    """One start of a run. requests: programs that it needed; hits: those of them that came from the
    cache.
    """

    digest: str
    requests: int
    hits: int
    program: dict
    stderr: str


def start(folder, run_dir, *more):
    command = [sys.executable, "-c", SCRIPT, *RUN, "--run_dir", str(run_dir), *more]
    done = subprocess.run(
        command, env=environment(home(folder), 2), cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.rpartition("events 0 ")[2])
    final = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    layout = json.loads((run_dir / "layout.json").read_text())
    return Start(final["params_sha256"], *counts, layout["program"], done.stderr)


def check_second_start(tmp_path, *more):
    """It compiles nothing, and computes the same bits."""
    first = start(tmp_path / "cache", tmp_path / "one", *more)
    assert first.requests > 3 and not first.hits and "cache" not in first.stderr
    second = start(tmp_path / "cache", tmp_path / "two", *more)
    assert second == first._replace(hits=first.requests)
    assert first.program["temporaries"] > 0
    (folder,) = (tmp_path / "cache" / "jaxdp" / "xla").iterdir()
    assert folder.name == processor()
    next(folder.glob("*-cache")).write_bytes(b"damaged")  # and so compiled again
    third = start(tmp_path / "cache", tmp_path / "three", *more)
    assert third == first._replace(hits=first.requests - 1)
    none = start(tmp_path / "other", tmp_path / "four", *more, "--compilation_cache", "null")
    assert (none.digest, none.hits) == (first.digest, 0) and not (tmp_path / "other").exists()
