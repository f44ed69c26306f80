# Two commands matter: `make demo` (the main job, offline) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OPENBLAS_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TRANSFORMERS_VERBOSITY ?= error

.PHONY: demo test coverage test-browser lint format bench soak clean

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Rolltape needs Python >= 3.11; found $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/python cli.py demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2

# The core and the log, children included. What needs a small file system or strace is skipped where there is none.
coverage: $(VENV)/.dev
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -q -n 2 tests/core tests/store --cov=core --cov=store --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=99.5

test-browser: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m browser

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each is `python -m benchmarks.NAME`; the experiments take most of an hour and are run by hand (docs/experiments.md).
BENCHMARKS = $(filter-out made_log recorded_steps experiment%,$(basename $(notdir $(wildcard benchmarks/*.py))))
bench: $(VENV)/.dev
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "soak or hypothesis" --hypothesis-profile explore --timeout 3600

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
