"""The CPU's own ways to compute a layer against JAX's: the same values and gradients, also mapped
over microbatches.
"""

import os
import pathlib
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from covering import first
from jaxdp.cpu import convolve, product
from jaxdp.models.attention import causal, shares
from jaxdp.models.cnn import CNN
from jaxdp.models.gpt import GPT
from jaxdp.models.mlp import MLP
from jaxdp.models.normalization import LayerNorm, RMSNorm
from jaxdp.models.resnet9 import ResNet9, halve
from jaxdp.models.vit import ViT
from jaxdp.process import environment

DIMS = lax.conv_dimension_numbers((1, 1, 1, 1), (1, 1, 1, 1), ("NHWC", "HWIO", "NHWC"))


def pads(padding, image, window, strides):
    return (
        lax.padtype_to_pads(image[:2], window, strides, padding)
        if isinstance(padding, str)
        else padding
    )


def normal(*shape, dtype=jnp.float64):
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


def gradients(f, x, weights):
    """(f's values, their derivatives along something by x and by weights), x mapped and weights
    not.
    """

    def total(x, weights):
        y = jax.vmap(f, (0, None))(x, weights)
        return jnp.sum(jnp.sin(y)), y

    (_, y), found = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, weights)
    return y, *found


def near(found, right, tolerance=1e-12):
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=0))


