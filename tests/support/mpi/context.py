"""Joins, reduces once, and prints what this process knows of the job as one line of JSON."""

import json
import sys

import jax
import numpy as np

import jaxdp

context = jaxdp.init(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
total = float(np.asarray(jaxdp.allreduce(np.float32(context.rank + 1))))
context.barrier("done", timeout=30.0)
line = {
    "rank": context.rank,
    "size": context.size,
    "local_rank": context.local_rank,
    "local_size": context.local_size,
    "launcher": context.launcher,
    "hosts": len(set(context.hosts)),
    "is_root": context.is_root,
    "devices": jax.local_device_count(),
    "total": total,
}
sys.stdout.write(
    json.dumps(line) + "\n"
)  # in one piece: print writes the end of the line by itself
