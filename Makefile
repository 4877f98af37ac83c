# Everything a fresh clone needs: Python 3.11 or newer, and make.
#   make quickstart   train a small GPT on 8 virtual devices (one to two minutes)
#   make test         the suite (make test-long: the tests that take longest)
PYTHON ?= python3.11
VENV   ?= .venv
EXTRAS ?= docs,notebooks,tpu-aot,cuda-aot
BIN    := $(VENV)/bin

# The interpreter must be able to make a virtual environment; fall back to python3 where 3.11 has no name of its own.
PYTHON := $(shell command -v $(PYTHON) >/dev/null 2>&1 && echo $(PYTHON) || echo python3)
# Python compiles a module to bytecode when it imports it first; pip would compile some ten thousand.
# It must be allowed to keep it: the tests start hundreds of processes, and `import jax, flax` takes 8 s without, 3 s with.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile
PINS    = scripts/constraints-$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt

.PHONY: help hooks quickstart docs notebooks test test-long test-exhaustive test-releases test-parity third-party fuzz fuzz-steps lint types \
	format clean environment full-environment parity-environment
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

# Three environments in one folder: the library and its command for quickstart; the test tools too for `make test`; for the
# rest also the tools of the documentation, and compilers for TPUs and GPUs where there are any (Linux on x86-64), 1.5 GB.
$(VENV)/.base: pyproject.toml $(wildcard scripts/constraints-*.txt)
	@$(PYTHON) -c 'import sys; sys.exit("fsdp_jax needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c $(PINS) -e '.[train,plan]'
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python $(INSTALL) -c $(PINS) -e '.[test]'
	@touch $@

$(VENV)/.full: $(VENV)/.test
	$(BIN)/python $(INSTALL) -c $(PINS) -e '.[$(EXTRAS)]'
	@touch $@

environment: $(VENV)/.test ## what `make test` needs, in a virtual environment

full-environment: $(VENV)/.full ## what the long tests and the documentation need too

hooks: $(VENV)/.test ## run ruff and mypy before each commit
	$(BIN)/python $(INSTALL) pre-commit
	$(BIN)/pre-commit install

quickstart: $(VENV)/.base ## train on the standard library's own source, 8 virtual devices
	$(BIN)/fsdp-jax train configs/quickstart.yaml

docs: $(VENV)/.full ## the site, docs/_build/html/index.html; a warning is an error
	$(BIN)/python -m sphinx -b html -c docs -E -a -W --keep-going -q . docs/_build/html

notebooks: $(VENV)/.full ## run the notebooks, and keep what they show
	JAX_PLATFORMS=cpu PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/run_notebooks.py notebooks/*.ipynb

test: $(VENV)/.test ## every promise once, in minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# Some of these wait for processes that they start, hence one worker more than cores. OF_EACH=2: of each test at most two
# sets of parameters, drawn by its name.
test-long: $(VENV)/.full ## combinations, processes, and programs for GPUs and TPUs (OF_EACH)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(if $(OF_EACH),--of-each $(OF_EACH)) -m "long and not exhaustive"

test-exhaustive: $(VENV)/.full ## the rest of long enumerations, of which CI runs some
	$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive

# A failing input is reduced, and printed with the command that finds it again: make fuzz TARGET=jsonl SEED=7
N ?= 2000
fuzz: $(VENV)/.test ## N=2000 hostile or damaged inputs for each reader of files and settings (SEED, TARGET)
	PYTHONPATH=tests $(BIN)/python -m fuzz --inputs $(N) $(if $(SEED),--seed $(SEED)) $(if $(TARGET),--target $(TARGET))

# Some five CPU seconds a case; one that fails is printed with the command that runs it again.
fuzz-steps: N = 500
fuzz-steps: $(VENV)/.test ## N=500 random models and settings, trained and compared with plain Flax and optax (SEED, JSON)
	$(BIN)/python scripts/fuzz_steps.py --cases $(N) --processes 2 $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))

test-releases: $(VENV)/.full ## the tests that meet what changes between releases of jax; of each one set of parameters, of compat all
	$(BIN)/python -m pytest -n 2 --dist worksteal --of-each 1 -m "releases and not long"
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "releases and long and not exhaustive" tests/compat

# torch, transformers and timm in an environment of their own: nothing else here needs them. (timm asks for torchvision,
# which the models that are compared do without; torch chooses its own releases of NVIDIA's packages.)
PARITY := .venv-parity
$(PARITY)/.ready: pyproject.toml $(wildcard scripts/constraints-*.txt)
	$(PYTHON) -m venv $(PARITY)
	grep -v '^nvidia-' $(PINS) > $(PARITY)/constraints.txt
	$(PARITY)/bin/python $(INSTALL) -c $(PARITY)/constraints.txt -c scripts/constraints-parity.txt \
		-e '.[test]' torch transformers pillow peft bitsandbytes qwix
	$(PARITY)/bin/python $(INSTALL) --no-deps -c scripts/constraints-parity.txt timm
	@touch $@

parity-environment: $(PARITY)/.ready ## torch, transformers and peft too, in an environment of its own

test-parity: $(PARITY)/.ready ## against torch, transformers and peft, in an environment of its own
	$(PARITY)/bin/python -m pytest -n 2 --dist worksteal tests/parity

third-party: ## published Flax models, unmodified, against an unsharded control, in an environment of its own
	$(PYTHON) scripts/third_party.py

lint: $(VENV)/.test ## ruff, format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test ## mypy
	$(BIN)/mypy

format: $(VENV)/.test ## apply ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environments, the site and what runs left
	rm -rf docs/_build $(VENV) .venv312 $(PARITY) .venv-third-party .jax_cache output
