# `make` alone explains the targets. Everything is installed into .venv; nothing outside the checkout is changed.

PYTHON ?= python3
JOBS   ?= 2
ARGS   ?=
QUICK  := tests/core tests/ops tests/wire tests/evaluate tests/data/test_partition.py tests/data/test_cohort.py \
	tests/runs/test_settings.py tests/test_container.py tests/test_schema.py tests/test_tree.py src/metavd/core \
	--ignore tests/core/test_accountant.py --ignore tests/ops/test_conv.py --ignore tests/ops/test_launch.py \
	--ignore tests/ops/test_compile.py

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# Every pip below, also the ones that build isolation starts, obeys constraints.txt. pip before 25.3 reads the first
# variable for isolated builds, later ones the second. The path is relative because pip splits the value at spaces.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv run test quick lint types imports tests digits figures coverage docs chromium wheel sbom lock pip-audit format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install the package and its tools (again only when their versions change)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): one to three minutes with a CPU build of torch, longer when a CUDA build is downloaded"
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

run: venv ## run the example experiment; ARGS="reptile --rounds 20" is passed on to `metavd run`
	$(BIN)/metavd run $(ARGS)

test: venv lint types imports tests wheel ## all checks, as CI runs them

# What a change of the mathematics, the data or the wire would break first; everything else takes whole runs.
quick: venv lint types imports ## lint, types and the fast tests, in a minute and a half
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -x $(QUICK) $(ARGS)

lint: venv ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv ## mypy, strict on the mathematics
	$(BIN)/mypy

imports: venv ## import-linter: imports point one way
	$(BIN)/lint-imports

# One thread per worker: the workers are the parallelism, and two thread pools on the same cores slow each other down.
# Bytecode is kept, whatever the shell says: the tests start hundreds of processes, and each would compile the package.
tests: venv chromium ## pytest with doctests; JOBS=2 workers, ARGS="-k maml" is passed on
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal --durations 25 $(ARGS)

# Every page with figures of digits follows from this one target; docs/results.md says what writes what.
digits: venv ## every method on digits again, and all pages and pictures with its figures; JOBS=2 runs at once, half an hour
	$(BIN)/metavd compare all --seeds 3 --device cpu --jobs $(JOBS) --out runs/digits --page docs/digits.md
	$(BIN)/python scripts/digits.py runs/digits

figures: venv ## run again what the docs' figures take minutes for, and compare; half an hour
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m figures tests/test_docs_figures.py $(ARGS)

coverage: ## the tests again, a third slower: which lines and branches they run
	$(MAKE) tests ARGS="--cov metavd --cov-branch --cov-report term-missing:skip-covered $(ARGS)"

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[docs]'
	@touch $@

# Notebooks run in it. Every page is read anew, so that a warning is not forgotten by the second time.
docs: venv $(VENV)/.docs ## build the site into build/site, notebooks run, warnings are errors; a minute, nothing is fetched
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/site $(ARGS)
	@echo "build/site/index.html"

chromium: ## headless Chromium for the tests of reports, where root and apt-get are there; without it they are skipped
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } >/dev/null 2>&1 \
		|| echo "chromium could not be installed; the browser tests are skipped"; \
	else echo "no chromium and chromedriver; the browser tests are skipped"; fi

# The wheel is built from the source archive, in a temporary folder, so that both are checked and no stale build/ leaks in.
wheel: venv ## build dist/*.whl, install it into a fresh environment and run it outside the checkout
	rm -rf dist
	$(BIN)/python -m build --outdir dist >/dev/null
	PYTHON=$(PYTHON) scripts/check_wheel.sh dist/*.whl
	$(BIN)/python scripts/sbom.py > dist/metavd-sbom.json

sbom: venv ## what a deployment consists of, as CycloneDX JSON, in dist/metavd-sbom.json
	@mkdir -p dist
	$(BIN)/python scripts/sbom.py > dist/metavd-sbom.json

# The versions of constraints.txt, but for triton: tests need one, a CUDA build of torch brings its own.
lock: venv ## write requirements-flower.txt: a deployment's packages with their hashes
	grep -v '^triton==' constraints.txt > $(VENV)/lock.txt
	$(BIN)/uv pip compile pyproject.toml --extra flower -c $(VENV)/lock.txt --generate-hashes --python-version 3.11 \
		--no-annotate --custom-compile-command "make lock" --quiet --output-file requirements-flower.txt

pip-audit: venv ## ask the database of known weaknesses about requirements-flower.txt; needs the internet
	$(BIN)/uv tool run pip-audit --strict --require-hashes --disable-pip -r requirements-flower.txt

format: venv ## let ruff mend and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove everything that make created, .venv included; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
