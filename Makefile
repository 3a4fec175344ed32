# What people call, and what CI calls. Every target makes its own environment: nothing has to be installed before.
#
#   make test            build, and run the tests            ARGS="-k resume -x" goes to pytest
#   make test-all        every parameter set, and the tests that are "long": before an issue is resolved
#   make test-fast       those that start no process: the inner loop, 3 minutes at most on two cores
#   make demo            train, kill, go on, compare         ARGS="--steps 120" goes to the demo
#   make bench           measure against the peers           ARGS="--gib 1" goes to the benchmark
#   make gpu             all that only a GPU can say, in two parts of 9 minutes: see docs/benchmarks.md
#   make torture         kill a training at random         ARGS="--kills 1000 --seed 1 --json out.json"
#                        ranks, keepers and nodes of a job: ARGS="--nodes 2 --ranks 2 --kills 500"
#   make rank-kills      kill a rank under torchrun, again and again    KILLS=50
#   make test-s3         the core's tests of crashes and of exact resume, on a real S3 server (Ceph's gateway)
#   make fuzz            read hostile bytes                ARGS="--minutes 60 --seed 1"
#   make sanitize        tests of native code under sanitizers   WHICH=address or thread; ARGS="tests/native -x"
#   make lint            ruff, mypy, import-linter, clang-format, check-english: change nothing
#   make format          the same formatters, writing
#   make ptx             make csrc/device/digest.ptx anew from its sources
#   make build           a wheel in dist/
#   make clean           remove what was built; make distclean: the environments too
#
#   PYTHON=python3.12    the interpreter to start from
#   JOBS=4               tests at once; each may have a trainer and a keeper beside it. JOBS=0: one, in pytest's process
#   VENV=.venv           where the environment stands
#   TORCH=system         use the torch that PYTHON already has, and install none
#   WHEELS=folder        install from these wheels, not from the network; wants TORCH=system
#   OUT=folder           where `make gpu` writes; bench-output/gpu
#   PART=tests           one part of `make gpu` alone: tests or bench

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
JOBS ?= 4
ARGS ?=
KILLS ?= 50
WHICH ?= address thread
WHEELS ?=
OUT ?= bench-output/gpu
PART ?=
export PYTHON VENV TORCH WHEELS
# What is compiled stays, whatever the machine says: each worker of the tests would compile all of them anew.
export PYTHONDONTWRITEBYTECODE :=

RUN := $(VENV)/bin
CPP = $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' | grep -v third_party)

.PHONY: help test test-all test-fast demo bench gpu torture rank-kills test-s3 fuzz sanitize lint format ptx build clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n '3,27s/^# \{0,1\}//p' Makefile

test:
	@scripts/environment test,demo
	@$(RUN)/python scripts/run-tests -n $(JOBS) --dist worksteal $(ARGS)

test-all:
	@scripts/environment test,demo
	@$(RUN)/python scripts/run-tests -n $(JOBS) --dist worksteal -m "long or not long" $(ARGS)

test-fast:
	@scripts/environment test,demo
	@$(RUN)/python -m pytest -n $(JOBS) --dist worksteal -m "fast and not long" $(ARGS)

demo:
	@scripts/environment test,demo
	@$(RUN)/python examples/tiny_gpt/demo.py $(ARGS)

bench:
	@scripts/environment test,demo
	@$(RUN)/python -m benchmarks $(ARGS)

gpu:
	@$(PYTHON) -m benchmarks.gpu --out $(OUT) $(if $(PART),--part $(PART)) $(ARGS)

torture:
	@scripts/environment test,demo
	@$(RUN)/python -m tests.crash.torture $(ARGS)

rank-kills:
	@scripts/environment test,demo
	@FLASHCKPT_TEST_KILLS=$(KILLS) $(RUN)/python -m pytest -n 0 tests/ranks/test_kills.py -k torchrun $(ARGS)

test-s3:
	@scripts/environment test,demo
	@$(RUN)/python -m pytest -n $(JOBS) --dist worksteal tests/stores/test_s3_crash.py -m "long or not long" $(ARGS)

fuzz:
	@scripts/environment test,demo
	@$(RUN)/python -m tests.hostile.fuzz $(ARGS)

sanitize:
	@status=0; for kind in $(WHICH); do JOBS=$(JOBS) scripts/sanitize $$kind $(ARGS) || status=1; done; exit $$status

lint:
	@scripts/environment dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/clang-format --dry-run -Werror $(CPP)
	$(RUN)/python scripts/check-english

format:
	@scripts/environment dev
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i $(CPP)

ptx:
	@scripts/environment dev
	$(RUN)/python scripts/make-ptx

build:
	@scripts/environment test,demo
	@$(RUN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -1 dist/*.whl

clean:
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find flashckpt tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
