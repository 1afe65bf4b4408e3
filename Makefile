# Every target sets up what it needs; `make setup` alone is a no-op when nothing has changed.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PY := .venv/bin/python
# Two workers on one small machine share its cores: one compute thread each, unless a bench asks for more.
TEST_ENV := OMP_NUM_THREADS=1 RAY_DISABLE_IMPORT_WARNING=1 RAY_USAGE_STATS_ENABLED=0
# Without Python's caches every process of the tests compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-tiers check lint types imports dead quick collected test oracle tiers tenancy mutants two-hosts overload observe chaos-ray cluster fuzz fuzz-models invariants e2e chaos clients gpu kernels soak peers wheel demo-quality kv-quant

help:  ## list the targets and their variables
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22
	@printf '\nVariables:\n'
	@sed -nE 's/^#: ([A-Z_]+=[A-Za-z0-9]*) +(.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

#: TORCH_INDEX=URL   where setup and wheel take torch for CPUs from; if it is empty or does not answer: pip's own index
#: ONLY=TEXT         mutants: those whose line, as it is printed, has this in it
#: KEEP=1            demo: leave what it started running
#: SCENARIOS=600     chaos: how many
#: SECONDS=600       soak: how long
#: SEED=1            chaos, soak: what is drawn
#: ONLY=CELL         chaos: role/state/fault/transport/engine, or the first of these; * is any
#: ALL=1             quick: the unit tests of all rooms
#: ONLY=openai       clients: those with this in their names
#: SCALE=1           fuzz: a share of its numbers
#: MODELS=400        fuzz-models: how many
#: SEED=0            fuzz-models: the first one's seed

setup:  ## make .venv and install everything (every target below does that first)
	@TORCH_INDEX="$(TORCH_INDEX)" sh tools/setup.sh

demo: setup  ## serve the demo model with prefill and decode apart, and answer one chat
	@$(TEST_ENV) $(PY) -m tools.demo

demo-tiers: setup  ## a conversation goes on after all workers were restarted: its KV is read from files
	@$(TEST_ENV) $(PY) -m tools.demo_tiers

check: lint types imports dead  ## style, types, import directions and cycles, dead code: no tests

lint: setup  ## ruff: style and format
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: setup  ## mypy, strict
	@.venv/bin/mypy

imports: setup  ## import-linter: which room may import which, and no cycle
	@.venv/bin/lint-imports --no-logo

dead: setup  ## vulture: code that nothing but tests uses
	@.venv/bin/vulture

quick: lint types  ## style, types, and fast unit tests of the rooms that differ from main and of their importers
	@$(TEST_ENV) $(PY) -m tools.quick $(if $(ALL),--all)

# Checks keep one core busy. Meanwhile pytest compiles the tests, or each of its jobs would.
collected: setup
	@$(PY) -m pytest --collect-only -qq >/dev/null || :  # the tests say what is wrong

test: setup  ## all that a change must pass: check, unit tests, an oracle subset, one Ray end-to-end
	@$(MAKE) --no-print-directory -j 2 -O check collected
	@$(TEST_ENV) $(PY) -m tools.run_tests "not oracle_full and not emulated and not invariants and not e2e and not quality and not peers and not gpu and not kernels"

oracle: setup  ## the whole matrix against transformers.generate
	@$(TEST_ENV) $(PY) -m tools.run_tests "oracle or oracle_full or emulated" tests/e2e tests/engine tests/prefill_node tests/kvcache/storage

tiers: setup  ## oracle over tiers: each family, write and prefetch policy, what comes from host and storage, restarts
	@$(TEST_ENV) $(PY) -m tools.run_tests "not peers" tests/prefill_node/test_tiers.py \
		tests/prefill_node/test_tiers_oracle.py tests/scheduler/test_tier_waits.py tests/kvcache/test_tiers.py \
		tests/kvcache/test_hicache_cases.py tests/kvcache/test_tiers_machine.py tests/prefill_node/test_ship_from_host.py

tenancy: setup  ## tenants: who may see what, in the machines over trees, groups and tiers; oracle over all families
	@$(TEST_ENV) $(PY) -m tools.run_tests "not peers" tests/kvcache/tenancy \
		tests/kvcache/test_tenancy.py tests/kvcache/test_shared_storage.py tests/kvcache/test_tree_machine.py \
		tests/kvcache/test_groups_machine.py tests/kvcache/test_tiers_machine.py \
		tests/prefill_node/test_tenants_oracle.py tests/e2e/test_sharing.py tests/e2e/test_marks.py tests/e2e/test_forget.py

mutants: setup  ## over 900 curated one-line faults: do the tests see them? (ONLY=kvcache/: some of them)
	@$(TEST_ENV) $(PY) -m tests.mutants --only "$(ONLY)"

two-hosts: setup  ## router, prefill and decode in network namespaces, with loss, delay and partitions (root, iptables)
	@$(TEST_ENV) $(PY) -m tests.hosts

fuzz-models: setup  ## MODELS random shapes of all families from SEED on, apart and not, against transformers.generate
	@$(TEST_ENV) FUZZ_SEED=$(or $(SEED),0) FUZZ_MODELS=$(or $(MODELS),400) $(PY) -m tools.run_tests \
		"oracle_full" tests/prefill_node/test_random_models.py

overload: setup  ## default options and more than one decode worker can do: what is accepted is served, the rest gets 429
	@$(TEST_ENV) $(PY) -m tests.overload

fuzz: setup  ## hostile HTTP, frames and KV peers on a running Baton; in between honest requests must be answered (SCALE)
	@$(TEST_ENV) $(PY) -m tests.fuzz --scale $(or $(SCALE),1)

observe: setup  ## Prometheus, an OpenTelemetry collector and Chromium look at a running Baton (apt: prometheus, chromium)
	@$(TEST_ENV) $(PY) -m tests.observe

chaos-ray: setup  ## a Ray Serve application of 6 replicas under 32 streams: one of each kind dies, and a rolling update
	@$(TEST_ENV) $(PY) -m tests.chaos_ray

cluster: setup  ## ray up on hosts made of namespaces: serve, scale, deaths of a host and the head, drain, roles (root, sshd)
	@$(TEST_ENV) $(PY) -m tests.cluster_hosts

invariants: setup  ## long runs of state machines, more seeds, and new examples for every hypothesis test
	@$(TEST_ENV) $(PY) -m tools.run_tests "invariants or hypothesis and not (oracle_full or emulated or gpu or kernels or peers)" \
		--hypothesis-profile=random

e2e: setup  ## a real Ray cluster, 2 prefill and 2 decode replicas and more
	@$(TEST_ENV) $(PY) -m tools.run_tests "e2e" --jobs 1

chaos: setup  ## faults in every state of a request, over real processes (SCENARIOS, SEED, ONLY)
	@$(TEST_ENV) $(PY) -m tests.chaos --scenarios $(or $(SCENARIOS),600) --seed $(or $(SEED),1) --only "$(ONLY)"

gpu: setup  ## all that concerns GPUs: dry run of every family, bench and tests on a GPU; without one they say so
	@$(TEST_ENV) $(PY) -m tools.gpu_dry_run
	@$(TEST_ENV) $(PY) -m bench.gpu --json
	@$(TEST_ENV) $(PY) -m bench.gpu_transfer --json
	@$(TEST_ENV) $(PY) -m bench.gpu_products --json
	@$(TEST_ENV) $(PY) -m tools.run_tests "not oracle_full" --jobs 1 tests/gpu tests/tools/test_gpu_dry_run.py \
		tests/worker/test_device.py tests/worker/test_gpu_build.py tests/engine/test_graphs.py \
		tests/engine/test_flashinfer_limits.py tests/engine/test_flashinfer_signatures.py \
		tests/kvcache/test_device_memory.py tests/kvtransfer/test_cuda_ipc.py

kernels: setup  ## GPU kernels without a GPU: in Triton's interpreter, and as machine code for A100, H100 and B200
	@$(PY) -c "import triton" 2>/dev/null || [ -d .venv/triton ] || .venv/bin/pip install -q --no-deps --target .venv/triton triton==3.7.1
	@$(TEST_ENV) TRITON_INTERPRET=1 PYTHONPATH=.venv/triton $(PY) -m tools.run_tests "kernels" tests/engine/cuda

clients: setup  ## 13 clients from the registries against the demo model and a random one (node and npm; environments in .clients)
	@$(TEST_ENV) TORCH_INDEX="$(TORCH_INDEX)" $(PY) -m tests.clients --only "$(ONLY)"

soak: setup  ## random faults at random times over a steady load (SECONDS, SEED)
	@$(TEST_ENV) $(PY) -m tests.chaos.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

peers: setup  ## NVIDIA Dynamo's indexer reads our KV events; storage by NIXL, LMCache, AIBrix (README: what to install)
	@$(TEST_ENV) $(PY) -m tools.run_tests "peers" tests/peers tests/kvcache/storage

wheel: setup  ## build a wheel, install it in a clean environment, and run it outside the checkout
	@$(TEST_ENV) TORCH_INDEX="$(TORCH_INDEX)" $(PY) -m tools.check_wheel

demo-quality: setup  ## 50 questions the demo model was trained on, in words it never saw
	@$(TEST_ENV) $(PY) -m tools.demo_quality --serve

kv-quant: setup  ## what quantised KV and int8 weights cost: perplexity, and right answers for each kv_cache_dtype
	@$(TEST_ENV) $(PY) -m tools.kv_quant
