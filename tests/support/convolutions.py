"""Convolutions of any number of spatial dimensions, channels last."""

import jax


def convolution(x, w, **more):
    """Convolve x [example, *space, channel] with w [*window, channel of a group, output channel]."""
    space = "DHW"[-(x.ndim - 2) :]
    arguments = {"window_strides": (1,) * len(space), "padding": "SAME", **more}
    spec = (f"N{space}C", f"{space}IO", f"N{space}C")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=spec, **arguments)
