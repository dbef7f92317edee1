"""A mesh and one device side by side on 8 devices forced out of this CPU; the last line is JSON.

    python driver.py DECODE... --train MESH... --kernels MESH...

What `check_mesh.py` compares, each on meshes of its own choice, so that what one device does is done once.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import jax

from atlas_jax import sharding
from atlas_jax.config import ModelConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed
from atlas_jax.kernels.backends import Kernels
from atlas_jax.sharding import Mesh

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_mesh", ROOT / "scripts" / "check_mesh.py")
check_mesh = sys.modules["check_mesh"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_mesh)


def decoded(meshes: list[str]) -> dict[str, dict]:
    found, alone = {}, {}
    for text in meshes:
        mesh = Mesh.parse(text)
        cfg = check_mesh.MOE if mesh.expert > 1 else check_mesh.DENSE
        params = check_mesh.random_params(cfg)
        if cfg not in alone:
            alone[cfg] = check_mesh.decode(params, cfg, Mesh())[0]
        answers, engine = check_mesh.decode(params, cfg, mesh)
        compiled = engine.compiles_after_warmup
        collectives, ideal = check_mesh.per_step(engine)
        state = engine.materialize()
        cut = [leaf for leaf in jax.tree.leaves((engine._params, state)) if not leaf.sharding.is_fully_replicated]
        found[text] = {
            "equal": answers == alone[cfg],
            "different_tokens": len({token for answer in answers for token in answer}),
            "reused": engine.telemetry.reused,
            "compiled": compiled,
            "cut": len(cut),
            "collectives": collectives.count,
            "ideal": ideal.count,
        }
    return found


def trained(meshes: list[str]) -> dict[str, float]:
    """The largest difference of a loss."""
    cfg, steps = check_mesh.DENSE, 4
    params = check_mesh.random_params(cfg)
    with tempfile.TemporaryDirectory() as folder:
        curve = lambda mesh: check_mesh.curve(params, cfg, mesh, steps, Path(folder) / str(mesh).replace(" ", "-"))
        alone = curve(Mesh())
        return {text: float(abs(curve(Mesh.parse(text)) - alone).max()) for text in meshes}


def with_kernels(meshes: list[str]) -> dict[str, bool]:
    """Pallas kernels, interpreted, on a mesh that spreads sequences: the tokens of the reference on one device."""
    sizes = {"gdn_key_dim": 16, "gdn_value_dim": 16, "gdn_key_heads": 1, "gdn_value_heads": 2, "hidden_size": 16}
    cfg: ModelConfig = dataclasses.replace(check_mesh.DENSE, layers=("gdn",), **sizes)
    params = check_mesh.random_params(cfg)

    def run(mesh: Mesh, kernels: Kernels) -> list[tuple[int, ...]]:
        config = EngineConfig(slots=4, context=48, max_drafts=1, prefill=(16,), kernels=kernels, mesh=mesh)
        asked = [Request(tuple(range(n)), 6, ignore_eos=True) for n in (3, 20, 7, 1)]
        return [completion.tokens for completion in Engine(params, cfg, config, Fixed(1)).generate(asked)]

    wanted = run(Mesh(), Kernels())
    pallas = Kernels(gdn_step="triton", interpret=True)
    return {text: run(Mesh.parse(text), pallas) == wanted for text in meshes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--decode", "--train", "--kernels"):
        parser.add_argument(name, nargs="*", default=[])
    asked = parser.parse_args()
    sharding.join(devices=8)
    result = {"decode": decoded(asked.decode), "train": trained(asked.train) if asked.train else {}}
    result["kernels"] = with_kernels(asked.kernels) if asked.kernels else {}
    print(json.dumps(result))
