# Every target does its own set-up; `make env` makes the virtual environment .venv that the others use. With TF=2.22 or
# KERAS=3.10 they use a copy of it with that version, or its release candidate. Model Garden requires TensorFlow 2.20.
PYTHON ?= python3
TF ?= 2.20
OTHER_TF := $(filter-out 2.20,$(TF))
VENV := .venv$(OTHER_TF:%=-tf%)$(KERAS:%=-keras%)
# Bytecode is kept, even if the shell says otherwise: without it each process compiles looplib, and rewrites all assertions.
RUN := PYTHONDONTWRITEBYTECODE= TF_CPP_MIN_LOG_LEVEL=2 $(VENV)/bin/python

.PHONY: env demo test test-all test-turn smoke bench bench-growth lint docs bazel

env: $(VENV)/installed

PIP := $(VENV)/bin/python -m pip --quiet

# What a ready trainer needs; then what the tests and Model Garden need.
.venv/runs: EXTRAS := trainers
.venv/installed: EXTRAS := dev,models
# PyTorch for CPUs, which may have an index of its own; without it the tests of its loaders are skipped.
.venv/installed: TORCH := .venv/bin/python -m pip install --quiet --editable '.[torch]'
.venv/installed: OTHERS = $(TORCH) 2> /dev/null || $(TORCH) --extra-index-url https://download.pytorch.org/whl/cpu || true
.venv/installed: .venv/runs
.venv/runs .venv/installed: setup.cfg pyproject.toml
	test -e .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]' 'tensorflow~=2.20.0'
	$(OTHERS)
	touch $@

# Hard links, because pip replaces files and does not write into them. tensorflow-text and tf_keras are each for one
# TensorFlow, and come later than its release candidate, for which the newest tf_keras is taken. The candidate brings
# keras-nightly, which has the files of keras.
ifneq ($(VENV),.venv)
$(VENV)/installed: .venv/installed
	rm -rf $(VENV)
	cp -alH .venv $(VENV)
ifneq ($(OTHER_TF),)
	$(PIP) uninstall --yes keras keras-hub tensorflow-text tf-models-official tf_keras
	$(PIP) install --upgrade --no-compile 'tensorboard >= 2.20' 'tensorflow~=$(TF).0rc0'
	$(PIP) install --no-deps 'tf_keras <= $(TF).99'
	$(PIP) install keras-hub 'tensorflow-text~=$(TF).0' 2> /dev/null || echo 'no tensorflow-text is for TensorFlow $(TF)'
endif
ifdef KERAS
	$(PIP) uninstall --yes keras keras-nightly
	$(PIP) install --no-deps 'keras~=$(KERAS).0'
endif
	rm $@ && touch $@
endif

demo: .venv/runs
	rm -rf build/demo
	TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -m trainers.image_classification --model_dir=build/demo

# More processes than cores, because many tests wait, the slow ones most.
TOGETHER := --dist loadfile --no-loadscope-reorder -m "not alone"

# With another TensorFlow, what needs Model Garden is listed as skipped.
test: env
	$(RUN) -m pytest -n 3 $(TOGETHER) $(OTHER_TF:%=-rs)

# Each case, or the slow ones of one turn of 25, with all repetitions; of what is random, as many as these two say.
# What measures time or memory runs alone, after the rest.
test-all: CASES := --all
test-turn: CASES := --turn=$(TURN)
test-all test-turn: export LOOPLIB_MUTATIONS ?= 100
test-all test-turn: export LOOPLIB_FAULTS ?= 20
test-all test-turn: env
	$(RUN) -m pytest $(CASES) -n 4 $(TOGETHER)
	$(RUN) -m pytest --all -m alone $(shell grep -rl "mark.alone" tests --include=*_test.py)

# A part of the tests: versions, TensorFlow's internals, both Keras families, loops, checkpoints, evaluation, a ready
# trainer.
SMOKE := compat/versions compat/tf loop/loops checkpoint/checkpoints loop/evaluator ready_trainers/image_classification

smoke: env
	$(RUN) -m pytest -n 2 --dist loadfile $(SMOKE:%=tests/%_test.py)

bench: env $(VENV)/peers
	$(RUN) -m benchmarks

# How the cost of a step grows with the work: build/growth.json and its picture.
bench-growth: env
	$(RUN) -m benchmarks.growth

# Peers of the benchmark that are not looplib's dependencies; without them it leaves their rows out. PyTorch for CPUs has
# an index of its own, and the other one cannot be in one process with TensorFlow.
$(VENV)/peers: setup.cfg | env
	-$(VENV)/bin/python -m pip install --quiet jax
	-$(VENV)/bin/python -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu --editable '.[bench]'
	touch $@

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# The site of docs/, in build/site; a broken link is an error.
docs: $(VENV)/docs docs/mermaid.min.js
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

# Draws the diagrams; MIT license.
docs/mermaid.min.js:
	mkdir -p build
	cd build && tar -xzf "$$(npm pack --silent mermaid@11.4.1)" package/dist/mermaid.min.js
	mv build/package/dist/mermaid.min.js $@

$(VENV)/docs: setup.cfg | env
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@

# Tests run with the environment's Python, found on the PATH.
bazel: env
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel build //...
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel test //:tests/project/build_test //:tests/report/clock_test
