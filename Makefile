# Works on a machine that has only Python 3.11 or later and make.
#   make train   the digits experiment
#   make test    the tests without the slow ones: 12 minutes on two cores
#   make test-all  every test: 25 minutes on two cores
#   make lint    format, lint and types
#   make docs    the site of the documentation, in site/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-all lint format docs clean

train: $(VENV)/installed
	$(BIN)/python -m jaxdl.train --config configs/digits.py --workdir runs/digits

# The tests start hundreds of processes. Where PYTHONDONTWRITEBYTECODE is set, each would compile the 300 modules anew.
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

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site is in site/: open site/index.html"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxdl needs Python 3.11 or later; give one with: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) runs site
