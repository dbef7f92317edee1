"""What real sizes would need on eight GPUs, compiled for them ahead of time: no GPU is there, and nothing is run.

    make gate                               # once: fetches the compilers
    python experiments/scale/run.py         # several minutes; run it again and it goes on
    python experiments/scale/run.py --models qwen3.5-27b --again --json

The programs are the engine's own, lowered from shapes in bfloat16 with the shardings that an engine would give them.
Each case compiles in a process of its own. Writes `results.json` and `table.md` here.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHIP, DEVICES, CONTEXT, DRAFTS = "sm_90", 8, 4096, 3
PATIENCE_S = 1800
SLOTS, LINES = 64, 8  # slots of the pool in all; sequences of a step on each shard of the data
CASES = [
    ("qwen3.5-0.8b", "tensor=2,data=4"),
    ("qwen3.5-27b", "tensor=4,data=2"),
    ("qwen3.5-35b-a3b", "expert=4,tensor=2"),
    ("qwen3.5-35b-a3b", "expert=8"),
    ("qwen3.5-35b-a3b", "expert=4,data=2"),
    ("qwen3.5-35b-a3b", "tensor=2,data=4"),
    ("qwen3.5-27b", "tensor=4,fsdp=2"),
    ("qwen3.5-0.8b", "data=8"),
]


@dataclasses.dataclass(frozen=True)
class Config:
    """Which cases."""

    models: tuple[str, ...] = ()  # only these; all if there are none
    again: bool = False  # measure anew what is there
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Compiles what is missing; prints a table and a last line of JSON."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    out = sys.stderr if config.json else sys.stdout
    names = {f"{model} {mesh}": (model, mesh) for model, mesh in CASES}
    asked = [name for name, (model, _) in names.items() if not config.models or model in config.models]
    if config.again:
        kept = {name: row for name, row in kept.items() if name not in asked}
    for name in asked:
        if name not in kept or "error" in kept[name]:
            print(f"compiling {name} ...", file=sys.stderr, flush=True)
            kept[name] = in_process(*names[name])
            path.write_text(json.dumps(kept, indent=1) + "\n")
    found = {name: kept[name] for name in names if name in kept}
    path.write_text(json.dumps(found, indent=1) + "\n")
    lines = table(found)
    (HERE / "table.md").write_text(lines)
    print(lines, file=out)
    print(json.dumps(found), flush=True)
    return found


def in_process(model: str, mesh: str) -> dict[str, Any]:
    """Compile a case in a process that finds the compilers; its row, or `{"error"}`."""
    from atlas_jax.lab.crosscompile.jobs import Wheels

    wheels = Wheels.find(ROOT / ".cache" / "gate")
    with tempfile.TemporaryDirectory() as folder:
        cuda = Path(folder) / "cuda"
        cuda.mkdir()
        (cuda / "bin").symlink_to(wheels.ptxas.parent)
        if (nvvm := wheels.ptxas.parents[1] / "nvvm").is_dir():  # libdevice: exp and its like
            (cuda / "nvvm").symlink_to(nvvm)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))} | {
            "PYTHONPATH": os.pathsep.join([*sys.path, *map(str, wheels.paths)]),
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_TRACEBACK_FILTERING": "off",  # else its notice, and not the error, is what comes last
            "CUDA_ROOT": str(cuda),
            "PATH": f"{cuda / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--case", model, mesh]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return {"model": model, "mesh": mesh, "error": f"not done after {PATIENCE_S} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return {"model": model, "mesh": mesh, "error": said[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def compile_case(model: str, text: str) -> dict[str, Any]:
    """The deepest step of an engine on the mesh: memory of one device, and what the devices tell each other."""
    import jax
    import jax.numpy as jnp

    from atlas_jax import sharding
    from atlas_jax.decode.plan import Bucket, StepConfig
    from atlas_jax.decode.programs import Programs
    from atlas_jax.decode.state import init_state
    from atlas_jax.kernels.backends import Kernels
    from atlas_jax.lab.collectives import count_collectives, ideal_collectives
    from atlas_jax.lab.crosscompile import CHIPS
    from atlas_jax.model.mixers import leaf_dtype
    from atlas_jax.presets import abstract_params, preset

    cfg, mesh = preset(model), sharding.Mesh.parse(text)
    mesh.check(cfg, SLOTS)
    k, dtype = DRAFTS + 1, jnp.bfloat16
    cast = lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf_dtype(path, dtype))
    params = jax.tree_util.tree_map_with_path(cast, abstract_params(cfg))
    params = jax.eval_shape(functools.partial(sharding.grouped, cfg=cfg, groups=mesh.tensor), params)
    sizes: Any = {"slots": SLOTS, "length": CONTEXT, "max_drafts": DRAFTS, "dtype": dtype, "head": True}
    state = jax.eval_shape(functools.partial(init_state, cfg, **sizes))
    devices = mesh.build(gpus())
    shard = lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    per_device = lambda tree: sum(jax.tree.leaves(jax.tree.map(shard, tree, sharding.shardings(tree, devices))))
    kernels = Kernels("triton", "triton", "triton", capability=CHIPS[CHIP].capability)  # what "auto" is there
    programs = Programs(cfg, StepConfig(), kernels, DRAFTS, SLOTS, params, state, mesh, devices)
    began = time.perf_counter()
    key = Bucket(LINES, k, LINES * k, head=True)
    programs.compile([key], {"xla_gpu_autotune_level": 0})
    compiled = programs[key]
    memory = compiled.memory_analysis()
    told = count_collectives(compiled.as_text())
    ideal = ideal_collectives(cfg, mesh, LINES, k, jnp.dtype(dtype).itemsize)
    return {
        "model": model,
        "mesh": str(mesh),
        "weights_bytes": per_device(params),
        "state_bytes": per_device(state),
        "temp_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "collectives_per_step": told.count,
        "collective_bytes": told.bytes,
        "kinds": told.kinds,
        "ideal_collectives": ideal.count,
        "ideal_bytes": ideal.bytes,
        "compile_s": round(time.perf_counter() - began, 1),
        "jax": jax.__version__,
    }


def gpus() -> Sequence[Any]:
    """Devices of one host to compile for and not to run on."""
    import jax
    from jax.experimental import topologies

    from atlas_jax.lab.crosscompile import CHIPS

    jax.devices()  # finds the plugins
    target = CHIPS[CHIP].target_config()
    topology = f"1x1x{DEVICES}"
    return topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=target, topology=topology
    ).devices


def table(found: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = ("model", "mesh", "weights", "state", "temp", "told", "ideal", "told kB", "ideal kB", "compile s")
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    gib = lambda size: f"{size / 2**30:.2f}"
    for row in found.values():
        if "error" in row:
            lines.append(f"| {row['model']} | {row['mesh']} | not compiled: {row['error']} |" + " |" * (len(head) - 3))
            continue
        cells = [*map(gib, (row["weights_bytes"], row["state_bytes"], row["temp_bytes"]))]
        cells += [str(row["collectives_per_step"]), str(row["ideal_collectives"])]
        cells += [f"{row[name] / 1e3:,.0f}" for name in ("collective_bytes", "ideal_bytes")]
        lines.append(f"| {row['model']} | {row['mesh']} | " + " | ".join([*cells, f"{row['compile_s']:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=(), help="only these")
    parser.add_argument("--again", action="store_true", help="compile anew what is there")
    parser.add_argument("--json", action="store_true", help="stdout gets nothing but the last line")
    given = vars(parser.parse_args(args))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(compile_case(*sys.argv[2:])))
    else:
        main(parse())
