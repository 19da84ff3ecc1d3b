# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo   set up, then run the main job
#   make test   set up, then lint, types and all fast tests

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests start many Python processes, which reuse each other's bytecode.
unexport PYTHONDONTWRITEBYTECODE
BENCH_READY := .venv/.ready-bench
DOCS_READY := .venv/.ready-docs

# Kernels of older CPUs: the second also computes with two threads.
SSE := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 DNNL_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 DNNL_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive

.PHONY: demo test lint types tests slow portable bench docs atlas format clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/addnorm demo

# Types are checked while the tests run: each alone would leave a core idle.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/pytest -n 2 -m "not slow"

slow: $(READY)
	$(BIN)/pytest -n 2 -m slow

# Tests that train, with the kernels of two older CPUs, each with two seeds; the slow ones with those of the oldest alone.
portable: $(READY)
	$(SSE) PYTHONHASHSEED=1 $(BIN)/pytest -n 2 --seed 1 -m "trains and not installs"
	$(SSE) PYTHONHASHSEED=2 $(BIN)/pytest -n 2 --seed 2 -m "trains and not slow"
	$(AVX2) PYTHONHASHSEED=1 $(BIN)/pytest -n 2 --seed 1 -m "trains and not slow"
	$(AVX2) PYTHONHASHSEED=2 $(BIN)/pytest -n 2 --seed 2 -m "trains and not slow"

bench: $(BENCH_READY)
	$(BIN)/python -m bench

# The site, in build/site: built strictly and offline, then every link is checked.
docs: $(DOCS_READY)
	$(BIN)/python -m website.build

# The pages and pictures of docs/atlas, measured anew, and the picture of the README.
atlas: $(READY)
	$(BIN)/python -m website.atlas
	$(BIN)/python -m website.overview

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "addnorm needs Python 3.11 or newer, not " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	touch $(BENCH_READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs]'
	touch $(DOCS_READY)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
