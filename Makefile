# Needs GNU make 3.81+ and Python 3.11 to 3.14 on Linux or macOS; everything else goes into .venv (and .venv-ray, .venv-trl,
# .venv-vllm, .venv-low).
#
#   make demo       set up, then train the demo model (ARGS="--steps 20" is passed on)
#   make test       set up, then lint, types and tests: what CI runs (ARGS goes to pytest)
#   make test-ray   the tests of what needs Ray, in an environment of their own; so test-trl and test-vllm (Linux)
#   make test-low   all tests with the oldest versions that pyproject.toml accepts (Python 3.11 or 3.12)
#   make check      lint and types only; make format mends what can be mended
#   make docs       write docs/config.md anew
#   make smollm2    fetch SmolLM2-135M-Instruct for examples/gsm8k_smollm2.toml
#   make bench-engine   the embedded engine against transformers
#   make bench-bookkeeping   what a run costs besides the model
#   make bench-rollout  a run with drafts against the same run without, visit by visit
#   make bench-inflight   the same for a second visit, by responses in flight
#   make bench-draft    drafting replayed on recorded rollouts
#   make study-kill     kill runs everywhere and compare, some 40 minutes; goes on where it stopped
#   make bench-ray      Ray workers against other fleets, and idle slots by schedule
#   make study-ray-kill   kill workers of a Ray fleet 50 times; goes on where it stopped
#   make study-flips    count float32 flips over a million tokens, some 15 minutes; goes on where it stopped
#   make study-reuse    what the reuse modes do to training, some 40 minutes; goes on where it stopped
#   make study-curriculum   sorted against synchronous in training, some 40 minutes; goes on where it stopped
#   make study-refresh  what generating dropped work again costs, some 20 minutes; goes on where it stopped
#   make study-published   the published tables beside ours, simulated; goes on where it stopped
#   make study-simulator   simulated runs beside real ones; goes on where it stopped
#   make study-simulation  100,000 random worlds with all invariants, an hour or so; goes on where it stopped
#   make study-vllm     the demo trained with vLLM and without, some 40 minutes; goes on where it stopped (Linux)
#   make study-trl   TRL's own generation, ours in TRL, and stretto train, some 30 minutes; goes on where it stopped
#   make clean      remove the environments and what the tools leave
#
# PYTHON=python3.12 chooses the interpreter; TORCH_INDEX_URL=https://... the index that torch comes from.

PYTHON ?=
TORCH_INDEX_URL ?=
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
SETUP := PYTHON='$(PYTHON)' TORCH_INDEX_URL='$(TORCH_INDEX_URL)' sh scripts/setup.sh
SETUP_FILES := pyproject.toml constraints.txt scripts/setup.sh scripts/setup_venv.py

# Stacks that cannot share an environment, and the tests that need them.
STACKS := ray trl vllm low
TESTS_ray := tests/fleet/test_ray*.py tests/learn/test_sharded*.py
TESTS_trl := tests/integrations/test_trl*.py
TESTS_vllm := tests/engine/test_vllm*.py tests/integrations/test_vllm*.py
TESTS_low := -n 2 --dist loadfile --no-loadscope-reorder

# A stamp is worth nothing when the interpreter behind it has gone.
RUNS = $(filter 1,$(shell $(1)/bin/python -c 'print(1)' 2>/dev/null))
.PHONY: $(foreach venv,$(VENV) $(STACKS:%=$(VENV)-%),$(if $(call RUNS,$(venv)),,$(venv)/.core $(venv)/.dev))

.PHONY: help demo test test-ray test-trl test-vllm test-low check format docs smollm2 bench-engine bench-bookkeeping bench-draft bench-rollout bench-inflight bench-ray study-kill study-ray-kill study-flips study-reuse study-curriculum study-refresh study-published study-simulator study-simulation study-vllm study-trl clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.core: $(SETUP_FILES)
	@$(SETUP) core

$(VENV)/.dev: $(SETUP_FILES)
	@$(SETUP) dev

demo: $(VENV)/.core
	$(VENV)/bin/stretto train $(ARGS)

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Two workers of one thread each, a file in one of them, the long files first (tests/conftest.py).
test: check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

$(STACKS:%=$(VENV)-%/.core): $(VENV)-%/.core: $(SETUP_FILES) constraints-vllm.txt constraints-low.txt
	@$(SETUP) $*

test-ray test-trl test-vllm test-low: test-%: $(VENV)-%/.core
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest $(TESTS_$*) $(ARGS)

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.core
	$(PY) scripts/config_docs.py

smollm2: $(VENV)/.core
	$(PY) scripts/smollm2.py

bench-engine bench-bookkeeping bench-draft bench-rollout bench-inflight: $(VENV)/.core
	$(VENV)/bin/stretto bench $(@:bench-%=%) $(ARGS)

study-kill study-flips study-reuse study-curriculum study-refresh study-published study-simulator study-simulation: $(VENV)/.dev
	$(PY) -m $(@:study-%=studies.%) $(ARGS)

study-vllm: $(VENV)-vllm/.core
	HF_HUB_OFFLINE=1 $(VENV)-vllm/bin/python -m studies.vllm $(ARGS)

study-trl: $(VENV)-trl/.core
	HF_HUB_OFFLINE=1 $(VENV)-trl/bin/python -m studies.trl $(ARGS)

bench-ray: $(VENV)-ray/.core
	$(VENV)-ray/bin/stretto bench ray $(ARGS)

study-ray-kill: $(VENV)-ray/.core
	$(VENV)-ray/bin/python -m studies.ray_kill $(ARGS)

clean:
	rm -rf $(VENV) $(STACKS:%=$(VENV)-%) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/stretto/__pycache__/kernels-*
