# `make` alone lists the targets. Everything runs in .venv, which `install` creates from requirements.lock.
# To use another interpreter: make install PYTHON=python3.12

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
NEWEST := .venv-newest

# One thread per process: on few cores, several torch processes with a thread per core each are slower, not faster. Bytecode is written, whatever the shell says:
# otherwise each of the many processes that tests start would compile all of samewise again.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# There is one worker more than cores, since tests often wait for a process. A file's tests share what takes long to make, such as a training, so they stay with one
# worker. Slow tests are few and long: a free worker takes them from another.
TOGETHER = -n $$(($(JOBS) + 1)) --dist loadfile
APART = -n $$(($(JOBS) + 1)) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-changed test-variants test-slow test-oldest test-newest test-all bench bench-growth mutants faults fuzz gpu lint types format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create the virtual environment .venv: locked packages, and samewise itself, editable

demo: install ## train a ResNet on handwritten digits (about a minute of training, nothing to download)
	$(BIN)/samewise train experiment=resnet18_digits

docs: install ## build the documentation as a site with search, build/site/index.html, which opens from the disk
	$(BIN)/python docs/reference.py build/pages
	$(BIN)/python -m zensical build --strict

test: install ## run the tests that are fast enough for every change (minutes on two cores); of a test with variants every third
	$(PYTEST) $(TOGETHER) -m "not slow and not variant"

test-changed: install ## run the fast tests that changes since main can affect (BASE=HEAD: uncommitted changes)
	@files=$$($(BIN)/python tests/changed.py $(or $(BASE),main)) && if [ -n "$$files" ]; then $(PYTEST) $(TOGETHER) -m "not slow" $$files; else echo "no test is affected"; fi

test-variants: install ## run the fast tests that `make test` leaves out
	$(PYTEST) $(TOGETHER) -m "variant"

test-slow: install ## run the slower tests that CI runs too; some install packages into scratch environments
	$(PYTEST) $(APART) -m "slow and not long"

test-all: install ## run all tests
	$(PYTEST) $(APART)

# The files that test what is built on other packages' internals: torch's; Hydra's, OmegaConf's, Optuna's and MLflow's. Of
# slow tests, those marked `oldest` run.
BUILT_ON = tests/configs tests/kept tests/pretend/test_one_wait.py tests/steps $(addprefix tests/runner/test_,$(addsuffix .py,\
	any_number_of_ranks compiled ddp fsdp initialise launch model_parallel on_device optimizers optimizer_states precision profile sync_batch_norm \
	torch_private compose mistakes other_choice tracking_commands tracking_pages tracking_stores)) $(addprefix tests/sweeps/test_,$(addsuffix .py,\
	optuna optuna_sweeps report))
THERE = $(subst $(BIN)/,$(1)/bin/,$(PYTEST)) $(APART) -m "not variant and (not slow or oldest)" $(BUILT_ON)

test-oldest: install $(OLDEST)/.packages ## run the tests of what other packages could break with the oldest ones that are supported (an environment of its own: gigabytes)
	$(call THERE,$(OLDEST))

test-newest: install $(NEWEST)/.packages ## run them with the newest torch, Hydra, OmegaConf, MLflow and Optuna, pre-releases too (likewise; `rm -r .venv-newest` for newer ones)
	@$(NEWEST)/bin/python tests/packaging/newest.py versions
	$(call THERE,$(NEWEST))

bench: install ## measure, as ratios: a step, other runners (those in the extra `bench`), settings, data, start-up, sweeps
	@for file in tests/benchmarks/bench_*.py; do echo "== $$file"; OMP_NUM_THREADS=1 $(BIN)/python "$$file" || exit 1; done

bench-growth: install ## measure what grows with runs, points, steps, values, files, parameters and processes: for n and 10 n, with the exponent (half an hour)
	$(BIN)/python tests/benchmarks/growth.py

mutants: install ## plant small faults, one at a time, and count those that the fast tests find (an hour on two cores; SHARE=0.2: a fifth of them)
	$(BIN)/python tests/mutation/mutants.py --jobs $(JOBS) --share $(or $(SHARE),1)

faults: install ## disturb N trainings (100) by kills, failing disks, jumping clocks and lying servers; nothing may be lost or differ (needs gcc)
	$(BIN)/python tests/faults/campaign.py --trials $(or $(N),100) --jobs $(JOBS) --seed $(or $(SEED),0)

fuzz: install ## read N (5000) drawn data sets full of oddities, and compare with independent readers (SEED=random: others)
	SAMEWISE_FUZZ=$(or $(N),5000) SAMEWISE_FUZZ_SEED=$(or $(SEED),0) $(PYTEST) $(wildcard tests/datasets/test_drawn_*.py)

gpu: install ## on a machine with a GPU: its tests, and bits of six recipes, as a table (speed: the scripts in tests/gpu)
	$(BIN)/python tests/gpu/day.py

lint: install ## check style, format, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	BIN=$(CURDIR)/$(BIN) tests/packaging/lint_imports.sh

types: install ## check types, strictly, in runner/
	$(BIN)/pyright --project .package

format: install ## format the code, and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## resolve the dependencies again into requirements.lock, and the oldest ones into .ci/oldest.lock (needs uv; UPGRADE=--upgrade for newer versions)
	@command -v uv >/dev/null || { echo "make lock needs uv on the PATH: python3 -m pip install uv"; exit 2; }
	uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes --no-header $(UPGRADE) -o requirements.lock
	uv pip compile pyproject.toml --extra sweep --resolution lowest-direct --no-config --python-version 3.11 \
		--python-platform linux --generate-hashes --no-header --no-annotate $(UPGRADE) -o .ci/oldest.lock

clean: ## remove .venv, caches and builds; runs/ is kept
	rm -rf $(VENV) $(OLDEST) $(NEWEST) .cache dist build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two stamps, so that a change of pyproject.toml alone does not go through every locked package again. The lock names every package, so nothing is left to resolve: pip would look for
# `pydantic[email]`, say, as if no version of it were locked, and refuse a newer one, whose hash is not there.
$(VENV)/.packages: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		"samewise needs Python 3.11 or newer; '$(PYTHON)' is not. Name one that is: make install PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	@echo "Installing the locked packages into $(VENV): some minutes, some gigabytes."
	$(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@touch $@

TAKE_THE_REST = $(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' >$$(echo $(1)/lib/python*/site-packages)/locked.pth

# The oldest dependencies, and what they need; all else, such as pytest, is taken from .venv.
$(OLDEST)/.packages: .ci/oldest.lock $(VENV)/.installed
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check --no-deps --require-hashes -r .ci/oldest.lock
	$(call TAKE_THE_REST,$(OLDEST))
	@touch $@

$(NEWEST)/.packages: pyproject.toml tests/packaging/newest.py $(VENV)/.installed
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python tests/packaging/newest.py install
	$(call TAKE_THE_REST,$(NEWEST))
	@touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@
