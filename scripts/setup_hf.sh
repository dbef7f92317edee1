#!/usr/bin/env bash
# Creates .cache/hf, an environment of its own for the parity tests against transformers (`make test-hf`): torch and
# transformers pinned, and this project on the oldest JAX that it supports, so that one more version is tested. Safe to
# run any number of times, like setup_venv.sh.
#   PYTHON=...  the interpreter; otherwise python3.11
# The tests need no GPU. Where pip would fetch a torch with CUDA (several GB), point it at an index of CPU builds with
# pip's own settings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

FOLDER=.cache/hf
PY=$FOLDER/bin/python
STAMP=$FOLDER/.setup-stamp
PINS=(torch==2.13.0 transformers==5.24.0 jax==0.10.2)
EXTRAS=(pytest)

say() { echo "setup: $*" >&2; }

KEY="${PINS[*]} ${EXTRAS[*]} $(cksum <pyproject.toml) $PWD"
[[ -f $STAMP && "$(<"$STAMP")" == "$KEY" ]] && "$PY" --version >/dev/null 2>&1 && exit 0

python=${PYTHON:-python3.11}
if ! "$python" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    say "$python does not run, is older than 3.11 or lacks venv; name another one with PYTHON="
    exit 1
fi
say "creating $FOLDER with $python: ${PINS[*]} (a few minutes)"
rm -rf "$FOLDER"
mkdir -p .cache
"$python" -m venv "$FOLDER"
"$PY" -m pip install -qq --disable-pip-version-check "${PINS[@]}" "${EXTRAS[@]}"
"$PY" -m pip install -qq --disable-pip-version-check -e '.[chat]'
echo "$KEY" >"$STAMP"
say "done: $("$PY" --version), $("$PY" -m pip freeze 2>/dev/null | grep -iE '^(torch|transformers|jax)==' | tr '\n' ' ')"
