"""python train.py --config configs/digits.yaml [--key value ...]: the same as `jaxdp train`."""

import sys

from jaxdp.cli import command

if __name__ == "__main__":
    command(["train", *sys.argv[1:]])
