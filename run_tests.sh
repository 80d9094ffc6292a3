#!/usr/bin/env bash
# The whole test suite, on a CPU with 2 cores, in about 20 minutes. Makes .venv on the first run.
#   bash run_tests.sh                           everything
#   bash run_tests.sh tests/test_data.py -x     what is given goes to pytest
#   UPDATE_GOLDEN=1 bash run_tests.sh tests/test_equivalence.py
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh

export HF_HUB_OFFLINE=1 # no test needs a hub; one that asks for it fails at once
ruff check -q .
ruff format --check -q .
# Two files at a time: ranks wait for each other most of the time, so one file does not fill two cores.
exec python -m pytest -n 2 --dist loadfile "$@"
