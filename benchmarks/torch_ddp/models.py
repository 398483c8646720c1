"""The same models in PyTorch, as its users write them, with the names of the weights that they
begin with.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Weights = Mapping[str, np.ndarray]


class MLP(nn.Module):
    """x[example, ...] -> logits [example, class]: linear and ReLU for each hidden layer, and a
    linear classifier.
    """

    def __init__(self, inputs: int, classes: int, hidden: list[int]):
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)

    def load(self, weights: Weights) -> None:
        for i, layer in enumerate(self.layers):
            linear(layer, weights, f"layers/{i}")
        linear(self.head, weights, "head")


class Block(nn.Module):
    """nanoGPT's block: x + attention(norm(x)), and to that its MLP(norm(.)). query, key and value
    in one product.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attend, self.back = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        examples, tokens, dim = x.shape
        query, key, value = (
            y.view(examples, tokens, self.heads, dim // self.heads).transpose(1, 2)
            for y in self.attend(self.norm1(x)).split(dim, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.back(y.transpose(1, 2).contiguous().view(examples, tokens, dim))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """tokens[example, token] -> logits [example, token, vocabulary row]: GPT-2's shape, logits by
    the embedding.
    """

    def __init__(self, length: int, rows: int, layers: int, heads: int, dim: int):
        super().__init__()
        self.embed, self.positions = nn.Embedding(rows, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def load(self, weights: Weights) -> None:
        """Of blocks each by itself, or stacked [block, ...]."""
        copy(self.embed.weight, weights["embed/embedding"])
        copy(self.positions.weight, weights["positions"])
        norm(self.norm, weights, "norm")
        for i, block in enumerate(self.blocks):
            own = part(weights, f"blocks/modules/{i}") or {
                k: v[i] for k, v in part(weights, "blocks/stack").items()
            }
            for name in ("norm1", "norm2"):
                norm(getattr(block, name), own, name)
            kernels = [own[f"attention/{name}/kernel"] for name in ("query", "key", "value")]
            biases = [
                own.get(f"attention/{n}/bias", np.zeros(len(kernels[0])))
                for n in ("query", "key", "value")
            ]
            copy(block.attend.weight, np.concatenate(kernels, 1).T)
            copy(block.attend.bias, np.concatenate(biases))
            linear(block.back, own, "attention/back")
            linear(block.up, own, "mlp/up")
            linear(block.down, own, "mlp/back")


class ConvBN(nn.Sequential):
    """ReLU(norm(convolution)), without a bias before the norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=(kernel - 1) // 2, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-5, momentum=0.1),
            nn.ReLU(inplace=True),
        )

    def load(self, weights: Weights) -> None:
        copy(self[0].weight, weights["conv/kernel"].transpose(3, 2, 0, 1))
        copy(self[1].weight, weights["norm/scale"])
        copy(self[1].bias, weights["norm/bias"])


class Residual(nn.Module):
    """x + block(block(x))."""

    def __init__(self, channels: int):
        super().__init__()
        self.blocks = nn.Sequential(ConvBN(channels, channels), ConvBN(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.blocks(x)

    def load(self, weights: Weights) -> None:
        for i, block in enumerate(self.blocks):
            block.load(part(weights, f"blocks/{i}"))


class ResNet9(nn.Module):
    """images[example, channel, height, width] -> logits [example, class]; variants as jaxdp's model
    has them.
    """

    def __init__(self, classes: int, variant: str, width: int | None):
        super().__init__()
        if variant == "needle":
            w = width or 16
            body = [
                ConvBN(3, w, 7, 4),
                ConvBN(w, 2 * w, 3, 2),
                Residual(2 * w),
                ConvBN(2 * w, 4 * w, 3, 2),
            ]
            body += [ConvBN(4 * w, 8 * w, 3, 2), Residual(8 * w), nn.Flatten()]
            head = [nn.Linear(8 * w, 8 * w), nn.ReLU(), nn.Linear(8 * w, classes)]
            self.scale = 1.0
        else:
            w, pool = width or 64, lambda: nn.MaxPool2d(2)
            body = [
                ConvBN(3, w),
                ConvBN(w, 2 * w),
                pool(),
                Residual(2 * w),
                ConvBN(2 * w, 4 * w),
                pool(),
            ]
            body += [
                ConvBN(4 * w, 8 * w),
                pool(),
                Residual(8 * w),
                nn.AdaptiveMaxPool2d(1),
                nn.Flatten(),
            ]
            head = [nn.Linear(8 * w, classes, bias=False)]
            self.scale = 0.125
        self.body, self.head = nn.Sequential(*body), nn.Sequential(*head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale

    def load(self, weights: Weights) -> None:
        for i in sorted({int(name.split("/")[1]) for name in weights if name.startswith("body/")}):
            self.body[i].load(part(weights, f"body/{i}"))
        for i, layer in enumerate([layer for layer in self.head if isinstance(layer, nn.Linear)]):
            linear(layer, weights, f"head/{i}")


def make(case: dict, weights: Weights) -> nn.Module:
    """The model of a case, with its weights."""
    target, args, shape = case["model"]["target"], case["model"]["args"], case["input_shape"]
    if target == "MLP":
        model: nn.Module = MLP(math.prod(shape), case["classes"], list(args["hidden"]))
    elif target == "GPT":
        rows, dim = weights["embed/embedding"].shape
        model = GPT(shape[0], rows, args.get("layers", 12), args.get("heads", 12), dim)
    else:
        model = ResNet9(case["classes"], args.get("variant", "needle"), args.get("width"))
    with torch.no_grad():
        model.load(weights)
    return model


def part(weights: Weights, prefix: str) -> dict[str, np.ndarray]:
    return {
        name[len(prefix) + 1 :]: x for name, x in weights.items() if name.startswith(f"{prefix}/")
    }


def copy(parameter: torch.Tensor, array: np.ndarray) -> None:
    if tuple(parameter.shape) != array.shape:
        raise ValueError(f"weights {array.shape} for a parameter {tuple(parameter.shape)}")
    parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def linear(layer: nn.Linear, weights: Weights, name: str) -> None:
    copy(layer.weight, weights[f"{name}/kernel"].T)
    if layer.bias is not None:
        copy(layer.bias, weights[f"{name}/bias"])


def norm(layer: nn.LayerNorm, weights: Weights, name: str) -> None:
    copy(layer.weight, weights[f"{name}/scale"])
    copy(layer.bias, weights[f"{name}/bias"])
