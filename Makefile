# Everything is made in .venv, from nothing. A second run starts at once.
#
#   make demo                    the five-minute story
#   make test                    the tests
#   make test-fast               those of one process that take no time: for every few lines you write
#   make nightly                 the tests that take hours, and their results in docs/faults.md and docs/mutations.md
#   make lint docs-check bench   the checkers; the commands of README and docs; the CPU benchmarks
#
#   PYTHON=python3.12            another interpreter            TORCH=2.11.0   one torch release
#   LOCK=                        the newest releases, instead of those of locks/py311.txt (in a new .venv, or one made so)
#   PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"         torch without CUDA (Linux, a tenth of the size)

PYTHON ?= python3
TORCH ?=
PIP_FLAGS ?=
LOCK ?= $(if $(TORCH),,locks/py311.txt)
# Five processes for two cores, six at most: more than half of the time of tests is waiting, for ranks that are killed and started
# again.
workers = $(shell $(PYTHON) -c 'import os; print(min(6, 5 * (os.cpu_count() or 1) // 2))')
PYTEST_FLAGS ?= -n $(workers) --dist loadfile --no-loadscope-reorder

python := .venv/bin/python
installed := .venv/installed$(addprefix -torch-,$(TORCH))$(if $(LOCK),,-newest)
pip = $(PYTHON) -m pip --disable-pip-version-check --python $(python)
export OMP_NUM_THREADS ?= 1
# Images of Python set it, and then every process that tests start compiles the package anew: half a second.
export PYTHONDONTWRITEBYTECODE :=

# Releases that the tests have seen, of whatever the lock file names: a new one of somebody else's breaks nothing here. Where an
# index does not have them (another system, one taken back) the newest do.
define installed-as-locked
$(if $(LOCK),sed -n 's/^\([^ #]*==[^ +]*\).*/\1/p' $(LOCK) >.venv/constraints.txt && \
	$(pip) install --quiet $(PIP_FLAGS) --constraint .venv/constraints.txt $(1) || { \
	echo "pip could not install the releases of $(LOCK) (see above). Trying the newest." >&2; \
	$(pip) install --quiet $(PIP_FLAGS) $(1); },$(pip) install --quiet --upgrade $(PIP_FLAGS) $(1))
endef

.PHONY: demo test test-fast nightly lint docs-check bench install
.DELETE_ON_ERROR:

demo: $(installed)
	@$(python) -m ultrascale demo

test: $(installed)
	@$(python) -m pytest $(PYTEST_FLAGS)

# Descriptions, schedules, kernels, models, laws of the planner, and the house's own rules: no ranks, no runs.
fast = tests/config tests/schedules tests/kernels tests/models tests/plan/test_estimate.py tests/tidy/test_source_rules.py
test-fast: $(installed)
	@$(python) -m pytest $(PYTEST_FLAGS) -q -m 'not nightly and not gpu' $(fast)

# One at a time: they start many processes of their own, and some watch the clock. Then the tests that draw examples, with others
# than CI's and more of them; not recorded, or the table would give their time as CI's. Goes on to the table whatever failed.
at_night = ULTRASCALE_NIGHTLY=1 ULTRASCALE_FUZZ=20 $(python) -m pytest
nightly: $(installed)
	@$(at_night) -m nightly --record-catalogue; status=$$?; \
	$(at_night) -m 'draws and not nightly' || status=$$?; \
	$(python) tests/catalogue/table.py && exit $$status

lint: .venv/linters
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	$(python) -m pyright

docs-check: $(installed)
	$(python) .ci/run_commands.py README.md docs/getting-started.md --beside docs/*.md

bench: $(installed)
	$(python) benchmarks/cpu/train_speed.py

install: $(installed)

# Works without python3-venv: the system's pip installs into the new environment. `half-made` outlives an interruption, and the
# next run then starts afresh; an environment that somebody else made is kept and added to. It gets a pip of its own, so that `make`
# also works while it is activated.
$(installed): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("ultrascale needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12" % v)'
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "$(PYTHON) has no pip. On Debian and Ubuntu: apt install python3-pip" >&2; exit 1; }
	@echo "Installing into .venv (once; some minutes, most of it torch)."
	@if [ -e .venv/half-made ] || [ ! -x $(python) ]; then $(PYTHON) -m venv --without-pip --clear .venv; fi
	@rm -f .venv/installed* && touch .venv/half-made
	@$(call installed-as-locked,pip --editable '.[test]' $(if $(TORCH),'torch==$(TORCH)'))
	@touch .venv/half-made && mv .venv/half-made $@

.venv/linters: $(installed)
	@$(call installed-as-locked,--editable '.[lint]')
	@touch $@
