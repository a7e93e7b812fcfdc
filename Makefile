# Everything is set up inside the clone (.venv, .cache); nothing here calls sudo.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
# The one place that says it; tests/unit/project/test_versions.py holds chart, kustomization and docs to it.
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
AUDIT_TOOLS := pip-audit==2.10.1 cyclonedx-bom==7.5.0
# Builds the documents' site from mkdocs.yml: the maintained successor of Material for MkDocs. Not among the tools of the
# tests: nothing else needs it.
DOCS_TOOLS := zensical==0.0.73

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: demo
demo: ## a pod's FPGA is programmed, used, scrubbed and given back (DEMO_ARGS="-v --kubelet extended")
	@bash .ci/setup runtime
	@.venv/bin/fpga-plugin demo $(DEMO_ARGS)

# Tests' modules are compiled once, not again by each worker of each run.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait for processes more than they compute, so there are more workers than processors.
PROCESSORS := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
SIDE_BY_SIDE = -n $(or $(WORKERS),$$((3 * $(PROCESSORS)))) --dist worksteal

.PHONY: test
test: ## unit and integration tests, side by side (PYTEST_ARGS="-k lock", SEED=1, WORKERS=0)
	@bash .ci/setup dev
	@bash .ci/deps --ci
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "hypothesis seed $$seed (again: make test SEED=$$seed)"; \
	$(PYTHON) -m pytest -q $(SIDE_BY_SIDE) --hypothesis-seed=$$seed -o faulthandler_timeout=120 -o cache_dir=.cache/pytest \
	  $(wildcard tests/unit tests/integration tests/kernel/guest/test_drivers.py) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: ## unit tests alone, with a sixth of hypothesis' examples (PYTEST_ARGS="-k lock")
	@bash .ci/setup dev
	@HYPOTHESIS_PROFILE=fast $(PYTHON) -m pytest -q -n $(or $(WORKERS),$(PROCESSORS)) --dist worksteal \
	  -o faulthandler_timeout=120 tests/unit $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: ## every reader of foreign bytes, fuzzed (FUZZ_SECONDS=20 each, FUZZ_ARGS="policy ids")
	@bash .ci/setup dev
	@$(PYTHON) tests/fuzz --seconds $${FUZZ_SECONDS:-20} $(FUZZ_ARGS)

.PHONY: test-kernel
test-kernel: ## the real DFL drivers in a virtual machine (KERNEL_ARGS="tests/kernel/guest -k fifo")
	@bash .ci/setup dev
	@bash .ci/deps --ci kernel
	@$(PYTHON) tests/kernel $(KERNEL_ARGS)

.PHONY: test-alveo
test-alveo: ## AMD's drivers of Alveo cards in the same machine (KERNEL_ARGS="tests/kernel/guest/test_alveo_mask.py")
	@bash .ci/setup dev
	@bash .ci/deps --ci kernel
	@$(PYTHON) tests/kernel --alveo $(KERNEL_ARGS)

.PHONY: test-kubelet
test-kubelet: ## the real kubelet with real containers, as root (K8S=1.32 or 1.37, PYTEST_ARGS="-k life")
	@bash .ci/setup dev
	@bash .ci/deps --ci kubelet
	@$(PYTHON) tests/kubelet/namespace.py $${K8S:-1.36} $(PYTHON) -m pytest tests/kubelet -q $(PYTEST_ARGS)

.PHONY: test-kubelet-1.32
test-kubelet-1.32: ## where an older kubelet may differ: re-registration, and when it forgets a pod
	@$(MAKE) --no-print-directory test-kubelet K8S=1.32 \
	  PYTEST_ARGS="-k 'restart or finished or deleted or away' $(PYTEST_ARGS)"

.PHONY: test-dra
test-dra: ## claims with the real scheduler, kubelet and containerd 2, as root (takes Go; K8S=1.37, PYTEST_ARGS="-k taint")
	@bash .ci/setup dev
	@bash .ci/deps --ci kubelet
	@$(PYTHON) tests/dra/cluster.py $${K8S:-1.36} $(PYTHON) -m pytest tests/dra --ignore-glob='*/test_pods*' -q $(PYTEST_ARGS) || [ $$? = 5 ]
	@$(PYTHON) tests/dra/pods_namespace.py $${K8S:-1.36} $(PYTHON) -m pytest -q $(PYTEST_ARGS)

.PHONY: fleet
fleet: ## hundreds of plugins with one real API server and scheduler (takes Go; FLEET_ARGS="--nodes 20 --pods 200")
	@bash .ci/setup dev
	@$(PYTHON) tests/dra/fleet.py $(FLEET_ARGS)

