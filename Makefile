# On a machine with Python >= 3.11 and nothing else: `make demo` adapts weights to built-in images, `make test` runs lint, types, tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check tests format clean

# Two CPU cores need less than three minutes: bundled weights adapted to photographs, the same from scratch, one page on both.
demo: .venv/.ready
	rm -rf runs/demo
	$(BIN)/vitrail demo --out runs/demo

test: check tests

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tests: .venv/.ready
	$(BIN)/python -m pytest

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes in first and alone: a looser request would fetch a CUDA build.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Vitrail needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
