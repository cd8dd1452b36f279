# Everything a fresh clone needs: `make demo`, `make test`, `make check`.
#
# torch is installed first and by itself, as a CPU build, so that no other package can bring in a CUDA build of several
# gigabytes. For a CUDA build: make TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMPS := $(VENV)/.stamps
SOURCES := $(shell find src csrc CMakeLists.txt -type f -not -name '*.py[co]' 2>/dev/null)

.PHONY: help venv install demo test check docs format bench clean

help:
	@echo "make demo     install, then three answers plainly and with speculation, side by side"
	@echo "make test     install, then every test"
	@echo "make check    ruff, mypy --strict, architecture test"
	@echo "make docs     the documentation as a site in site/, which needs no network"
	@echo "make bench    speed on the shipped prompts, and engine overhead"
	@echo "make format   rewrite the code in the project's style"
	@echo "make clean    remove the virtual environment and build outputs"

venv: $(STAMPS)/venv
install: $(STAMPS)/with-dev

# A command in a process group of its own, so that it can be ended with all that it started.
IN_GROUP := $(BIN)/python -c 'import os, sys; os.setpgrp(); os.execv(sys.argv[1], sys.argv[1:])'
TOOLS := "scikit-build-core>=0.11" "nanobind>=2.7" ninja

# The compiler is busy for one to two minutes, the download for half a minute or more: both at once. What was compiled is
# in build/, where the installation below finds it; it also says what is wrong where nothing could be compiled.
$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TOOLS)
	@echo "installing $(TORCH), compiling the kernels"
	@$(IN_GROUP) $(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/wheels . >/dev/null 2>&1 & \
	compiling=$$!; trap 'kill -- -$$compiling 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	{ $(PIP) install "$(TORCH)" 2>/dev/null || $(PIP) install "$(TORCH)" --index-url $(TORCH_INDEX); } && \
	{ wait; rm -rf $(VENV)/wheels; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/tools: pyproject.toml $(STAMPS)/venv
	@$(PIP) install $(TOOLS)
	@touch $@

# forerun with some of its extras. The demo leaves out the developers' tools, a minute of downloads; they include its extras.
$(STAMPS)/with-%: $(STAMPS)/tools $(SOURCES)
	@echo "building and installing forerun[$*]"
	@$(PIP) install --no-build-isolation ".[$*]"
	@$(BIN)/python -c "from forerun.kernels.select import select_kernels as s; print('kernels:', s().name, s().reason)"
	@touch $@ $(STAMPS)/with-server,train

demo: $(STAMPS)/with-server,train
	@$(BIN)/forerun demo

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/forerun
	$(BIN)/python -m pytest -q -n 0 tests/test_architecture.py

docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/forerun bench speed --model mini --drafters none,ngram,draft
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache
