"""The verb `sample`: generate text from a checkpoint, which stores the config of its model and
tokenizer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.published import check_unchanged
from jaxdp.checkpoint.store import choose_step
from jaxdp.checkpoint.weights import MODEL_STATE, filled, from_checkpoint, on_host
from jaxdp.cli import Call
from jaxdp.cli.export import run_directory
from jaxdp.config.parsing import from_mapping
from jaxdp.data.tokenizers import from_spec
from jaxdp.errors import UsageError
from jaxdp.losses import Logits
from jaxdp.models import MODELS
from jaxdp.models.base import CARRY, Model
from jaxdp.precision import cast_floats
from jaxdp.run import rundir
from jaxdp.run.components import make_model, set_jax
from jaxdp.targets import locate
from jaxdp.train.carry import split_carry

Tree = Any
Draw = Callable[[jax.Array, jax.Array], jax.Array]  # (logits [vocabulary], key) -> token []


def run(call: Call) -> None:
    print(sample(call.options))


def sample(options: dict[str, Any]) -> str:
    """Return the prompt and its continuation. Raises UsageError if there is no checkpoint of a
    language model, or if its tokenizer cannot encode the prompt."""
    directory = run_directory(options["run_dir"]).absolute()
    temperature = options["temperature"]
    if not 0 <= temperature < math.inf:
        raise UsageError(
            f"--temperature: {temperature} is not at least 0; 1 draws from what the model expects"
        )
    checkpoint = directory / "checkpoints" / str(choose_step(directory, options["step"]))
    weights = from_checkpoint(checkpoint, options["ema"], "--run_dir", "--ema")
    meta = weights.meta
    data = meta.get("data") or {}
    if not data.get("tokenizer"):
        raise UsageError(
            f"--run_dir: {str(directory)!r} was not trained on text with a tokenizer; name another"
        )
    with rundir.inside(meta.get("folder")):
        place = str(checkpoint)
        config = from_mapping(meta["config"], place)
        set_jax(config, sums=False)
        tokenizer = from_spec(data["tokenizer"])
        try:
            prompt = tokenizer.encode(options["prompt"])
        except UsageError as error:
            reason = str(error).removeprefix("data.args.tokenizer: ").split("; ")[0]
            raise UsageError(
                f"--prompt: {reason}, which the run was trained on; leave it out"
            ) from None
        if not len(prompt):
            raise UsageError("--prompt: '' has no tokens; give at least one character")
        model = make_model(config, locate("model", config.model.target, MODELS), data)
        check_unchanged(meta)
        context = data["input_shape"][0]
        example = {"inputs": np.zeros((1, context), np.int32), "mask": np.ones(1, bool)}
        params, state = jax.eval_shape(model.init, jax.random.key(0), example)
        state, carry = split_carry(state)
        arrays = on_host(weights)
        params = cast_floats(filled(params, arrays, place), config.precision.compute)
        state = filled(state, arrays, place, MODEL_STATE)
        if carry is not None:
            state = {**state, CARRY: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), carry)}
        ids = prompt.tolist()
        tokens = generate(
            model,
            params,
            state,
            ids,
            options["tokens"],
            context,
            drawing(temperature, options["top_k"]),
            options["seed"],
        )
        return tokenizer.decode([*ids, *tokens])


def generate(
    model: Model,
    params: Tree,
    state: Tree,
    prompt: Sequence[int],
    count: int,
    context: int,
    draw: Draw,
    seed: int,
) -> list[int]:
    """Return `count` generated tokens that continue the prompt, which has at least one token.

    A model with carried state, which is zero at first, reads one token at a time. Any other model
    rereads the last `context` tokens for each new one: its outputs [example, token, vocabulary]
    must be causal. Both are compiled once."""
    key = jax.random.key(seed)

    @jax.jit
    def next_token(
        params: Tree, state: Tree, tokens: jax.Array, position: int, i: int
    ) -> tuple[jax.Array, Tree]:
        batch = {"inputs": tokens[None], "mask": jnp.ones(1, bool)}
        outputs, state = model.apply(params, state, batch, key, False)
        return draw(at(outputs, position), jax.random.fold_in(key, i)), state

    params = jax.device_put(params)
    sequence = list(map(int, prompt))
    if isinstance(state, dict) and CARRY in state:
        for i in range(len(sequence) + count - 1):
            last, state = next_token(params, state, np.asarray(sequence[i : i + 1], np.int32), 0, i)
            if i >= len(prompt) - 1:
                sequence.append(int(last))
        return sequence[len(prompt) :]
    for i in range(count):
        window = sequence[-context:]
        tokens = np.zeros(context, np.int32)
        tokens[: len(window)] = window
        last, _ = next_token(params, state, tokens, len(window) - 1, i)
        sequence.append(int(last))
    return sequence[len(prompt) :]


def at(outputs: Any, position: int) -> jax.Array:
    """Return the logits [vocabulary] at one token position of outputs [1, token, vocabulary]."""
    if isinstance(outputs, Logits):
        return outputs.replace(x=outputs.x[0, position]).compute()
    return outputs[0, position].astype(jnp.float32)


def drawing(temperature: float = 1.0, top_k: int | None = None) -> Draw:
    """Return a sampler from softmax(logits / temperature) over the `top_k` largest or all; 0
    selects the largest.
    """

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if not temperature:
            return jnp.argmax(logits)
        if top_k is not None and top_k < len(logits):
            logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][-1], -jnp.inf, logits)
        return jax.random.categorical(key, logits / temperature)

    return draw
