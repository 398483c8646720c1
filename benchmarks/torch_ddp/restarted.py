"""A small MLP under DistributedDataParallel, which saves every 100 updates and is started again by
torchrun.

torchrun --nproc_per_node N --max_restarts R restarted.py STEPS      (in the folder of the run)
"""

import json
import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer, step = torch.optim.Adam(model.parameters(), 1e-3), 0
    os.makedirs("run", exist_ok=True)
    if os.path.exists("run/saved"):
        state = torch.load("run/saved")
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    while step < steps:
        step += 1
        generator = torch.Generator().manual_seed(size * step + rank)
        inputs = torch.rand(64 // size, 64, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, 0].mul(10).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if rank == 0 and step % 10 == 0:
            with open("run/metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if rank == 0 and step % 100 == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "run/saving")
            os.replace("run/saving", "run/saved")


if __name__ == "__main__":
    main(int(sys.argv[1]))
