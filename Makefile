# `make` lists the targets. Set-up runs once, into .venv, and installs what the target needs;
# PYTHON=/path/to/python or an activated environment that has torch is used as it is instead; for
# a GPU also python3, where that has torch and there is no .venv.
# TORCH=2.13.0 asks for another torch than the default, which has an environment of its own.

NEWEST_TORCH := $(shell sed -n 's/^torch==//p' requirements/torch.txt)
TORCH ?= $(NEWEST_TORCH)
VENV := .venv$(if $(filter-out $(NEWEST_TORCH),$(TORCH)),-$(TORCH))

ACTIVE := $(firstword $(wildcard $(addsuffix /bin/python,$(VIRTUAL_ENV) $(CONDA_PREFIX))))
HAS_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)

ifneq ($(PYTHON),)
PY := $(PYTHON)
else ifeq ($(origin TORCH)$(if $(ACTIVE),, no other),file)
# Where TORCH was given, the activated environment is not asked what it has.
PY := $(shell $(ACTIVE) -c '$(HAS_TORCH)' && echo $(ACTIVE))
endif
ifeq ($(PY)$(wildcard $(VENV)),)
# A machine with a GPU that is lent for minutes may have torch, and no network to install it from.
ifneq ($(filter gpu bench-gpu cuda,$(MAKECMDGOALS)),)
PY := $(shell python3 -c '$(HAS_TORCH)' 2>/dev/null && echo python3)
endif
endif
ifeq ($(PY),)
PY := $(VENV)/bin/python
FOR_TRAIN := $(VENV)/.train
FOR_EXAMPLES := $(VENV)/.examples
FOR_TEST := $(VENV)/.test
FOR_CLIENTS := $(VENV)/.clients
FOR_DEV := $(VENV)/.dev
FOR_DOCS := $(VENV)/.docs
else
# Nothing is installed into an environment that is not ours.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Two or more test files at a time where pytest-xdist is installed, one otherwise. conftest.py says
# in which order.
HAS_XDIST := import importlib.util, sys; sys.exit(importlib.util.find_spec("xdist") is None)
PARALLEL = $(shell $(PY) -c '$(HAS_XDIST)' && printf %s '-n auto --dist loadfile --no-loadscope-reorder')

# Hundreds of processes of the tests import the package; without bytecode each compiles it anew.
check test test-ci test-all test-device test-versions cuda: export PYTHONDONTWRITEBYTECODE :=

TRAIN_ARGS = $(if $(STEPS),--steps $(STEPS)) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup train train-2d train-pipeline train-moe train-resnet train-weather \
	train-recommender check test test-ci test-all test-versions test-device cuda lint format dist-check release bench \
	bench-gpu gpu bench-ckpt bench-clip bench-estimate bench-choosing bench-faults bench-policies bench-links \
	bench-offload bench-uneven optimizers subclasses docs clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | awk -F ':.*## *' '{printf "  make %-17s %s\n", $$1, $$2}'
	@echo
	@echo "  NPROC=4 sets the number of processes, STEPS=1000 the steps of the training, and"
	@echo "  ARGS=\"--bf16 --ac\" its options (ARGS=--help lists them). PYTHON=... or an activated"
	@echo "  environment is used instead of .venv where it has torch. TORCH=2.13.0 makes and uses"
	@echo "  .venv-2.13.0."

setup: $(FOR_DEV) $(FOR_CLIENTS) $(FOR_DOCS)  ## make .venv with all that any target needs (each installs its own part)

train: $(FOR_TRAIN)  ## train a language model with sharded parameters
	@$(PY) examples/launch.py $(if $(NPROC),--nproc-per-node $(NPROC)) \
		examples/train_lm.py $(TRAIN_ARGS)

train-2d: $(FOR_TRAIN)  ## a small one, tensor parallel x sharded, on 2 x 2 processes
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_2d.py $(TRAIN_ARGS)

train-pipeline: $(FOR_TRAIN)  ## pipeline stages x sharded, 2 x 2; ARGS="--schedule ZBVZeroBubble"
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_pipeline.py $(TRAIN_ARGS)

train-moe: $(FOR_TRAIN)  ## experts on another mesh than the rest, on 4 processes
	@$(PY) examples/launch.py --nproc-per-node 4 examples/train_moe.py $(TRAIN_ARGS)

train-resnet train-weather train-recommender: train-%: $(FOR_EXAMPLES)
	@$(PY) examples/launch.py $(if $(NPROC),--nproc-per-node $(NPROC)) \
		examples/train_$*.py $(TRAIN_ARGS)

train-resnet:  ## ResNet-18 on handwritten digits; ARGS="--amp --strategy grad"
train-weather:  ## a weather transformer; ARGS="--wrap layers --ac"
train-recommender:  ## deep and wide, with embedding tables; ARGS="--replicate-below 65536"

check: $(FOR_DEV)  ## lint, and run for two minutes the tests nearest to what changed; BASE=commit
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/check.py $(if $(BASE),--base $(BASE)) $(PARALLEL) $(ARGS)

test: $(FOR_TEST)  ## run the quick tests, each with as many of its cases as fit in a second
	$(PY) -m pytest $(PARALLEL) --sample $(ARGS)

test-ci: $(FOR_TEST)  ## run the tests with all cases, each on one of its world sizes
	$(PY) -m pytest $(PARALLEL) $(ARGS)

test-all: $(FOR_CLIENTS) $(FOR_DOCS)  ## run the tests on all world sizes, their long versions, test-device
	$(PY) -m pytest $(PARALLEL) -m "long or not long" $(ARGS)
	$(PY) -m pytest $(PARALLEL) --device testdev $(ON_DEVICE)

