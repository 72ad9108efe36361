# `make install` once, then `make demo` for the whole path on a small real model, `make test` for the checks.
.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint format clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := models/smollm2-135m

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP)  ## create .venv with headstart and its development tools

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(MODEL)/fetched.json: | $(STAMP)
	$(BIN)/headstart fetch smollm2-135m --out $(MODEL)

demo: $(STAMP)  ## fetch, synthesise, train, measure and sample: minutes on a laptop
	$(BIN)/headstart demo

test: $(STAMP) $(MODEL)/fetched.json  ## the quick tests (fetches the model once)
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

test-all: $(STAMP) $(MODEL)/fetched.json  ## every test
	$(BIN)/python -m pytest -q

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and build products; models, data, runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
