#!/usr/bin/env bash
# Unpacks the compilers that `make gate` needs into .cache/gate, of the very version of the jaxlib in .venv: for
# CUDA 12, or for CUDA 13 where this jaxlib has no plugin for 12. Beside .venv and not inside: jax would find the plugin
# there in every program, and on a machine with a GPU try to use it without CUDA's libraries. Where no such wheels can
# be had it says so and succeeds; the gate lists what it could not check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PY=.venv/bin/python
FOLDER=.cache/gate
KEY="$("$PY" -c "from importlib.metadata import version; print('jaxlib', version('jaxlib'))") for $("$PY" --version)"
[[ -f $FOLDER/.stamp && "$(<"$FOLDER/.stamp")" == "$KEY" ]] && exit 0

# One extra of pyproject.toml, its plugin pinned to jaxlib.
requirements() {
    "$PY" - "$1" <<'EOF'
import sys
import tomllib
from importlib.metadata import version
extra = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]
print(*(f"{name}=={version('jaxlib')}" if name.endswith("-plugin") else name for name in extra))
EOF
}

for extra in gate-cuda12 gate-cuda13; do
    wanted=$(requirements "$extra")
    echo "setup: fetching $wanted (about 230 MB)" >&2
    rm -rf "$FOLDER"
    # shellcheck disable=SC2086  # one word per requirement
    if "$PY" -m pip install --quiet --disable-pip-version-check --only-binary :all: --target "$FOLDER" $wanted; then
        echo "$KEY" >"$FOLDER/.stamp"
        exit 0
    fi
done
rm -rf "$FOLDER"
echo "setup: no GPU compilers for this machine; the gate will say what it could not check" >&2