.PHONY: image
image: ## build the image with docker, podman or buildah (BASE=debian:bookworm-slim@sha256:..., IMAGE=..., TOOL=buildah)
	@[[ "$${BASE:-}" =~ @sha256:[0-9a-f]{64}$$ ]] || { \
	  echo 'image: BASE has to name a Debian release with its digest, so that the same source makes the same' >&2; \
	  echo '  image: make image BASE=debian:bookworm-slim@sha256:... (the digest: docker pull debian:bookworm-slim)' >&2; \
	  exit 2; }; \
	tool=$${TOOL:-$$(command -v docker || command -v podman || command -v buildah)} || \
	  { echo 'image: there is neither docker, podman nor buildah here' >&2; exit 2; }; \
	[[ -n $$(git status --porcelain 2>&1) ]] || revision=$$(git rev-parse HEAD); \
	$$tool build --build-arg "BASE=$$BASE" --build-arg "REVISION=$${revision:-}" --tag $${IMAGE:-fpga-plugin:$(VERSION)} .

.PHONY: release
release: ## image and chart to a registry, with SBOM, provenance and signature (REGISTRY=host/ns IMAGE=... KEY=private.pem)
	@# The system's Python, alone: nobody's packages run beside the key.
	@python3 -I -S deploy/release/release.py --registry "$${REGISTRY:?names the registry and namespace}" \
	  --image "$${IMAGE:?names the image that make image made}" --key "$${KEY:?names a private Ed25519 key}" $(RELEASE_ARGS)

.PHONY: audit
audit: ## hashes, known vulnerabilities and bill of materials of what the image takes from PyPI
	@bash .ci/setup dev
	@$(PYTHON) -m pip install --quiet --upgrade --target .cache/audit/tools $(AUDIT_TOOLS)
	@PYTHONPATH=.cache/audit/tools $(PYTHON) deploy/image/audit.py deploy/image/requirements.lock .cache/audit

.PHONY: test-image
test-image: ## the image, built without a registry, as the chart's pod on the real kubelet, as root (takes Go)
	@bash .ci/setup dev
	@bash .ci/deps --ci kubelet
	@bash .ci/deps --ci image
	@bash tests/image/build
	@bash tests/deploy/build
	@bash tests/deploy/kubectl/build
	@bash tests/kubelet/build $$(printf "%s\n" 1.36 $${K8S:-1.36} | sort -V | tail -1) kube-scheduler kube-controller-manager
	@$(PYTHON) -m pytest tests/image -q
	@FPGA_KUBELET_PLUGIN=pod $(PYTHON) tests/kubelet/namespace.py $${K8S:-1.36} $(PYTHON) -m pytest \
	  tests/kubelet/test_image.py tests/kubelet/test_install.py tests/kubelet/test_chart_life.py tests/kubelet/test_life.py -q $(PYTEST_ARGS)
	@FPGA_KUBELET_PLUGIN=pod $(PYTHON) tests/dra/pods_namespace.py $${K8S:-1.36} --one \
	  $(PYTHON) -m pytest tests/dra/test_chart_pod.py tests/dra/test_chart_store.py -q $(PYTEST_ARGS) || [ $$? = 5 ]

.PHONY: test-deploy
test-deploy: ## chart and kustomization by the real helm and kustomize (takes Go)
	@bash .ci/setup dev
	@bash tests/deploy/build
	@$(PYTHON) -m pytest tests/deploy -q $(PYTEST_ARGS)

.PHONY: soak
soak: ## the tests that search for counterexamples, thirty to sixty times as long (SEED=1)
	@bash .ci/setup dev
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "hypothesis seed $$seed (again: make soak SEED=$$seed)"; \
	HYPOTHESIS_PROFILE=soak $(PYTHON) -m pytest -q $(SIDE_BY_SIDE) --hypothesis-seed=$$seed \
	  -m hypothesis --hypothesis-show-statistics tests/unit $(PYTEST_ARGS); \
	SEED=$$seed HYPOTHESIS_PROFILE=soak $(PYTHON) -m pytest -q $(SIDE_BY_SIDE) \
	  tests/integration/test_walk.py tests/integration/test_stock_walk.py $(PYTEST_ARGS)
	@$(PYTHON) tests/fuzz --seconds $${FUZZ_SECONDS:-300}

.PHONY: campaign
campaign: ## pods' lives and a plugin killed at every step, as root for all of the weather (CAMPAIGN_ARGS="--seed 2")
	@bash .ci/setup dev
	@$(PYTHON) tests/campaign $(CAMPAIGN_ARGS)

.PHONY: campaign-bugs
campaign-bugs: ## the campaign's checker finds each deliberate bug in a copy (PYTEST_ARGS="-k scrub")
	@bash .ci/setup dev
	@$(PYTHON) -m pytest -q tests/campaign $(PYTEST_ARGS)

.PHONY: mutants
mutants: ## small changes of the core: does a fast test notice? (MUTANTS_ARGS="allocation cards --only scrub")
	@bash .ci/setup dev
	@$(PYTHON) tests/mutants $(MUTANTS_ARGS)

