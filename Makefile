# make demo   the main job, from nothing          make test    the test suite, from nothing
# make lint   format check, ruff, types           make bench   every claim about speed and memory
# make fast   the tests of a few minutes           make docs    the docs site, strictly, into site/
# make paper  the paper's figures and tables anew, from the data in $RECONBOUND_DATA (or ../shared/data)
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
# Each process runs neighbouring tests, which share fixtures, and bytecode is kept even where the environment forbids it.
TESTS  := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist worksteal

.PHONY: demo test fast lint format docs bench paper clean

demo: $(READY)
	$(BIN)/reconbound audit --out audit-digits

test: $(READY)
	$(TESTS) -n 3

fast: $(READY)
	$(TESTS) -n 2 -m "not slow and not browser and not postgres"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo site/index.html

bench: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[opacus]"
	for script in $(filter-out benchmarks/cuda_%.py benchmarks/fisher_compiled.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

paper: $(READY)
	for script in experiments/figure*.py experiments/adult_linear.py; do $(BIN)/python $$script || exit 1; done

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
