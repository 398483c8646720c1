"""A config with planted faults, and the command that is to find them."""

import os
import subprocess
import sys

from launch import ROOT

CONFIG = """
model: {target: planted.Net}
data: {target: Digits}
steps: 10
batch_size: 60
optimizer: {target: adamw, lr: 1.0e-2}
verify: {strategies: 1}
"""


PLANTED = '''
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn

def losses(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]) * batch["mask"]

def scalar(outputs, batch):
    return jnp.mean(losses(outputs, batch))

def mean(outputs, batch):
    return jnp.mean(losses(outputs, batch)), jnp.sum(batch["mask"]), {}

def mean_of_means(outputs, batch):
    weight = jnp.sum(batch["mask"])
    return jnp.sum(losses(outputs, batch)) / jnp.maximum(weight, 1), jnp.minimum(weight, 1), {}

def unmasked(outputs, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return jnp.sum(each), jnp.sum(batch["mask"]), {}

def mean_metric(outputs, batch):
    right = (jnp.argmax(outputs, -1) == batch["labels"]).astype(outputs.dtype)
    return jnp.sum(losses(outputs, batch)), jnp.sum(batch["mask"]), {"accuracy": jnp.mean(right)}

def contrastive(outputs, batch):
    mask = batch["mask"]
    other = jnp.sum(outputs * mask[:, None], 0)
    return jnp.sum(jnp.sum((outputs - other) ** 2, -1) * mask), jnp.sum(mask), {}

class Restless:
    """Augments where it reads."""
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return {"inputs": np.random.rand(4, 4, 1).astype(np.float32), "labels": i % 10}

class Net(nn.Module):
    fault: str = ""
    @nn.compact
    def __call__(self, x, mask, train: bool):
        x = nn.Dense(16)(x.reshape(len(x), -1))
        if self.fault in ("sync", "unmasked", "noise", "part"):
            norm = nn.BatchNorm(use_running_average=not train, axis_name="data" if self.fault == "sync" else None)
            y = norm(x) if self.fault == "unmasked" else norm(x, mask=mask[:, None])
            x = jnp.concatenate([y[:, :8], x[:, 8:]], 1) if self.fault == "part" else y
        x = nn.relu(x)
        if self.fault == "device" and train:
            key = jax.random.fold_in(self.make_rng("dropout"), jax.lax.axis_index("data"))
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)
        if self.fault == "numpy" and train:
            x = x * np.random.rand(x.shape[-1])
        if self.fault == "count" and train:
            x = x / jax.lax.psum(1, "data")
        if self.fault == "axis" and train:
            x = x - jax.lax.pmean(x, "batch")
        if self.fault == "narrow":
            x = nn.Dense(16, dtype=jnp.float32)(x)
        if self.fault == "integer":
            seen = self.variable("stats", "seen", lambda: jnp.zeros((), jnp.int32))
            if train:
                seen.value = seen.value + jnp.sum(x > 1).astype(jnp.int32)
        return nn.Dense(10)(x)
'''


def command(*argv, cwd, code):
    argv = [sys.executable, "-m", "jaxdp", "verify", *map(str, argv)]
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done
