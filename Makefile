# On a machine with Python >= 3.11 and nothing else: `make demo` runs the main job on embedded images, `make test` runs lint, types
# and all tests, `make quick` the fast part of them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo serve-demo test quick check tests format clean

# Three to four minutes on two CPU cores, the installation included: the bundled weights fine-tuned on photographs, the same from scratch, one page on both.
demo: .venv/.ready
	rm -rf runs/demo
	$(BIN)/vitrail demo --out runs/demo

# The bundled weights as a server on this machine: a page at http://127.0.0.1:8000/ to drop images on; Ctrl-C ends it.
serve-demo: .venv/.ready
	$(BIN)/vitrail serve vitrail_tiny --port 8000

test: check tests

# Under 90 seconds: for the inner loop.
quick: check
	$(BIN)/python -m pytest -m "not slow and not gpu and not timm and not large"

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tests: .venv/.ready
	$(BIN)/python -m pytest

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is installed first and alone: a looser requirement would download a CUDA build.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Vitrail needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