# What takes data between streams, the host and other ranks.
ON_DEVICE = $(foreach name,accumulation activation_checkpoint batches checkpoint_device_bytes \
	checkpoint_elastic checkpoint_exact checkpoint_parts clip comm_policy compile_step experts extensions \
	finalization freed_early frozen_kept full_state gather_budget generated grad_dtype gradients \
	groups hsdp large_root lost_gradients merging mixed_precision offload offload_budget \
	one_rank_alone optim_kinds optim_local optim_whole parallel_2d parity_models peer pipelines \
	prefetch recovery replicate reshard shared_params step_in_backward tensor_parallel \
	tensor_subclasses two_ranks views,$(wildcard tests/*/test_$(name).py))

test-device: $(FOR_TEST)  ## run suites on a device of threads, or ARGS=tests/core/test_offload.py
	$(PY) -m pytest $(PARALLEL) --device testdev $(or $(ARGS),$(ON_DEVICE))

test-versions: $(FOR_TEST)  ## run the tests that depend on torch's version; TORCH=2.13.0
	$(PY) -m pytest $(PARALLEL) --torch-versions $(ARGS)

cuda: $(FOR_TEST)  ## run the tests that need a GPU; without one, name them
	$(PY) -m pytest -m cuda -v -rs $(ARGS)

lint: $(FOR_DEV)  ## check format, style, types and the English of the pages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/prose.py

format: $(FOR_DEV)  ## format the code and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(FOR_DOCS)  ## build the site into build/docs; ARGS=linkcheck checks external links
	$(PY) -m sphinx -W --keep-going -n -q -d build/docs-cache -b $(or $(ARGS),html) \
		docs build/$(if $(ARGS),docs-$(ARGS),docs)

bench: $(FOR_TRAIN)  ## compare with DDP, FSDP1 and torch's FSDP2
	$(PY) -m benchmarks $(ARGS)

gpu: $(FOR_TEST)  ## all that one GPU can show, 3 x 570 s: PART=A truth, B figures, C the rest
	$(PY) -m benchmarks.gpu_session $(if $(PART),--part $(PART)) $(ARGS)

bench-gpu: $(FOR_TRAIN)  ## on one GPU: step time, memory, a timeline (in small on the CPU)
	$(PY) -m benchmarks.gpu $(ARGS)

bench-ckpt: $(FOR_TRAIN)  ## compare checkpoints with raw writes and torch's DCP
	$(PY) -m benchmarks.checkpoint $(ARGS)

bench-clip: $(FOR_TRAIN)  ## compare gradient clipping with torch's
	$(PY) -m benchmarks.clip $(ARGS)

bench-estimate: $(FOR_TRAIN)  ## compare estimates with runs, and plans with published tables
	$(PY) -m benchmarks.estimate $(ARGS)
	$(PY) -m benchmarks.published

bench-policies: $(FOR_TRAIN)  ## fewer bytes on a link of limited speed (needs root)
	$(PY) -m benchmarks.policies $(ARGS)

bench-faults: $(FOR_TRAIN)  ## faults at random moments of elastic training on two hosts (needs root)
	$(PY) -m benchmarks.faults $(ARGS)

bench-links: $(FOR_TRAIN)  ## strategies on two hosts with a link of limited speed (needs root)
	$(PY) -m benchmarks.links $(ARGS)

bench-uneven: $(FOR_TRAIN)  ## batches by speed on two hosts, one of them slow (needs root)
	$(PY) -m benchmarks.uneven $(ARGS)

bench-offload: $(FOR_TRAIN)  ## bytes and time with activations or optimizer state in host memory
	$(PY) -m benchmarks.offload --write docs/offload.md $(ARGS)

bench-choosing: $(FOR_EXAMPLES)  ## time and memory of every strategy on the examples
	$(PY) -m benchmarks.choosing $(ARGS)

optimizers: $(FOR_CLIENTS)  ## train with every optimizer of six libraries; writes docs/optimizers.md
	$(PY) -m benchmarks.optimizers --write docs/optimizers.md $(ARGS)

subclasses: $(FOR_TEST)  ## write the tables of docs/subclasses.md, whose cells are tests
	PYTHONPATH=.:tests/support $(PY) -m subclass_matrix docs/subclasses.md

dist-check: $(FOR_DEV)  ## build wheel and sdist, install and import them on each Python there is
	$(PY) tools/dist_check.py $(ARGS)

release: $(FOR_DEV)  ## build, check and describe a release in dist/; URL=address of the repository
	$(PY) tools/release.py --url $(or $(URL),$(error URL=https://... is the repository)) $(ARGS)

clean:  ## remove what the other targets made
	rm -rf .venv .venv-* runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each set of packages builds on the one before it.
$(VENV)/.train: requirements/train.txt
$(VENV)/.examples: requirements/examples.txt $(VENV)/.train
$(VENV)/.test: requirements/test.txt $(wildcard requirements/test-*.txt) $(VENV)/.examples
$(VENV)/.dev: requirements/dev.txt $(VENV)/.test
$(VENV)/.clients: requirements/clients.txt $(wildcard requirements/clients-*.txt) $(VENV)/.test
# Beside them: nothing but the site needs it.
$(VENV)/.docs: requirements/docs.txt $(VENV)/.train

$(VENV)/.train $(VENV)/.examples $(VENV)/.test $(VENV)/.dev $(VENV)/.clients $(VENV)/.docs: tools/environment.py pyproject.toml
	@for python in python3.12 python3.13 python3.11 python3.14 python3; do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "needs Python 3.11 or later with venv, or PYTHON=... that has torch" >&2; exit 1; \
	fi; \
	$$found tools/environment.py $(VENV) --torch $(TORCH) $(patsubst .%,%,$(notdir $@))
	@touch $@
