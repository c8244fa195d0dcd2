# Needs make and Python >= 3.11, nothing else. Every target makes .venv first, once.
#
#   make serve                                            the demo pair on http://127.0.0.1:8000
#   make serve PORT=9000 ARGS="Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16"
#   make test | make check | make proof                   tests; lint, types and import rules; all of it, to docs/proof.md
#
# pip's own environment holds. PyPI's torch for Linux brings gigabytes of CUDA; without a GPU say once
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make serve

TORCH ?= torch==2.13.0
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(RECENT)' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
STAMP := .venv/.installed
# Only from make's command line: conda exports a HOST of its own, and some platforms a PORT.
given = $(if $(findstring command,$(origin $(1))),$(2) $($(1)))

.PHONY: serve test check proof

serve: $(STAMP)
	$(BIN)/dflash-server serve $(call given,HOST,--host) $(call given,PORT,--port) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest tests -m "not slow" $(ARGS)

proof: $(STAMP)
	$(BIN)/python -m pytest tests
	$(BIN)/python -m tests.proof $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml
	@$(or $(PYTHON),false) -c '$(RECENT)' || { echo \
	  'Python >= 3.11 is needed; make PYTHON=/path/to/python3.12 names one.' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@
