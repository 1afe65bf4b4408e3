# Every target sets up what it needs; `make setup` alone is a no-op when nothing has changed.
#   TORCH_INDEX=URL   where torch comes from (unreachable or empty: the configured package index)
#   KEEP=1            leave what `make demo` started running
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PY := .venv/bin/python
# Two workers on one small machine share its cores: one compute thread each, unless a bench asks for more.
TEST_ENV := OMP_NUM_THREADS=1 RAY_DISABLE_IMPORT_WARNING=1 RAY_USAGE_STATS_ENABLED=0

.PHONY: setup demo test oracle e2e invariants peers demo-quality kv-quant lint types check help

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup:  ## make .venv and install everything
	@TORCH_INDEX="$(TORCH_INDEX)" sh tools/setup.sh

demo: setup  ## serve the demo model with prefill and decode apart, and answer one chat
	@$(TEST_ENV) $(PY) -m tools.demo

test: setup lint types  ## unit tests, invariants, an oracle subset, one Ray end-to-end
	@$(TEST_ENV) $(PY) -m tools.run_tests "not oracle_full and not invariants and not e2e and not quality and not peers"

oracle: setup  ## the whole matrix against transformers.generate
	@$(TEST_ENV) $(PY) -m tools.run_tests "oracle or oracle_full" tests/e2e tests/engine tests/prefill_node

e2e: setup  ## a real Ray cluster, 2 prefill and 2 decode replicas and more
	@$(TEST_ENV) $(PY) -m tools.run_tests "e2e" --jobs 1

invariants: setup  ## long runs of the hypothesis state machines
	@$(TEST_ENV) $(PY) -m tools.run_tests "invariants"

peers: setup  ## NVIDIA Dynamo's indexer reads our KV events (needs `.venv/bin/pip install ai-dynamo-runtime==1.6.1`)
	@$(TEST_ENV) $(PY) -m tools.run_tests "peers" tests/peers

demo-quality: setup  ## 50 questions the demo model was trained on, in words it never saw
	@$(TEST_ENV) $(PY) -m tools.demo_quality --serve

kv-quant: setup  ## what quantised KV costs: perplexity and right answers for each kv_cache_dtype
	@$(TEST_ENV) $(PY) -m tools.kv_quant

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports --no-logo

types: setup
	@.venv/bin/mypy

check: lint types  ## style, types and import directions only
