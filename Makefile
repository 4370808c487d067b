# make demo    train the small model padded and packed, side by side (a few minutes on two cores)
# make test    ruff, mypy and the tests
# make setup   the step both share: .venv with pinned CPU requirements and gemopt itself
# make train   a longer run;  ARGS="--help" lists its options
# make bench   the measurements behind the README's tables
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.gemopt-setup

.PHONY: setup setup-torchrec setup-public demo test lint typecheck pytest train bench clean distclean

setup: $(STAMP)

# Installed again only when what it depends on changes. An existing environment is kept.
$(STAMP): requirements/cpu.txt requirements/data.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gemopt needs Python 3.11 or newer; set PYTHON=")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/cpu.txt
	$(PIP) install --no-deps -r requirements/data.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# TorchRec declares a dependency on the CUDA fbgemm, which would overwrite the CPU one: hence the second step.
setup-torchrec: $(STAMP)
	$(PIP) install -r requirements/torchrec.txt
	$(PIP) install --no-deps -r requirements/torchrec-no-deps.txt

# The packages whose models tests/public compiles (about 870 MB). The second step has no dependencies, since theirs would
# bring another torch.
setup-public: $(STAMP)
	$(PIP) install -r requirements/public.txt
	$(PIP) install --no-deps -r requirements/public-no-deps.txt

demo: $(STAMP)
	$(PY) -m gemopt.model_zoo.demo $(ARGS)

test: lint typecheck pytest

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: $(STAMP)
	$(PY) -m mypy

pytest: $(STAMP)
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

train: $(STAMP)
	$(PY) -m gemopt.model_zoo.train $(ARGS)

bench: $(STAMP)
	$(PY) bench/unpad.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis report.json report.html
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
