# Two commands are the complete set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() or 1, 8))")

.PHONY: demo test pytest faults docs bench lint types format clean

demo: $(INSTALLED)  ## train and compare on the built-in data, write runs/demo/report.html
	$(BIN)/vsm demo --output runs/demo --overwrite

test: lint  ## lint, types and tests
	$(MAKE) --no-print-directory --jobs 2 types pytest

pytest: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

faults: $(INSTALLED)  ## damage files, kill processes, fill disks; write docs/faults.md; 1 if anything is wrong
	$(BIN)/python -m faults --minutes 25 --output docs/faults.md

docs: $(INSTALLED)  ## build the documentation into site/index.html; every warning is an error
	rm -rf site
	$(BIN)/python -m sphinx -q -W --keep-going -c website -d site/.doctrees docs site
	rm -rf site/.doctrees

bench: $(INSTALLED)  ## measure speed, write benchmarks/results.md and results.json
	$(BIN)/vsm bench --full --output benchmarks

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[plots,photos,slurm,serve,postgres,export,docs,dev]"
	touch $@

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache
