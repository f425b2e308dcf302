# Everything runs from .venv, which is made when it is missing or pyproject.toml has changed.
#   make demo        profile this machine, search, launch, compare (2 CPU ranks)
#   make test        the tests to run before each commit, in WORKERS processes: files of short tests
#                    (tests/ledger.py), some five minutes
#   make test-long   the other tests that are not marked slow, half an hour
#   make test-slow   those that are, some two hours
#   make ledger      how long tests took in both tiers, written to tests/durations.csv
#   make test-gpu    of the rest what no CPU run shows: the engine on a fake CUDA, and messages by
#                    NCCL's rules (needs g++)
#   make check       format, lint, types, import contracts

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin

.PHONY: demo test test-long test-slow test-gpu ledger check clean
TIER = PLANNER_DURATIONS=build/durations-$(1).csv $(BIN)/python -m pytest -m "not slow" \
  --tier $(1) -n $(WORKERS) --dist worksteal
.DELETE_ON_ERROR:

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready-test
	$(call TIER,quick)

test-long: .venv/ready-test
	$(call TIER,long)

ledger: test test-long
	$(BIN)/python -m tests.ledger build/durations-quick.csv build/durations-long.csv

test-slow: .venv/ready-test
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal --timeout 1800

test-gpu: .venv/ready-test
	$(BIN)/python -m pytest -n $(WORKERS) --timeout 1800 tests/runtime/test_fake_cuda.py \
	  tests/runtime/test_nccl_rules.py tests/runtime/step/messages/test_nccl_order.py \
	  tests/runtime/start/groups/test_staged.py

check: .venv/ready-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo-out

# A stamp is written only after its install succeeded. Without one the venv is not trusted
# and is made anew; with an old one it is brought up to date in place.
.venv/ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "planner needs Python 3.11 or newer, but there is no $(PYTHON); install it or name one: make PYTHON=python3.12 demo" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "planner needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12 demo" >&2; exit 2; }
	@if [ -e $@ ]; then rm $@; else rm -rf .venv; fi
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/ready-test: .venv/ready
	@rm -f $@
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@
