#!/bin/sh
# Chooses a Python, then lets scripts/setup_venv.py fill .venv, or .venv-ray and so on. Usage: scripts/setup.sh core|dev|ray|trl|vllm|low
# Environment: PYTHON (an interpreter to use instead), TORCH_INDEX_URL (see setup_venv.py).
set -eu
cd "$(dirname "$0")/.."

# 0: runs and is 3.11 to 3.14 (a version manager may leave a `python3.13` behind that does not run).
runs() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

without_venv=""
for python in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3}; do
    runs "$python" || continue
    if makes_venvs "$python"; then
        echo "set-up: using $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
        exec "$python" scripts/setup_venv.py "$1"
    fi
    [ -n "$without_venv" ] || without_venv=$python
done

if [ -n "$without_venv" ]; then
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "set-up: $without_venv cannot make virtual environments (no ensurepip);" >&2
    echo "        on Debian or Ubuntu: sudo apt install python$version-venv" >&2
elif [ -n "${PYTHON:-}" ]; then
    echo "set-up: PYTHON=$PYTHON does not run or is not Python 3.11 to 3.14" >&2
else
    echo "set-up: no working python3.14, python3.13, python3.12, python3.11 or python3 (3.11 to 3.14) was found;" >&2
    echo "        install one, or name it: make PYTHON=/path/to/python ..." >&2
fi
exit 1
