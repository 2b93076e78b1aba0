PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= 2
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# One thread per process: torchrun's processes share the cores, and oversubscribed threads are slower.
export OMP_NUM_THREADS ?= 1

# The tests' workers import what the first process has compiled.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-gpu test-versions test-wheel test-stack test-upstream bench lint format \
  types docs clean

help:
	@echo "make demo     train a small model, sharded over $(PROCESSES) processes (about two minutes)"
	@echo "make test     run the quick tests (about six minutes on two cores)"
	@echo "make test-all run all tests (an hour or more)"
	@echo "make test-gpu run those that need a CUDA device, with several ranks of NCCL on one device"
	@echo "make test-versions run the tests with other versions of Python and torch (several GB, an hour)"
	@echo "make test-wheel build the distributions, and run the README's program where only the wheel is installed"
	@echo "make test-stack run programs of other libraries on unshard and on PyTorch's FSDP, and compare (12 to 30 minutes)"
	@echo "make test-upstream PYTORCH=<checkout> run PyTorch's own FSDP tests on unshard, and count (hours)"
	@echo "make bench    time training steps beside PyTorch's FSDP on the CPU, and name the other benchmarks"
	@echo "make lint     check style and formatting"
	@echo "make format   apply both"
	@echo "make types    check types"
	@echo "make docs     build the documentation in build/site, and check its links"
	@echo "make clean    remove the environment and all caches"

install: $(INSTALLED)

# Torch goes first and by its exact version: left to the dependency range, pip may look at (and download)
# other builds of it before the constraint settles the matter. The second call finds it satisfied.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install torch==$(TORCH)
	@$(PIP) install --constraint $(VENV)/constraints.txt numpy
	@$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[dev]"
	@touch $@

# Called again, it resumes from the checkpoints in FOLDER, also with other PROCESSES; STEPS=140 trains on.
FOLDER ?= build/demo
demo: $(INSTALLED)
	$(BIN)/torchrun --standalone --nproc-per-node=$(PROCESSES) examples/train_bytes.py \
	  --folder "$(FOLDER)" $(if $(STEPS),--steps $(STEPS))

# Three processes take files from one queue: ranks wait for each other, so two would leave two cores idle.
test: $(INSTALLED)
	$(BIN)/python -m pytest --processes 3 --durations 20

test-all: $(INSTALLED)
	$(BIN)/python -m pytest --processes 3 --durations 20 -m "slow or not slow"

# The environment may have torch without CUDA: TORCH_PYTHON is an interpreter with torch for CUDA, and pytest.
TORCH_PYTHON ?= python3
test-gpu:
	PYTHONPATH=src $(TORCH_PYTHON) -m pytest tests/gpu

# Pairs of Python and torch, each with an environment of its own under .versions/. The interpreters must be on the PATH.
# The package index has torch for Linux with CUDA libraries only: 3 GB to download for each version of torch.
# The last one is the newest torch; `torch_private/versions.py` names it as well.
VERSIONS ?= 3.10-2.11.0 3.12-2.12.1 3.13-2.13.0 3.11-2.14.1 3.11-2.15.0
test-versions:
	@failed=""; for each in $(VERSIONS); do \
	  echo "Python $${each%-*}, torch $${each#*-}"; \
	  $(MAKE) --no-print-directory test PYTHON=python$${each%-*} TORCH=$${each#*-} VENV=.versions/$$each \
	    || failed="$$failed $$each"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# The wheel is built from the source distribution, so both are complete. TORCH=2.11.0 installs another torch.
WHEEL := $(CURDIR)/.wheel
test-wheel: $(INSTALLED)
	rm -rf dist $(WHEEL)
	$(BIN)/python -m build
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip --quiet --disable-pip-version-check install torch==$(TORCH) dist/*.whl
	$(WHEEL)/bin/python -m pip check
	awk '/^```/ { if (inside) exit; inside = /^```python/; next } inside' README.md > $(WHEEL)/train.py
	cd $(WHEEL) && bin/unshard --version && bin/torchrun --standalone --nproc-per-node=2 train.py

# In an environment of its own, which has the libraries as well. Examples that need a library also run there.
STACK := $(CURDIR)/.stack
test-stack:
	@test -x $(STACK)/bin/python || $(PYTHON) -m venv $(STACK)
	@$(STACK)/bin/python -m pip --quiet --disable-pip-version-check install torch==$(TORCH)
	@$(STACK)/bin/python -m pip --quiet --disable-pip-version-check install torch==$(TORCH) pytest safetensors xxhash \
	  --requirement tests/stack/requirements.txt --editable .
	$(STACK)/bin/python -m pytest -rA --tb=short -m "slow or not slow" tests/stack tests/test_examples.py \
	  -k "computes or recipe or lightning or accelerate"

# PYTORCH is a source checkout, best of the installed version. FILES="test/distributed/fsdp/test_fsdp_core.py" selects.
test-upstream: $(INSTALLED)
	@test -n "$(PYTORCH)" || { echo "Usage: make test-upstream PYTORCH=<source checkout>"; exit 1; }
	$(BIN)/python tests/upstream/run.py "$(PYTORCH)" $(if $(FILES),--files $(FILES))

# Without BENCH the step in float32, which every CPU is good at: `make bench BENCH="memory --cases 10m:1x64:fp32"`.
BENCH ?= step --cases 10m:1x128:fp32 --rounds 2 --steps 6 --interleave
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.$(BENCH)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

# The tools for the site are installed when they are first needed. The site needs no network: open build/site/index.html.
SITE_INSTALLED := $(VENV)/.installed-docs
$(SITE_INSTALLED): $(INSTALLED)
	@echo "installing the tools for the site into $(VENV)"
	@$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[docs]"
	@touch $@

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(SITE_INSTALLED)
	$(BIN)/python docs/site/prepare.py
	$(BIN)/python -m mkdocs build --config-file build/mkdocs.yml
	$(BIN)/python docs/site/check.py build/site

clean:
	rm -rf $(VENV) $(WHEEL) $(STACK) .versions build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
