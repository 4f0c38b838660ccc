#!/bin/sh
# For `make bench-peers`: makes the virtual environment VENV and installs each package with a separate pip
# call, so that one failure does not affect other packages. For each package that is missing afterwards,
# writes a sentence to B/pip_NAME.left_out.
#
#   B=build VENV=build/venv TORCH='torch --index-url URL' sh bench/peers/install.sh
mkdir -p "$B"
rm -f "$B"/pip_*.left_out

# get NAME REQUIREMENT...: installs a package
get() {
    name=$1
    shift
    if ! "$VENV/bin/pip" install --quiet "$@" > "$B/pip.txt" 2>&1; then
        why=$(grep -i -m 1 error "$B/pip.txt" || tail -n 1 "$B/pip.txt")
        echo "$name: pip cannot install it: $why" > "$B/pip_$name.left_out"
        return 1
    fi
}

# module NAME REQUIREMENT...: installs a package that Python imports as NAME, and prints its version
module() {
    get "$@" || return 0
    "$VENV/bin/python" -c "import $1; from importlib.metadata import *; print('$1', version('$1'))" \
        2> "$B/pip.txt" ||
        echo "$1: Python cannot import it: $(tail -n 1 "$B/pip.txt")" > "$B/pip_$1.left_out"
}

if ! python3 -m venv "$VENV" > "$B/pip.txt" 2>&1; then
    why="'python3 -m venv' fails (Debian: python3-venv): $(tail -n 1 "$B/pip.txt")"
    echo "all from PyPI: $why" > "$B/pip_venv.left_out"
    exit 0
fi
# shellcheck disable=SC2086
module torch $TORCH
module numpy numpy
module safetensors safetensors
module transformers transformers
get onednn onednn-devel-cpu-gomp || :
