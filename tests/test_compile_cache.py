"""A second process takes up what the first compiled, is told so, and still counts it as compiled."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from atlas_jax.compile_cache import keep_compiled

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from atlas_jax import compile_cache
from atlas_jax.decode.compiles import compiles

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
compile_cache.LEAST_S = 0.0
cache = compile_cache.keep_compiled(Path(sys.argv[1]))
jax.jit(lambda x: jnp.sort(x * 2)).lower(jnp.arange(8.0)).compile()
print(json.dumps([cache.describe(), cache.programs, cache.bytes, len(hits), compiles()]))
"""


def run(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_programs_are_kept_between_processes(tmp_path):
    first, again = run(tmp_path / "new"), run(tmp_path / "new")
    assert first[1:4] == [0, 0, 0] and str(tmp_path / "new") in first[0]
    assert again[1] > 0 and again[2] > 1000 and again[3] > 0
    assert again[4] == first[4] > 0


def test_where_nothing_can_be_kept_it_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    said, programs, *_ = run(tmp_path / "file" / "below")
    assert said.startswith("compiled programs are not kept: ") and "file" in said and programs == 0


@pytest.fixture
def own_options():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_those_that_start_at_the_same_moment_all_keep_their_programs(tmp_path, own_options):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(keep_compiled, [tmp_path] * 400))
    assert {cache.reason for cache in found} == {""} and list(tmp_path.iterdir()) == []
