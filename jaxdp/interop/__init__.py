"""Tools that make an existing training loop data-parallel: data, parameters, gradients and metrics.

The names are those of Horovod and PyTorch; `docs/own_loop.md` shows how to combine them.
"""
