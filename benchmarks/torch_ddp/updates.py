"""Milliseconds of an update with DistributedDataParallel over Gloo, in processes that mpirun starts
on several hosts.

python -m benchmarks.material FOLDER 8 --config configs/gpt_3m.yaml --microbatches 2
MASTER_ADDR=HOST MASTER_PORT=4711 mpirun -np 2 ... python -m benchmarks.torch_ddp.updates FOLDER 8
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch

from benchmarks import contender
from benchmarks.material import Material
from benchmarks.torch_ddp.train import Trainer


def main(folder: str, updates: int) -> None:
    rank, processes = contender.rank(), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ[contender.PROCESSES] = str(processes)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)
    options = argparse.Namespace(
        device="cpu", layout="contiguous_format", compile=False, broadcast_buffers=True
    )
    trainer, times = Trainer(Material(folder, rank, processes), options), []
    for _ in range(updates):
        began = time.perf_counter()
        trainer.run(1)
        times.append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        print(
            json.dumps({"way": "PyTorch DDP", "ms": round(statistics.median(times[2:]), 1)}),
            flush=True,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
