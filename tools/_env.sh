# Sourced by tools/demo and tools/test: sets PYTHON to an interpreter that has what this repository needs.
#
#   FSDP_PYTHON=/path/to/python   use that environment; only what is missing from it is installed, and named first
#   (unset)                       make .venv in the repository, once; later calls find it up to date
#
# Everything here prints one line before it does something that takes time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

say() { printf '[fsdp] %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in python3 python3.12 python3.13 python3.11 python3.14 python; do
        if is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python >= 3.11 on PATH: install one, or name one with FSDP_PYTHON=/path/to/python"
}

pip_install() { # python, arguments...
    local python="$1"
    shift
    # The environment variable reaches pip's isolated build environments as well, which `-c` does not.
    PIP_CONSTRAINT="$ROOT/constraints.txt" "$python" -m pip install -qq --disable-pip-version-check "$@" ||
        die "pip install $* failed (its messages are above): is the package index reachable?"
}

use_given_python() {
    PYTHON="$FSDP_PYTHON"
    is_new_enough "$PYTHON" || die "FSDP_PYTHON=$PYTHON is not a Python >= 3.11"
    "$PYTHON" -c 'import torch' || die "FSDP_PYTHON=$PYTHON cannot import torch: install torch >= 2.11 there"
    local missing
    missing="$("$PYTHON" - <<'PY'
from importlib.util import find_spec

needed = {"pytest": "pytest", "hypothesis": "hypothesis", "expecttest": "expecttest",
          "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "safetensors": "safetensors"}
print(*(package for module, package in needed.items() if find_spec(module) is None))
PY
)"
    if [ -n "$missing" ]; then
        say "installing into the environment of $PYTHON what it lacks: $missing"
        # shellcheck disable=SC2086 # a list of words
        "$PYTHON" -m pip install -qq --disable-pip-version-check $missing ||
            die "could not install $missing there: install them by hand, then call this again"
    fi
    say "using $("$PYTHON" -c 'import sys, torch; print(sys.executable, "with torch", torch.__version__)')"
}

stamp() { # what the environment was made from; it is made again when any of this changes
    printf '%s\n' "$ROOT" "$1"
    cat constraints.txt
    sed '/^\[tool\.pytest/,$d' pyproject.toml # the rest configures tools and changes no install
}

use_own_environment() {
    local base torch
    PYTHON="$ROOT/.venv/bin/python"
    if [ -f .venv/stamp ] && [ -x "$PYTHON" ] && "$PYTHON" -c '' 2>/dev/null &&
        stamp "$("$PYTHON" -V)" | cmp -s - .venv/stamp; then
        say "using .venv (up to date)"
        return
    fi
    base="$(find_python)" || exit 2
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make virtual environments (no venv or ensurepip): install them" \
            "(Debian, Ubuntu: apt-get install python3-venv), or set FSDP_PYTHON to an environment with torch"
    say "making .venv with $base ($("$base" -V))"
    "$base" -m venv --clear .venv || die "could not make .venv"
    torch="$(grep '^torch==' constraints.txt)"
    say "installing $torch (the largest download)"
    pip_install "$PYTHON" "$torch"
    say "installing this package and its tools, at the versions of constraints.txt"
    pip_install "$PYTHON" --editable '.[dev]'
    stamp "$("$PYTHON" -V)" >.venv/stamp
}

if [ -n "${FSDP_PYTHON:-}" ]; then use_given_python; else use_own_environment; fi

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
