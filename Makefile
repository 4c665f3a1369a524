# Works on a machine that has only Python 3.11 or later and make.
#   make train   the digits experiment
#   make test    the tests without the slow ones: 6 minutes on two cores, 12 on slow ones
#   make test-all  every test: 15 minutes on two cores, about 40 on slow ones
#   make lint    format, lint and types
#   make extras  whether the extras of pyproject.toml and the pins fit together
#   make docs    the site of the documentation, in site/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# uv installs in a tenth of pip's CPU time. Where it cannot be had or fails (a mirror that only pip knows), pip installs.
define install
@index=$$($(BIN)/python -m pip config get global.index-url 2>/dev/null); \
$(BIN)/python -m pip install --quiet --disable-pip-version-check uv -c constraints.txt 2>/dev/null && \
VIRTUAL_ENV=$(abspath $(VENV)) UV_DEFAULT_INDEX=$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$index}} $(BIN)/uv pip install --quiet -e '.$(1)' -c constraints.txt || \
{ echo "uv did not install jaxdl; pip does, which takes longer"; \
  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(1)' -c constraints.txt; }
endef

# Where there is an NVIDIA GPU `make train` installs JAX's packages for it: for CUDA 13 or 12, as its driver has.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -1)
GPU := $(if $(filter 12,$(CUDA)),cuda12,$(if $(filter-out 1 2 3 4 5 6 7 8 9 10 11,$(CUDA)),cuda13))

.PHONY: train test test-all lint format extras docs clean

train: $(VENV)/installed
	$(BIN)/python -m jaxdl.train --config configs/digits.py --workdir runs/digits

# The tests start many processes. Where PYTHONDONTWRITEBYTECODE is set, each would compile the 300 modules anew.
test: $(VENV)/installed-test
	$(BIN)/python -m compileall -q jaxdl
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/installed-test
	$(BIN)/python -m compileall -q jaxdl
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Whether all extras together can be installed with the pins of constraints.txt. Nothing is installed.
extras: $(VENV)/installed-test
	@index=$$($(BIN)/python -m pip config get global.index-url 2>/dev/null); \
	if [ -x $(BIN)/uv ]; then \
	  UV_DEFAULT_INDEX=$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$index}} $(BIN)/uv pip compile --quiet --all-extras \
	    --python $(BIN)/python -c constraints.txt -o $(VENV)/extras.txt pyproject.toml && echo "all extras fit together"; \
	else echo "not checked whether the extras fit together: uv is not installed"; fi

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site is in site/: open site/index.html"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxdl needs Python 3.11 or later; give one with: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(if $(GPU),@echo "an NVIDIA GPU with a driver for CUDA $(CUDA): installing jaxdl[$(GPU)]")
	$(call install,$(if $(GPU),[$(GPU)]))
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,[test])
	touch $@ $(if $(GPU),,$(VENV)/installed)

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,[docs])
	touch $@ $(if $(GPU),,$(VENV)/installed)

clean:
	rm -rf $(VENV) runs site
