# Short names for the commands of README.md, CONTRIBUTING.md and .ci.
OUT = dist
.PHONY: install test lint types dist ci long

install:
	python3 -m venv .venv && .venv/bin/pip install -e '.[test,lint]'
test:
	.venv/bin/python -m pytest -n 4
lint:
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
types:
	.venv/bin/mypy
dist:
	.venv/bin/pip install -q build && .venv/bin/python -m build --outdir $(OUT)
ci:
	.ci/run
long:
	.ci/long
