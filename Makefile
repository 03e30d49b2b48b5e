# From a clean clone: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo

.PHONY: help demo test docs test-slow browser faults mutation check pythons clean
help:
	@echo "make demo       train on MNIST at epsilon 1, sample, evaluate, verify"
	@echo "make test       all checks and all fast tests"
	@echo "make docs       the site, into site/; make test builds it too, and runs the code on its pages"
	@echo "make test-slow  tests that take minutes or need the network"
	@echo "make browser    the pages and the studio in a real Chromium, which must be installed"
	@echo "make faults     60 kills at random moments, 200 injected faults: crashes, full disks, second writers"
	@echo "make mutation   mutation testing of privacy/, bounded/ and the wiring, on all cores; hours on a few"
	@echo "make check      ruff, mypy, import contracts"
	@echo "make pythons    the wheel, installed and tried on every Python from 3.11 to 3.13 that is at hand"

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "datalens needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/datalens data get mnist
	rm -rf $(DEMO)
	$(BIN)/datalens train --data mnist --epsilon 1 --delta 1e-5 --out $(DEMO)
	$(BIN)/datalens verify $(DEMO)
	$(BIN)/datalens sample $(DEMO) --count 10000 --out $(DEMO)/synthetic.npz
	$(BIN)/datalens evaluate $(DEMO)/synthetic.npz --data mnist --classifier augmented --seeds 1 --epochs 8
	@echo "The page to read, and to hand on: $(DEMO)/release/report.html"
	@echo "The synthetic data set, with its certificate inside: $(DEMO)/synthetic.npz"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile --cov=datalens --cov-report=
	$(BIN)/python -m coverage report --include='*/datalens/privacy/*,*/datalens/bounded/*,*/datalens/private/partition.py,*/datalens/files.py' \
	  --show-missing --fail-under=100

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site: site/index.html"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	DATALENS_BROWSER=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/browser

faults: $(STAMP)
	$(BIN)/python tests/e2e/kills.py --kills 60
	$(BIN)/python tests/e2e/faults.py --faults 200

mutation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py --jobs $$(nproc)

pythons: $(STAMP)
	$(BIN)/python tools/pythons.py

clean:
	rm -rf $(VENV) runs build dist site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
