"""What makes a training loop that somebody has already data-parallel: data, parameters, gradients and metrics.

The names are those that users know from Horovod and PyTorch; `docs/own_loop.md` tells how they go together.
"""
