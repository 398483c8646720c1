"""python train.py --config configs/digits.yaml [--key value ...]: the same as `jaxdp train`."""

import sys

from jaxdp.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
