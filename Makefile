# Every target sets up what it needs: a fresh machine needs Python >= 3.11 (with venv) and make, nothing else.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.installed-to-run
STAMP := $(VENV)/.installed
E2E_VENV := .venv-e2e
PROTO_VENV := .venv-proto
FUZZ_VENV := .venv-fuzz
FUZZ_S ?= 600
SOAK_S ?= 1800
PACKAGES := gateway indexer scorer bench
PROTOS := $(wildcard proto/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults lint audit format e2e bench fuzz soak docs release-check proto clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

$(RUNS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not a Python >= 3.11; choose another with make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
		{ echo "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# Some 600 MB more, most of it the tools that hold deploy/ to its formats.
$(STAMP): $(RUNS)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## only create .venv and install (the other targets do it by themselves)

demo: $(RUNS) ## a small fleet of fake engines on this machine, routed and compared (ARGS=--pd, --json)
	$(BIN)/warmroute demo $(ARGS)

# What only computes runs on all cores; what listens, waits and measures silence runs by itself.
test: $(STAMP) ## unit, property and hermetic tests (ARGS="-k name" for some)
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -n auto --dist worksteal tests/unit tests/property tests/field tests/fuzz
	$(BIN)/python -m pytest tests/hermetic tests/docs
else
	$(BIN)/python -m pytest -m "not e2e and not faults" $(ARGS)
endif

test-faults: $(STAMP) ## a fleet of real processes under load: kills, cuts, storms (ARGS="-k redis", "--seed 2")
	$(BIN)/python -m pytest -m faults tests/faults $(ARGS)

lint: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(STAMP) ## bandit, and known vulnerabilities of what is installed
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive $(PACKAGES)
	$(BIN)/python .ci/audit.py

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: $(STAMP) ## tests against a real engine in a venv of its own (large: it installs vLLM)
	bash tests/e2e/setup.sh
	WARMROUTE_E2E_VENV=$(E2E_VENV) $(BIN)/python -m pytest -m e2e tests/e2e $(ARGS)

bench: $(STAMP) ## micro-benchmarks (ARGS=--json)
	$(BIN)/python -m bench micro $(ARGS)

fuzz: ## coverage-guided, whatever reads bytes of others (FUZZ_S=600, in seconds; ARGS="--target kv_events")
	@test -x $(FUZZ_VENV)/bin/python || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install --quiet --editable '.[otel]' hypothesis
	$(FUZZ_VENV)/bin/python -m pip install --quiet 'atheris>=3,<4' || \
		echo "atheris does not install here: mutations instead, without looking at what they reach" >&2
	$(FUZZ_VENV)/bin/python -m tests.fuzz.run --seconds $(FUZZ_S) $(ARGS)

soak: $(STAMP) ## does anything grow, is anything left behind? (SOAK_S=1800, in seconds; ARGS=--json)
	$(BIN)/python -m tests.soak.run --seconds $(SOAK_S) $(ARGS)

docs: $(STAMP) ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release-check: $(STAMP) ## wheel and sdist into dist/, each tried in a bare venv; is the version one to release?
	$(BIN)/python .ci/release.py

proto: ## regenerate gateway/pb from proto/*.proto
	@test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet 'grpcio-tools==1.71.2'
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I gateway/pb=proto --python_out=. --pyi_out=. \
		$(PROTOS:proto/%=gateway/pb/%)

clean: ## remove the venvs, caches and build output
	rm -rf $(VENV) $(E2E_VENV) $(PROTO_VENV) $(FUZZ_VENV) .fuzz site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .e2e
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
