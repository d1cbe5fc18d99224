# Every target does its own set-up; `make env` makes the virtual environment .venv that the others use.
PYTHON ?= python3
VENV := .venv
RUN := TF_CPP_MIN_LOG_LEVEL=2 $(VENV)/bin/python

.PHONY: env demo test test-all bench lint docs bazel

env: $(VENV)/installed

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: env
	rm -rf build/demo
	TF_CPP_MIN_LOG_LEVEL=3 $(VENV)/bin/python -m trainers.image_classification --model_dir=build/demo

# Three processes on two cores, because many tests wait; what measures time or memory runs alone, after the rest.
TOGETHER := -n 3 --dist loadfile --no-loadscope-reorder -m "not alone"

test: env
	$(RUN) -m pytest $(TOGETHER)
	$(RUN) -m pytest -m alone

# With all repetitions, of what is random too.
test-all: env
	LOOPLIB_MUTATIONS=2000 LOOPLIB_FAULTS=200 $(RUN) -m pytest --all $(TOGETHER)
	$(RUN) -m pytest --all -m alone

bench: env $(VENV)/peers
	$(RUN) -m benchmarks

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
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

$(VENV)/docs: setup.cfg | env
	$(VENV)/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@

# Debian: apt-get install bazel-bootstrap bazel-rules-java. Tests run with the environment's Python, found on the PATH.
bazel: env
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel build --config=debian //...
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel test --config=debian //tests:build_test //tests:clock_test
