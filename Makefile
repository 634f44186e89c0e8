PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-gpu bench docs format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Create .venv and install the package with its development tools

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("latte needs Python 3.11 or later; name one with: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench,train,convert]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(INSTALLED) ## Train a small language model here and see what it does, with a report in reports/demo.html
	@mkdir -p reports
	$(BIN)/latte demo --output reports/demo.html

# Two workers with one thread each: torch's own threads would fight over the same cores.
test: export OMP_NUM_THREADS = 1
test: $(INSTALLED) ## Lint, format, types, import contracts and the quick tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(PYTEST) -m 'not gpu and not slow and not bench' --numprocesses 2 --dist worksteal

test-slow: $(INSTALLED) ## The tests that take minutes or measure speed
	$(PYTEST) -m '(slow or bench) and not gpu'

test-gpu: $(INSTALLED) ## The tests that need a CUDA device, and the kernels' own tests on it
	$(PYTEST) tests/gpu tests/triton

bench: $(INSTALLED) ## Measure the ops beside PyTorch's softmax attention
	$(BIN)/latte bench ops

docs: $(INSTALLED_DOCS) ## Build the documentation into site/
	$(BIN)/python benchmarks/docs.py
	$(BIN)/mkdocs build --strict

format: $(INSTALLED) ## Format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove everything that make has made
	rm -rf $(VENV) build dist site reports .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -type d -name __pycache__ -prune -exec rm -rf {} +