.PHONY: load
load: ## 256 cards, a pod a second, hostile clients: nothing may grow (LOAD_ARGS="--api dra --minutes 20")
	@bash .ci/setup dev
	@$(PYTHON) tests/load $(LOAD_ARGS)

.PHONY: model
model: ## the protocol's model, checked by spin (MODEL="stock bugs", SECONDS_EACH=300; takes spin and gcc)
	@bash docs/model/check $(MODEL)

.PHONY: lint
lint: ## style, types, and which module may import which
	@bash .ci/setup dev
	@failed=0; \
	$(PYTHON) -m ruff check . || failed=1; \
	$(PYTHON) -m ruff format --check . || failed=1; \
	$(PYTHON) -m mypy || failed=1; \
	.venv/bin/lint-imports --no-cache || failed=1; \
	exit $$failed

.PHONY: bench
bench: ## what is fast, measured on this machine (BENCH_ARGS)
	@bash .ci/setup dev
	@$(PYTHON) benchmarks $(BENCH_ARGS)

.PHONY: bench-apis
bench-apis: ## a pod's start and end by both APIs, with the real kubelet, as root (BENCH_ARGS="--rounds 5")
	@bash .ci/setup dev
	@bash .ci/deps --ci kubelet
	@$(PYTHON) tests/dra/pods_namespace.py $${K8S:-1.36} --one $(PYTHON) tests/dra/apis.py $(BENCH_ARGS)

.PHONY: bench-kernel
bench-kernel: ## PreStart beside the bare ioctl, on the real drivers (BENCH_ARGS="--rounds 5")
	@bash .ci/setup dev
	@bash .ci/deps --ci kernel
	@$(PYTHON) tests/kernel -- $(CURDIR)/$(PYTHON) benchmarks/kernel.py $(BENCH_ARGS)

.PHONY: deps
deps: ## Debian packages that some tests use: installs them as root, else says what to type (DEPS=kernel)
	@bash .ci/deps $(DEPS)

.PHONY: messages
messages: ## generate the messages from fpga_plugin/kubernetes/*.proto anew
	@bash .ci/setup dev
	@$(PYTHON) -m fpga_plugin.kubernetes.generate

.PHONY: docs
docs: ## write docs/configuration.md, the chart's schema and those of --json again, from the code
	@bash .ci/setup runtime
	@mkdir -p .cache
	@$(PYTHON) -m fpga_plugin.settings.docs >.cache/configuration.md
	@mv .cache/configuration.md docs/configuration.md
	@$(PYTHON) docs/obstacles.py docs/architecture.md
	@$(PYTHON) deploy/helm/settings_schema.py
	@$(PYTHON) -m fpga_plugin.commands.schemas docs/schema

# Zensical empties a folder `.cache` beside the mkdocs.yml that it reads, and follows links: it gets a copy, elsewhere.
SITE := .cache/docs-site
.PHONY: docs-tools
docs-tools:
	@mkdir -p $(SITE)
	@[[ $$(cat $(SITE)/installed 2>/dev/null) == '$(DOCS_TOOLS)' ]] || { \
	  bash .ci/setup runtime; \
	  $(PYTHON) -m venv --clear $(SITE)/venv; \
	  $(SITE)/venv/bin/python -m pip install --quiet --disable-pip-version-check $(DOCS_TOOLS); \
	  echo '$(DOCS_TOOLS)' >$(SITE)/installed; }
	@rm -rf $(SITE)/docs $(SITE)/site
	@cp -r docs mkdocs.yml $(SITE)/

.PHONY: docs-site
docs-site: docs-tools ## build the documents' site into .cache/docs-site/site; a link that leads nowhere fails
	@cd $(SITE) && venv/bin/zensical build --strict --config-file mkdocs.yml

.PHONY: docs-serve
docs-serve: docs-tools ## serve the documents, as they change, at http://localhost:8000 (DOCS_ADDRESS=localhost:8080)
	@while sleep 1; do cp -ru docs mkdocs.yml $(SITE)/; done & \
	trap "kill $$!" EXIT; \
	cd $(SITE) && venv/bin/zensical serve --config-file mkdocs.yml --dev-addr $${DOCS_ADDRESS:-localhost:8000}

UV_COMPILE = .cache/lock/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header \
  --no-annotate --no-emit-index-url --no-emit-find-links

.PHONY: lock
lock: ## pin what image and development tools take from PyPI, with hashes (LOCK_ARGS=--upgrade for newer ones)
	@bash .ci/setup dev
	@$(PYTHON) -m pip install --quiet --upgrade --target .cache/lock uv
	@$(UV_COMPILE) pyproject.toml --output-file deploy/image/requirements.lock $(LOCK_ARGS)
	@$(UV_COMPILE) --group build --output-file .ci/build.lock $(LOCK_ARGS)
	@$(UV_COMPILE) --group dev --constraints deploy/image/requirements.lock --constraints .ci/build.lock \
	  --output-file .ci/dev.lock $(LOCK_ARGS)

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find fpga_plugin tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
