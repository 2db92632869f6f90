# `make demo` and `make test` install what they need and run on a bare machine.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.set-up

.PHONY: demo test test-browser learn fuzz soak audit check format clean site release-check

demo: $(SETUP)  ## meta-train on glyphs, about two minutes; pictures in runs/demo/
	$(BIN)/ibaml demo

test: $(SETUP) check  ## every check and every test
	$(BIN)/pytest

test-browser: .venv/.browser  ## the pages in Chromium (apt-get install chromium); pictures in runs/browser/
	$(BIN)/pytest -n 0 tests/browser

.venv/.browser: $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	touch .venv/.browser

learn: $(SETUP)  ## train every method; up to 20 minutes, table in benchmarks/results/
	$(BIN)/python benchmarks/learn.py

fuzz: $(SETUP)  ## 10,000 damaged files for every reader; about half an hour
	$(BIN)/python tests/fuzzing.py 10000

soak: $(SETUP)  ## half an hour of kills, full disks, damaged files, scarce memory; a verdict
	$(BIN)/python tests/soak.py --minutes 30

audit: $(SETUP)  ## known faults of the libraries; exit status 3 where no service answers
	test -x .audit/bin/pip-audit || $(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python tests/audit.py .audit/bin/pip-audit

check: $(SETUP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: .venv/.set-up-release  ## the documentation, in build/site/; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -E -a -W --keep-going -b html docs build/site
	$(BIN)/python release/links.py build/site

release-check: .venv/.set-up-release  ## wheel, sdist, site, snippets, links, examples: what a release needs
	OMP_NUM_THREADS=1 $(BIN)/python release/check.py

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,test]"
	touch $(SETUP)

.venv/.set-up-release: $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[release]"
	touch $@

clean:
	rm -rf .venv .audit build dist .pytest_cache .mypy_cache .ruff_cache
