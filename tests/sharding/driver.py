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
import jax.numpy as jnp
import numpy as np

from atlas_jax import sharding
from atlas_jax.config import ModelConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.depth.policies import Fixed
from atlas_jax.kernels.backends import Kernels
from atlas_jax.sharding import Mesh
from atlas_jax.train.objectives import base_loss

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


PALLAS = Kernels("triton", "triton", "triton", interpret=True)
# Sizes that the kernels have, of heads that `tensor=2` divides.
SMALL: ModelConfig = dataclasses.replace(
    check_mesh.DENSE,
    **{"gdn_key_dim": 16, "gdn_value_dim": 16, "gdn_key_heads": 2, "gdn_value_heads": 4},
    **{"hidden_size": 16, "q_heads": 4, "kv_heads": 2, "head_dim": 16},
)


def with_kernels(meshes: list[str]) -> dict[str, dict]:
    """Pallas kernels, interpreted, on a mesh: the tokens and the gradients of the reference on one device."""
    params = check_mesh.random_params(SMALL)
    rng = np.random.default_rng(0)
    batch = (rng.integers(0, SMALL.vocab_size, (4, 20)).astype(np.int32), np.ones((4, 20), np.float32))
    packed = (np.arange(20) // 7 * np.ones((4, 1))).astype(np.int32)

    def tokens(mesh: Mesh, kernels: Kernels) -> list[tuple[int, ...]]:
        config = EngineConfig(slots=4, context=48, max_drafts=1, prefill=(16,), kernels=kernels, mesh=mesh)
        asked = [Request(tuple(range(n)), 6, ignore_eos=True) for n in (3, 20, 7, 1)]
        return [completion.tokens for completion in Engine(params, SMALL, config, Fixed(1)).generate(asked)]

    def gradients(mesh: Mesh, kernels: Kernels) -> list[np.ndarray]:
        own, rows = params, (*batch, packed)
        if mesh.size > 1:
            devices = mesh.build()
            own, rows = sharding.place(own, devices), sharding.place_batch(rows, devices)
        loss = lambda params, *rows: jnp.divide(*base_loss(params, SMALL, *rows, kernels=kernels))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(own, *rows))]

    wanted, slopes = tokens(Mesh(), Kernels()), gradients(Mesh(), Kernels())
    found = {}
    for mesh in map(Mesh.parse, meshes):
        apart = [np.abs(a - b).max() for a, b in zip(slopes, gradients(mesh, PALLAS), strict=True)]
        found[str(mesh)] = {
            "equal": tokens(mesh, PALLAS) == wanted,
            "gradients_apart": float(max(apart) / max(np.abs(leaf).max() for leaf in slopes)),
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--decode", "--train", "--kernels"):
        parser.add_argument(name, nargs="*", default=[])
    asked = parser.parse_args()
    sharding.join(devices=8)
    result = {"decode": decoded(asked.decode), "train": trained(asked.train) if asked.train else {}}
    result["kernels"] = with_kernels(asked.kernels) if asked.kernels else {}
    print(json.dumps(result))
