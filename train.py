"""python train.py --config configs/digits.yaml [--key value ...]: the same as `jaxdp train`."""

import sys

from jaxdp.__main__ import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
