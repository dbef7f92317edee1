#!/usr/bin/env bash
# Creates or refreshes .venv with everything the tests, the demo and the scripts need. Safe to run any number of
# times: a stamp holding the hash of pyproject.toml and the place of the checkout makes a repeat nearly free, and
# is written last, so that an interrupted set-up is redone.
#   PYTHON=...  use exactly this interpreter; otherwise the newest one that works and that JAX has wheels for
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PY=$VENV/bin/python
STAMP=$VENV/.setup-stamp
TARGET='.[dev,train,plot]'

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
# A name on PATH proves nothing (version managers leave shims behind, distributions split venv off): run it.
# uv brings its own venv and pip.
usable() { new_enough "$1" && { have uv || "$1" -c 'import ensurepip, ssl, venv' >/dev/null 2>&1; }; }

digest() {
    if have sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

fresh() {
    [[ -f $STAMP && "$(<"$STAMP")" == "$KEY" ]] && version "$PY" >/dev/null && [[ $(same_python) == yes ]]
}

# No when PYTHON asks for another version than the one .venv was made with.
same_python() {
    if [[ -z ${PYTHON:-} || "$(version "$PYTHON")" == "$(version "$PY")" ]]; then echo yes; else echo no; fi
}

# One usable interpreter of each version, newest first, each on a line.
candidates() {
    local minor path pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}
    for minor in 14 13 12 11; do
        for path in "python3.$minor" python3 "$pyenv/versions/3.$minor".*/bin/python; do
            if [[ "$(version "$path")" == "3.$minor".* ]] && usable "$path"; then echo "$path"; break; fi
        done
    done
}

install() {
    if have uv; then
        uv pip install --quiet --python "$PY" -e "$TARGET" && return
        say "uv could not install; trying pip, which may be configured with another index"
    fi
    "$PY" -m pip install --quiet --disable-pip-version-check -e "$TARGET"
}

create() { # interpreter
    rm -rf "$VENV"
    if have uv; then uv venv --quiet --seed --python "$1" "$VENV"; else "$1" -m venv "$VENV"; fi
}

KEY="$(digest pyproject.toml) $PWD"
fresh && exit 0

# Two targets started side by side must not build the same folder.
if have flock; then
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9
    fresh && exit 0
fi

# A finished .venv whose pyproject.toml changed is brought up to date in place. One without a stamp was
# interrupted, and one made elsewhere holds the paths of that place: both start over.
if [[ -f $STAMP && "$(cut -d ' ' -f 2- "$STAMP")" == "$PWD" && $(same_python) == yes ]] && version "$PY" >/dev/null; then
    say "pyproject.toml changed: updating $VENV"
    rm -f "$STAMP"
    if install; then
        echo "$KEY" >"$STAMP"
        exit 0
    fi
    say "the update failed; starting over"
fi

if [[ -n ${PYTHON:-} ]]; then
    new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run or is older than 3.11"
    usable "$PYTHON" || die "PYTHON=$PYTHON lacks venv, ensurepip or ssl (on Debian and Ubuntu: apt install python3-venv)"
    pythons=$PYTHON
else
    pythons=$(candidates)
fi
if [[ -z $pythons ]]; then
    if have uv; then
        pythons=3.13 # uv fetches one
    elif new_enough python3; then
        die "python3 is $(version python3) but lacks venv, ensurepip or ssl (on Debian and Ubuntu: apt install python3-venv)"
    else
        die "no Python from 3.11 to 3.14 works here; install one (and python3-venv), or name it with PYTHON="
    fi
fi

while read -r python; do
    say "creating $VENV with $python (a few minutes the first time)"
    # Commands must not eat the list of interpreters on stdin.
    if create "$python" </dev/null && install </dev/null; then
        echo "$KEY" >"$STAMP"
        say "done: Python $(version "$PY"), jax $("$PY" -c 'from importlib.metadata import version; print(version("jax"))')"
        exit 0
    fi
    say "set-up with $python failed (perhaps a package has no wheels for it); an older interpreter, if any, comes next"
done <<<"$pythons"
rm -rf "$VENV"
die "no interpreter led to a working $VENV; the messages above say why"
