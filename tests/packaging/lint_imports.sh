#!/usr/bin/env bash
# Holds imports to the contracts in pyproject.toml, on a copy in which samewise/ is a real folder: import-linter does not follow the links of .package.
# BIN is the virtual environment's folder of commands.
set -euo pipefail
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/samewise"
cp -r runner recipes datasets configs .package/samewise/*.py "$copy/samewise"
find "$copy" -name __pycache__ -type d -prune -exec rm -r {} +
find "$copy" -type d -empty -delete # what a renamed room has left behind
find "$copy/samewise" -type d -exec touch {}/__init__.py \;
cp pyproject.toml "$copy"
cd "$copy"
PYTHONPATH=$copy "$BIN/lint-imports" --no-cache --no-logo
