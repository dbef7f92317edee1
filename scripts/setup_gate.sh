#!/usr/bin/env bash
# Unpacks the compilers that `make gate` needs into .cache/gate, of the very version of the jaxlib in .venv. Beside
# .venv and not inside: jax would find the plugin there in every program, and on a machine with a GPU try to use it
# without CUDA's libraries. Where no such wheels can be had it says so and succeeds; the gate lists what it could not
# check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PY=.venv/bin/python
FOLDER=.cache/gate

# The extra `gate` of pyproject.toml, the plugin pinned to jaxlib.
wanted=$("$PY" - <<'EOF'
import tomllib
from importlib.metadata import version
extra = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["gate"]
print(*(f"{name}=={version('jaxlib')}" if name == "jax-cuda12-plugin" else name for name in extra))
EOF
)
KEY="$wanted for $("$PY" --version)"
[[ -f $FOLDER/.stamp && "$(<"$FOLDER/.stamp")" == "$KEY" ]] && exit 0

echo "setup: fetching $wanted (230 MB)" >&2
rm -rf "$FOLDER"
# shellcheck disable=SC2086  # one word per requirement
if "$PY" -m pip install --quiet --disable-pip-version-check --only-binary :all: --target "$FOLDER" $wanted; then
    echo "$KEY" >"$FOLDER/.stamp"
else
    rm -rf "$FOLDER"
    echo "setup: no GPU compilers for this machine; the gate will say what it could not check" >&2
fi
