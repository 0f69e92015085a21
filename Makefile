# Two commands matter: `make demo` runs the main job, `make test` proves it. Everything they need is set up inside them and
# cached outside the checkout (XDG_CACHE_HOME), keyed by its inputs. Root is needed: namespaces, mounts, cgroups, CRIU.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vllmsnapshot
PYTHON ?= python3
VENV := $(CACHE)/venv-$(shell { cat requirements.lock; $(PYTHON) -V; } 2>/dev/null | sha256sum | cut -c1-12)
PY := $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/operator:$(CURDIR)/child:$(CURDIR)
export PYTHONDONTWRITEBYTECODE := 1
# A folder of wheels (torch's CPU build is not on PyPI); an existing setting wins. See docs/local-cluster.md.
export VLLMSNAPSHOT_WHEELS ?= $(wildcard $(CURDIR)/../shared/wheels)
NAME ?= dev
CLUSTER ?= local

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | column -ts $$'\t'

$(VENV)/.complete:
	@tests/setup-venv.sh "$(PYTHON)" "$(VENV)"

.PHONY: venv
venv: $(VENV)/.complete ## Create the Python environment of the pinned requirements

.PHONY: prepare
prepare: venv ## Build everything that is cached: binaries, images, model
	@$(PY) -m tests.cluster prepare

.PHONY: demo
demo: venv ## Run the main job on a local cluster: apply, capture, scale to 3, crash, recover (KEEP=1 leaves the cluster up)
	@$(PY) -m tests.demo --cluster $(CLUSTER) --name $(NAME) $(if $(KEEP),--keep)

.PHONY: demo-autoscale
demo-autoscale: venv ## Load, HPA with real Prometheus and adapter, restored replicas, scale-down: no request is cut (KEEP=1)
	@$(PY) -m tests.autoscale --name $(NAME) $(if $(KEEP),--keep)

.PHONY: screens
screens: venv ## Make the screens of the documentation anew with real vLLM, Prometheus and a browser (ARGS=--draw: of the last run)
	@$(PY) -m tests.screens --name $(NAME) $(if $(KEEP),--keep) $(ARGS)

.PHONY: chaos
chaos: venv ## Faults at random under load for MINUTES=30, then an audit (SEED=N repeats the actions of a run, KEEP=1 leaves the cluster up)
	@$(PY) -m tests.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep)

.PHONY: up down status kubectl
up: venv ## Start the local cluster
	@$(PY) -m tests.cluster up --name $(NAME)
down: venv ## Stop it and remove every trace
	@$(PY) -m tests.cluster down --name $(NAME)
status: venv ## Tell whether it is up
	@$(PY) -m tests.cluster status --name $(NAME)
kubectl: venv ## kubectl in it: make kubectl ARGS="get vsnap"
	@$(PY) -m tests.cluster --name $(NAME) kubectl $(ARGS)

.PHONY: lint
lint: venv ## ruff, mypy --strict, import layers, shell scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

.PHONY: generate
generate: venv ## Regenerate CRDs, manifests, the chart's README and dashboard, the reference pages
	$(PY) -m vllmsnapshot.api.crd deploy/crds
	$(PY) -m tools.generate
	HELM="$$($(PY) -c 'from tests.chart import helm; print(helm())')" $(PY) deploy/manifests/generate.py

.PHONY: docs
docs: venv ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

.PHONY: lock
lock: venv ## Pin the newest versions that pyproject.toml allows
	$(VENV)/bin/pip install --quiet uv
	$(VENV)/bin/uv pip compile pyproject.toml --extra dev --generate-hashes --python-version 3.11 --upgrade --quiet -o requirements.lock

.PHONY: test test-unit test-faults test-controlplane test-node test-e2e test-gpu
test: lint prepare ## Everything: lint, unit, faults, controlplane, node (real CRIU), e2e (real vLLM)
	$(PY) -m pytest tests/unit tests/faults tests/controlplane tests/node tests/e2e $(PYTEST_ARGS)
test-unit: venv ## Quick tests without a cluster
	$(PY) -m pytest tests/unit $(PYTEST_ARGS)
test-faults: venv ## Every write cut, lost and refused once, on virtual time (a part of the points; FULL=1 takes all, SEED=N repeats)
	$(PY) -m pytest tests/faults $(PYTEST_ARGS)
test-controlplane: venv ## Operator and API against a real kube-apiserver
	$(PY) -m pytest tests/controlplane $(PYTEST_ARGS)
test-node: venv ## Real containers and CRIU with a small engine
	$(PY) -m pytest tests/node $(PYTEST_ARGS)
test-e2e: venv ## The whole system with real vLLM
	$(PY) -m pytest tests/e2e $(PYTEST_ARGS)
# Needs no environment: where there is a GPU there may be no network to make one from.
test-gpu: ## Prove it on this machine's GPU, docs/gpu.md (ARGS=--fake tries the script without one)
	@$(PYTHON) -m tests.gpu $(ARGS)

.PHONY: format
format: venv ## Format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