def test_a_kernels_gradient_is_one_product_of_matrices():
    """Of the rows of all microbatches; XLA on CPU transposes operands in memory for a sum over two
    dimensions.
    """

    def loss(kernel, x):
        return jnp.sum(jax.vmap(product, (0, None))(x, kernel))

    closed = jax.make_jaxpr(jax.grad(loss))(jnp.ones((6, 7)), jnp.ones((3, 4, 5, 6)))
    dots = [
        eqn.params["dimension_numbers"]
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert dots[-1] == (((0,), (0,)), ((), ()))


@pytest.mark.slow
def test_product_is_dot_general_with_gradients():
    with jax.enable_x64(True):
        x, kernel = normal(3, 4, 5, 6), normal(6, 7)
        near(gradients(product, x, kernel), gradients(jnp.matmul, x, kernel))

        def forward(f):
            return jax.jit(lambda: jax.jvp(f, (x, kernel), (x + 1, kernel + 1)))()

        near(forward(product), forward(jnp.matmul))

        def each(f):
            return jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(f(x, w)))), (None, 0)))(
                kernel, x
            )

        near([each(product)], [each(jnp.matmul)])  # a gradient of every example

        def loss(f):
            return lambda w: jnp.sum(jnp.sin(jax.vmap(f, (0, None))(x, w)))

        def second(f):
            return jax.jit(jax.hessian(loss(f)))(
                kernel
            )  # forward over reverse, and batched changes

        near([second(product)], [second(jnp.matmul)])

        def again(f):
            return jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(loss(f))(w) ** 2)))(kernel)

        near([again(product)], [again(jnp.matmul)])
    narrow = gradients(product, x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    assert [y.dtype for y in narrow] == [jnp.bfloat16] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours, flaxs",
    [(LayerNorm, nnx.LayerNorm), (RMSNorm, nnx.RMSNorm)],
    ids=["layer norm", "rms norm"],
)
def test_normalization_is_flaxs_with_gradients(ours, flaxs):
    with jax.enable_x64(True):
        x, w = 3 + normal(3, 4, 5, 6), {"scale": normal(6), "bias": normal(6) + 1}

        def norm(kind):
            def apply(x, w):
                layer = kind(6, epsilon=1e-5, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
                nnx.update(layer, {k: w[k] for k in nnx.state(layer)})
                return layer(x)

            return apply

        near(
            jax.tree.leaves(gradients(norm(ours), x, w)),
            jax.tree.leaves(gradients(norm(flaxs), x, w)),
            1e-11,
        )

        def forward(f):
            return jax.jit(lambda: jax.jvp(lambda x: f(x, w), (x,), (jnp.cos(x),)))()

        near(forward(norm(ours)), forward(norm(flaxs)), 1e-11)
    layer = ours(6, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    large = 1e4 + normal(
        2, 64, dtype=jnp.float32
    )  # Flax's variance, E[x^2] - E[x]^2, has no digits left here
    np.testing.assert_allclose(
        LayerNorm(64, rngs=nnx.Rngs(0))(large),
        (large - large.mean(-1, keepdims=True)) / large.std(-1)[:, None],
        1e-3,
    )


def test_product_refuses_what_it_does_not_compute():
    with pytest.raises(ValueError, match="is not x"):
        product(jnp.ones((2, 3)), jnp.ones((2, 3)), (((0,), (0,)), ((), ())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "image, window, strides, padding",
    [
        ((9, 8, 3), (7, 7), (4, 4), "SAME"),  # few channels: blocks
        pytest.param((10, 7, 3), (3, 2), (2, 3), ((1, 1), (0, 2)), marks=pytest.mark.slow),
        pytest.param(
            (8, 8, 3), (4, 4), (4, 4), "VALID", marks=pytest.mark.slow
        ),  # of whole patches
        ((7, 7, 16), (3, 3), (2, 2), ((1, 1), (1, 1))),  # strides that leave pixels out
        pytest.param((6, 5, 17), (2, 3), (3, 2), "SAME", marks=pytest.mark.slow),
        ((1, 1, 16), (3, 3), (1, 1), ((1, 1), (1, 1))),  # one tap sees the image
        pytest.param((2, 2, 16), (3, 3), (2, 2), ((1, 1), (1, 1)), marks=pytest.mark.slow),
        pytest.param(
            (2, 3, 4), (5, 7), (1, 1), "SAME", marks=pytest.mark.slow
        ),  # a window larger than the image
        pytest.param(
            (4, 4, 4), (4, 4), (1, 1), "VALID", marks=pytest.mark.slow
        ),  # one pixel of output
        pytest.param((5, 6, 4), (3, 3), (1, 1), "SAME", marks=pytest.mark.slow),
        pytest.param(
            (2, 4, 16), (3, 3), (2, 2), "VALID", marks=pytest.mark.slow
        ),  # no pixel of output
    ],
)
def test_convolution(image, window, strides, padding):
    padding = pads(padding, image, window, strides)
    with jax.enable_x64(True):
        x, kernel = normal(2, 3, *image), normal(*window, image[-1], 5)

        def own(x, w):
            return convolve(x, w, strides, padding, dimension_numbers=DIMS)

        def jaxs(x, w):
            return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=DIMS)

        near(gradients(own, x, kernel), gradients(jaxs, x, kernel))


UNSEEN = [
    (8, 3, 2, "VALID"),
    (9, 2, 4, "VALID"),
    (7, 5, 4, ((1, 0), (1, 0))),
    (10, 3, 3, "VALID"),
    (6, 1, 2, "SAME"),
]


@pytest.mark.slow
@pytest.mark.parametrize("window", first(1, UNSEEN), ids=str)
@pytest.mark.parametrize("channels", first(1, [16, 3]))
def test_a_pixel_that_no_window_sees_may_be_nan(window, channels):
    """It changes no output and no gradient."""
    size, window, stride, padding = window
    padding = pads(padding, (size, size), (window, window), (stride, stride))
    x, kernel = (
        normal(1, size, size, channels, dtype=jnp.float32),
        normal(window, window, channels, 2, dtype=jnp.float32),
    )

    def own(x):
        return convolve(x, kernel, (stride, stride), padding, dimension_numbers=DIMS)

    seen = jax.grad(lambda x: lax.conv_general_dilated(x, jnp.ones_like(kernel), (stride, stride), padding,
                                                       dimension_numbers=DIMS).sum())(x) != 0  # fmt: skip
    assert not seen.all()
    found = jax.value_and_grad(
        lambda x, w: convolve(x, w, (stride, stride), padding, dimension_numbers=DIMS).sum(), 1
    )
    np.testing.assert_array_equal(own(jnp.where(seen, x, jnp.nan)), own(x))
    for a, b in zip(found(jnp.where(seen, x, jnp.nan), kernel), found(x, kernel)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "options", [{"feature_group_count": 2}, {"rhs_dilation": (2, 2)}, {"lhs_dilation": (2, 2)}]
)
def test_convolution_refuses_what_it_does_not_compute(options):
    with pytest.raises(ValueError, match="neither dilates nor groups"):
        convolve(
            jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 4)), (2, 2), [(0, 0), (0, 0)], **options
        )


