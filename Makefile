# `make demo` and `make test` need Python 3.11 to 3.13, a C++ compiler and nothing else. PYTHON=python3.12 picks another
# Python for the virtual environment.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODELS := $(VENV)/.models

.PHONY: demo test fast gpu check format clean toolchain

demo: $(STAMP) toolchain
	$(PY) -m fusepass demo

# Two workers: a test may itself use two threads, and compiles run in processes of their own.
test: $(MODELS) toolchain
	$(PY) -m pytest -n 2

fast: $(MODELS) toolchain
	$(PY) -m pytest -n 2 -m "not slow"

# On a machine with a GPU, in under nine minutes. With PY=python3 it runs in that Python as it is, and installs nothing.
gpu: $(if $(filter command line,$(origin PY)),,$(STAMP))
	status=0; $(PY) -m pytest tests/gpu -m gpu -n 4 || status=1; \
	    $(PY) -m bench gpu --device cuda --results bench/results || status=1; exit $$status

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs again only when what to install has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	    echo "fusepass needs Python 3.11 to 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -e '.[dev]' -c constraints.txt
	touch $@

# Real models, for the tests. timm and torchscale would bring torchvision, which nothing of theirs that is tested calls.
$(MODELS): $(STAMP)
	$(PY) -m pip install -e '.[models]' -c constraints.txt
	$(PY) -m pip install --no-deps timm torchscale fairscale -c constraints.txt
	touch $@

toolchain: $(STAMP)
	@$(PY) -c 'from fusepass import environment; import sys; sys.exit(environment.missing_for_cpu())'
