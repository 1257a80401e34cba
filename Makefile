# make replay | make test | make lab | make lint | make docs: each builds the environment first, once per content of its pins.
# make env-gpu: the environment for GPUs, by uv. make lock: its lock again, from the pins.
PYTHON ?= python3
PROFILE ?= cpu-tiny
NOTEBOOKS ?= notebooks
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/draft-tp-workbench
PINS := requirements.txt requirements-test.txt requirements-cpu.txt requirements-cpu-nodeps.txt
LOCKED := requirements.txt requirements-test.txt requirements-gpu.in
# The packages live in a cache under the hash of the pins and are shared by every clone; .venv is a thin layer over
# them that holds this clone's own code, so two clones never run each other's.
KEY := $(shell { cat $(PINS); $(PYTHON) -c 'import sys, platform; print(sys.version, platform.machine())'; } | sha256sum | cut -c1-16)
BASE := $(CACHE)/$(KEY)
BIN := .venv/bin
CODE := workbench tests fixtures/training

.PHONY: env env-gpu lock replay test lint lab docs pictures clean
env: .venv/ready-$(KEY)

# SGLang's wheels are for these Pythons.
RIGHT_PYTHON = $(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
  f"PYTHON: {sys.version.split()[0]} is not 3.11, 3.12 or 3.13: make PYTHON=python3.12 ...")'

# pip says what it fetches: the first installation takes minutes.
$(BASE)/ready:
	@$(RIGHT_PYTHON)
	rm -rf $(BASE).tmp $(BASE) && mkdir -p $(CACHE)
	$(PYTHON) -m venv $(BASE)
	@echo "environment 1/2: the workbench, torch and what SGLang needs on a CPU (2 GB, a few minutes, once)"
	$(BASE)/bin/python -m pip install -r requirements.txt -r requirements-test.txt -r requirements-cpu.txt
	@echo "environment 2/2: SGLang without its CUDA packages"
	$(BASE)/bin/python -m pip install --no-deps -r requirements-cpu-nodeps.txt
	touch $@

.venv/ready-$(KEY): $(BASE)/ready pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv --without-pip .venv
	$(BASE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .venv/shared.tmp
	mv .venv/shared.tmp "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(BIN)/python -m ipykernel install --sys-prefix >/dev/null
	touch $@

# The pinned uv, in an environment of its own.
UV := $(CACHE)/uv-$(shell sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements-test.txt)
$(UV)/bin/uv:
	$(PYTHON) -m venv $(UV)
	$(UV)/bin/python -m pip install $(shell grep -o '^uv==[0-9.]*' requirements-test.txt)

env-gpu: $(UV)/bin/uv
	@$(RIGHT_PYTHON)
	$(UV)/bin/uv venv --clear --python $$($(PYTHON) -c 'import sys; print(sys.executable)') .venv-gpu
	$(UV)/bin/uv pip install --python .venv-gpu/bin/python -r requirements-gpu.lock
	$(UV)/bin/uv pip install --python .venv-gpu/bin/python --no-deps -e .
	.venv-gpu/bin/python -m ipykernel install --sys-prefix >/dev/null
	@echo ". .venv-gpu/bin/activate    # then: workbench check PROFILE, workbench replay PROFILE, jupyter lab notebooks"

lock: $(UV)/bin/uv
	$(UV)/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade $(LOCKED) -o requirements-gpu.lock

replay: env
	$(BIN)/workbench replay $(PROFILE) $(ARGS)

# One thread for torch: tiny models gain nothing from more, and two pools that spin on two cores cost tenfold beside a server.
# Tests of whole runs go one by one in one process, those of servers in a second one, and the others after them (tests/conftest.py).
test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope $(ARGS)

lint: env
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)

lab: env
	JUPYTER_PATH=$(BASE)/share/jupyter JUPYTERLAB_DIR=$(BASE)/share/jupyter/lab JUPYTER_CONFIG_PATH=$(BASE)/etc/jupyter \
	  $(BIN)/python -m jupyterlab --notebook-dir=$(NOTEBOOKS) \
	  --ServerApp.kernel_spec_manager_class=workbench.run.kernel.OwnSpecs $(ARGS)

# README.md and docs/*.md from docs/src/*.md.j2 and the recordings.
docs: env
	$(BIN)/workbench docs $(ARGS)

# The pictures of README.md and docs/*.md are those that the tests made last.
pictures:
	cp $(patsubst fixtures/%,outputs/%,$(sort $(shell grep -oh 'fixtures/pictures/[a-z-]*.png' README.md docs/*.md))) fixtures/pictures/

clean:
	rm -rf .venv .venv-gpu build *.egg-info
