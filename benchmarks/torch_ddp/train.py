"""PyTorch as its users have it: eager or compiled, fused AdamW, and DistributedDataParallel over
Gloo.

python -m benchmarks.torch_ddp.train MATERIAL [--layout channels_last] [--compile] [--device cuda]
"""

import argparse
import os

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import contender
from benchmarks.material import Material
from benchmarks.torch_ddp.models import make


def groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """As in nanoGPT, but that embeddings and kernels decay, and biases and the scales of norms do
    not.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def optimizer(model: torch.nn.Module, case: dict) -> torch.optim.Optimizer:
    own = case["optimizer"]
    args, parameters = own["args"], groups(model, own["weight_decay"])
    if own["target"] == "sgd":
        more = {"momentum": args.get("momentum", 0.0), "nesterov": args.get("nesterov", False)}
        return torch.optim.SGD(parameters, 1.0, fused=True, **more)
    return torch.optim.AdamW(
        parameters, 1.0, (args.get("b1", 0.9), args.get("b2", 0.999)), 1e-8, fused=True
    )


class Trainer:
    """The loop: loss and accuracy stay on the device until they are asked for."""

    def __init__(self, material: Material, options: argparse.Namespace):
        self.material, self.case, self.at = material, material.case, 0
        self.device, self.layout = options.device, getattr(torch, options.layout)
        self.model = (
            make(self.case, material.weights).to(self.device, memory_format=self.layout).train()
        )
        self.optimizer = optimizer(self.model, self.case)
        self.parameters = list(self.model.parameters())
        self.call = self.model
        if contender.processes() > 1:
            self.call = DistributedDataParallel(
                self.call, gradient_as_bucket_view=True, broadcast_buffers=options.broadcast_buffers
            )
        self.judge = torch.compile(self.judged) if options.compile else self.judged
        self.cast = torch.autocast(
            self.device, torch.bfloat16, enabled=self.case["compute"] == "bfloat16"
        )
        if self.case["pixels"]:
            mean, deviation, top = (
                torch.tensor(x, dtype=torch.float32) for x in self.case["pixels"]
            )
            self.middle, self.factor = (
                (top * mean).to(self.device),
                (1 / (top * deviation)).to(self.device),
            )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self.material.batch(self.at)
        if not self.case["pixels"]:
            inputs = inputs.astype(np.int64)
        inputs, labels = (
            torch.from_numpy(np.ascontiguousarray(inputs)),
            torch.from_numpy(labels.astype(np.int64)),
        )
        if self.device != "cpu":
            inputs, labels = (
                x.pin_memory().to(self.device, non_blocking=True) for x in (inputs, labels)
            )
        if not self.case["pixels"]:
            return inputs, labels
        images = (inputs.float() - self.middle) * self.factor
        return images.permute(0, 3, 1, 2).contiguous(memory_format=self.layout), labels

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, accuracy) of one update."""
        inputs, labels = self.batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.material.rates[self.at]
        with self.cast:
            loss, accuracy = self.judge(inputs, labels)
        loss.backward()
        if self.case["optimizer"]["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.case["optimizer"]["clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.at += 1
        return loss.detach(), accuracy

    def judged(
        self, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, accuracy): compiled as one with the model, as in nanoGPT, so that no logits are
        copied.
        """
        logits, labels = self.call(inputs), labels.view(-1)
        logits = logits[..., : self.case["classes"]].reshape(-1, self.case["classes"])
        loss = F.cross_entropy(logits, labels, label_smoothing=self.case["label_smoothing"])
        return loss, (logits.detach().argmax(-1) == labels).float().mean()

    def losses(self, updates: int) -> list[float]:
        return [float(self.update()[0]) for _ in range(updates)]

    def run(self, updates: int) -> None:
        for _ in range(updates):
            metrics = self.update()
        float(metrics[0]), float(metrics[1])
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        return {"peak_bytes": torch.cuda.max_memory_allocated()} if self.device == "cuda" else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("material")
    parser.add_argument(
        "--layout", default="contiguous_format", choices=["contiguous_format", "channels_last"]
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--broadcast_buffers", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if options.device == "cuda" else "highest")
    torch.backends.cudnn.benchmark = True  # it measures its convolutions, as XLA does
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rank, processes = contender.rank(), contender.processes()
    if processes > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)
    trainer = Trainer(Material(options.material, rank, processes), options)
    contender.serve(trainer.losses, trainer.run, trainer.memory)
    if processes > 1:
        torch.distributed.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