@pytest.mark.slow
def test_softmax_and_its_derivatives():
    with jax.enable_x64(True):
        x = jnp.where(jnp.tri(6, dtype=bool), normal(3, 6, 6), -jnp.inf)

        def f(g):
            return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(3 * g(x)))))(x)

        near(f(shares), f(jax.nn.softmax))


@pytest.mark.slow
def test_the_first_of_equal_pixels_is_the_largest():
    x = (
        jnp.round(normal(2, 5, 7, 3, dtype=jnp.float32))
        .at[0, 0, 0, 0]
        .set(jnp.nan)
        .at[0, 3, 3, 1]
        .set(jnp.nan)
    )
    own, flax = halve, lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2))
    np.testing.assert_array_equal(own(x), flax(x))
    numbers = jnp.nan_to_num(x)

    def gradient(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x) * normal(2, 2, 3, 3, dtype=jnp.float32))))(
            numbers
        )

    np.testing.assert_array_equal(gradient(own), gradient(flax))


@pytest.mark.slow
@pytest.mark.parametrize("heads", first(1, [2, 4]))
def test_attention_of_groups_and_documents(heads):
    """Grouped queries, two documents an example."""
    tokens = 389
    query, key, value = (
        normal(2, tokens, n, 3, dtype=jnp.float32) * s
        for n, s in ((4, 1), (heads, 0.5), (heads, 2))
    )
    segments = jnp.arange(tokens) > jnp.array([[17], [tokens // 2]])

    def right(query, key, value):
        key, value = (jnp.repeat(x, 4 // heads, 2) for x in (key, value))
        scores = jnp.einsum("ethw,eshw->ehts", query, key) / 3**0.5
        seen = jnp.tri(tokens, dtype=bool) & (segments[:, :, None] == segments[:, None, :])[:, None]
        return jnp.einsum(
            "ehts,eshw->ethw", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), value
        )

    def f(g):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(g(*args))), (0, 1, 2)))(
            query, key, value
        )

    found, gradient = f(lambda *args: causal(*args, segments))
    expected, true = f(right)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    near(gradient, true, 2e-5)


SMALL = {"layers": 1, "dim": 8, "heads": 2}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind, args, shape",
    [
        (MLP, {"hidden": [4]}, (8, 8, 1)),
        (CNN, {"widths": [4, 4]}, (8, 8, 1)),
        pytest.param(ResNet9, {"width": 4}, (32, 32, 3), marks=pytest.mark.slow),
        pytest.param(
            ResNet9, {"width": 4, "variant": "dawnbench"}, (8, 8, 3), marks=pytest.mark.slow
        ),
        pytest.param(ViT, SMALL, (8, 8, 1), marks=pytest.mark.slow),
        (GPT, SMALL, (6,)),
    ],
)
def test_a_batch_without_examples(kind, args, shape):
    model = kind(shape, 5, **args, rngs=nnx.Rngs(0))
    model.eval()
    x = jnp.zeros((0, *shape), jnp.int32 if kind is GPT else jnp.float32)
    assert model(x).shape == ((0, 6, 5) if kind is GPT else (0, 5))


FAULTS = """
import sys
from jaxdp.process import environment
environment.malloc()
import resource
import jax, jax.numpy as jnp
f = jax.jit(lambda x: (jnp.sin(x).reshape(-1, 64) @ jnp.ones((64, 64))).max())  # two temporaries like x
x = jnp.ones(int(sys.argv[1]))
counts = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts[1:]))
"""


def faults(size=2**25, **settings):
    """Page faults of a call of a program with temporaries of twice as many floats."""
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    run = [sys.executable, "-c", FAULTS, str(size)]
    return int(
        subprocess.run(
            run, env={**env, **settings}, check=True, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.slow
def test_memory_is_kept_or_comes_in_huge_pages():
    if not platform.libc_ver()[0]:
        pytest.skip("glibc is needed")
    assert 4 * faults(size=2**20) < faults(
        size=2**20, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072"
    )
    pages = pathlib.Path(environment.HUGE_PAGES)
    if not pages.is_file() or "[madvise]" not in pages.read_text():
        pytest.skip("a kernel that gives huge pages where they are asked for is needed")
    assert 4 * faults() < faults(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
