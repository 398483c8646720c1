"""Runs a script with the backend that BACKEND names: `mpirun -np 2 python example.py SCRIPT`."""

import os
import runpy
import sys

import jaxdp

jaxdp.init(backend=os.environ.get("BACKEND"))
runpy.run_path(sys.argv[1], run_name="__main__")
