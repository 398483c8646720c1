# make train: environment and the main job on the embedded data.  make test: environment and the quick tests.
# make docs: the pages of docs/, into site/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE :=  # where it is set, each process of a test would compile the whole package

.PHONY: train test test-all targets lint format docs clean bench bench-growth bench-gpu

train: $(VENV)/.base
	$(BIN)/python train.py --config configs/digits.yaml

# The quick part of the test suite. One of its workers waits for jobs of several processes, so there is one more than cores.
test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadgroup --no-loadscope-reorder -rs --durations=20

# The slow part as well: every combination that the quick part has one example of.
test-all: test
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n 2 --dist loadgroup --durations=3

# Programs for GPUs and TPUs that are not here, made by their own compilers (950 MB): every config, and what it must have.
targets: .targets/.done
	$(BIN)/python -m pytest tests/targets tests/unit/test_chips.py -n 2 --dist load --durations=10

# In a folder of their own: each process that finds these plug-ins loads them.
.targets/.done: $(VENV)/.test
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .targets $$($(BIN)/python tests/support/target_requirements.py)
	@$(BIN)/python tests/support/target_requirements.py > $@

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# site/index.html; every link and anchor is checked. The pages in docs/reference are written first.
docs: $(VENV)/.docs
	$(BIN)/python docs/pages.py
	$(BIN)/python -m zensical build --strict

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

# MPICH has a folder of its own: its mpirun would take the place of Open MPI's.
$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install -q -e '.[mpi,test]'
	$(BIN)/python -m pip install -q --no-deps --ignore-installed --prefix .mpich mpich
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

# Speed side by side, in 12 to 15 minutes: jaxdp, hand-written loops, PyTorch (in a separate environment). What fails is left out
# with its reason, and the exit code says so. BENCH="--only gpt_1" runs some of the cases. CHECK=1 says at the end which
# statements of docs/performance.md do not hold any more, RECORD=1 writes the tables of RESULTS.md and of that page.
bench: $(VENV)/.test .venv-torch/.done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.run $(if $(CHECK),--check) $(if $(RECORD),--record) $(BENCH)

# The time of an update against model size, batch, microbatches and simulated devices.
bench-growth: $(VENV)/.test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.scaling $(BENCH)

# On one NVIDIA GPU, with whatever Python has JAX and, if it is to be compared, PyTorch for it; no network.
bench-gpu:
	$(PYTHON) -m benchmarks.gpu $(BENCH)

.venv-torch/.done: benchmarks/torch_ddp/requirements.txt
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install -q -r benchmarks/torch_ddp/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-torch .mpich benchmarks/results runs build site docs/reference .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
