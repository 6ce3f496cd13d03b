# Two commands matter: `make sweep` shows the whole service at work, `make test` checks it. Both set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
N ?= 20
SEED ?= 1
WITH ?=
LOCKING := --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
    --custom-compile-command 'make lock'
TORCH ?= --torch-backend cpu

.PHONY: help sweep serve up test test-fast test-postgresql lint chaos leaks bench bench-gpu bench-api bench-forecast bench-joining bench-scale bench-search rehearse lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 17

sweep: $(VENV)/.installed ## a whole sweep on real text: service, trials, result table, best checkpoint; about 3 minutes
	@exec $(BIN)/fraternal quickstart

serve: $(VENV)/.installed ## the service on http://127.0.0.1:8123, data in ./fraternal-data
	@exec $(BIN)/fraternal serve

test: lint ## every check and every test; about 50 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: lint ## without the tests that start Ray, a browser or longer training; under 2 minutes
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-postgresql: $(VENV)/.installed-dev ## the tests of what has a database, on a PostgreSQL of their own; WITH='-m "not slow"': without long ones
	FRATERNAL_TEST_DATABASE=postgresql $(BIN)/python -m pytest -n 2 --dist loadfile $(WITH)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: $(VENV)/.installed-dev ## N=20 SEED=1: sweeps that something dies of every few seconds, counted; some minutes a round
	$(BIN)/python -m tests.chaos --rounds $(N) --seed $(SEED)

bench: $(VENV)/.installed benchmarks/.fastai ## speed and memory of a step, trials side by side, a sweep's overhead; over an hour
	$(BIN)/python -m benchmarks.step --configurations small,ptb
	$(BIN)/python -m benchmarks.step --configurations small --regularizers expectation_linear_both,pi_model,prediction_norm
	$(BIN)/python -m benchmarks.step --configurations ptb --regularizers fraternal --threads 2
	$(BIN)/python -m benchmarks.step --configurations medium,wt2 --regularizers fraternal
	$(BIN)/python -m benchmarks.step --configurations ptb,wt2 --regularizers fraternal --precisions bf16
	$(BIN)/python -m benchmarks.step --configurations small,ptb,wt2 --validation
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.overhead --tokens 700

bench-gpu: $(VENV)/.installed ## on a GPU: single steps and CUDA graphs beside the textbook way, and a whole epoch; minutes
	$(BIN)/python -m benchmarks.gpu

bench-api: $(VENV)/.installed ## how long the API takes to answer with 200 sweeps in it, 20 clients at once; about 3 minutes
	$(BIN)/python -m benchmarks.api

bench-forecast: $(VENV)/.installed ## ten real sweeps beside what was forecast of them; about 15 minutes
	$(BIN)/python -m benchmarks.forecast

bench-joining: $(VENV)/.installed-dev ## from `ray start` to the first epoch on a node that joins a running sweep's cluster; about 3 minutes
	$(BIN)/python -m benchmarks.joining

bench-scale: $(VENV)/.installed-dev ## 100 sweeps on 1,000 simulated GPUs, on either database: who is busy first; about 15 minutes
	$(BIN)/python -m benchmarks.scale --database sqlite
	$(BIN)/python -m benchmarks.scale --database postgresql

bench-search: $(VENV)/.installed-dev ## the best perplexity by epochs spent, by sampler and pruner; about 15 minutes
	$(BIN)/python -m benchmarks.search

leaks: $(VENV)/.installed-dev ## 2,000 trials of next to nothing through one driver: what grows; about 4 minutes
	$(BIN)/python -m tests.leaks --trials 2000

up: ## the service and PostgreSQL in containers, on http://127.0.0.1:8123; docker/README.md has the rest
	@exec docker/up.sh

rehearse: ## WITH="--bind /etc/pip.conf": the image built and lived with, without a Docker engine; as root, about ten minutes
	$(PYTHON) docker/rehearse.py $(WITH)

# What is installed here, and so was tested, is what images get, wherever the extras allow it.
lock: $(VENV)/.installed-dev ## docker/requirements.txt anew, from what is installed here
	@$(PIP) uv
	$(BIN)/python -m pip freeze --exclude-editable | grep -v '^torch==' > docker/requirements.txt
	$(BIN)/uv pip compile --quiet pyproject.toml --extra postgres --extra s3 $(LOCKING) $(TORCH) \
	    --no-emit-package torch --output-file docker/requirements.txt
	echo 'hatchling>=1.27' | $(BIN)/uv pip compile --quiet - $(LOCKING) --output-file docker/build-requirements.txt

# The peer that steps are measured beside, in a folder of its own: it would bring another torch.
benchmarks/.fastai: benchmarks/fastai-requirements.txt $(VENV)/.installed
	@$(PIP) --no-deps --upgrade --target $@ --requirement $<
	@touch $@

clean: ## remove the environment; data stays
	rm -rf $(VENV) benchmarks/.fastai

$(VENV)/bin/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and exact: which build that is, for CPUs only or for CUDA, too, the index decides that pip asks.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing (about two minutes the first time)"
	@$(PIP) torch==2.13.0
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@
