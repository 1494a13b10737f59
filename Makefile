.DEFAULT_GOAL := help
PYTHON ?= python
# Tests are processes of one thread each (docs/design.md): more threads than cores are slower.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
WORKERS ?= 2

.PHONY: help setup lint format types test test-fast table styles-table faults clean-matrix calibration costs bench-checker record-speed html-speed baseline all

help:  ## show this text
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | sort

setup:  ## install the package with everything the tests need
	$(PYTHON) -m pip install -e '.[hf,test]'

lint:  ## ruff: style and format
	$(PYTHON) -m ruff check spmd spmd_verify tests examples reports
	$(PYTHON) -m ruff format --check spmd spmd_verify tests examples reports

format:  ## rewrite the sources in ruff's format
	$(PYTHON) -m ruff check --fix spmd spmd_verify tests examples reports
	$(PYTHON) -m ruff format spmd spmd_verify tests examples reports

types:  ## mypy
	$(PYTHON) -m mypy

test:  ## all tests
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal tests

test-fast:  ## tests without the slow ones and without real ranks
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal -m 'not slow and not dist' tests

table:  ## examples and Hugging Face types under the engine's styles; goes on where it was stopped
	PYTHONPATH=. $(PYTHON) reports/table.py

faults:  ## the fault bench: every broken style and its corrected twin
	PYTHONPATH=. $(PYTHON) reports/faults.py

styles-table:  ## every style on ten models at 2 and 4 ranks; goes on where it was stopped
	PYTHONPATH=. $(PYTHON) reports/styles.py

clean-matrix:  ## false alarms: right styles on models, meshes, dtypes and seeds
	PYTHONPATH=. $(PYTHON) reports/clean_matrix.py

calibration:  ## error / floor of right candidates: the evidence for the limits c
	PYTHONPATH=. $(PYTHON) reports/calibration.py

costs:  ## milliseconds per graph node of capture and partition, on a quiet machine
	$(PYTHON) reports/costs.py

html-speed:  ## size, render time and time to interactive of a large HTML report
	$(PYTHON) reports/html_speed.py

bench-checker:  ## what checking costs beside the steps, in three ratios; on a quiet machine
	PYTHONPATH=. $(PYTHON) reports/checker_costs.py

# What `make baseline` runs; `make baseline MESH=4` has another mesh.
BASELINE_CASES ?= examples/mlp.py examples/conv_groupnorm.py
MESH ?= 2

baseline:  ## examples under the engine's and torch's styles: reports/baseline.json, history.jsonl
	record=$$(mktemp -d)/record.json && export PYTHONPATH=. && \
	$(PYTHON) -m spmd_verify $(BASELINE_CASES) --styles engine,torch --mesh $(MESH) --exit-zero \
	  --no-cache --report json=$$record && \
	$(PYTHON) -m spmd_verify baseline history reports/history.jsonl $$record \
	  --page reports/history.md && \
	$(PYTHON) -m spmd_verify baseline accept $$record reports/baseline.json
record-speed:  ## seconds to write and to read again a record of 160,000 rows
	PYTHONPATH=. $(PYTHON) reports/record_speed.py

all: lint types test  ## what CI runs
