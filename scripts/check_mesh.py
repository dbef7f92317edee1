"""Is a mesh of devices the same as one device? Decodes and trains a tiny head on both, and counts what a step tells.

    python scripts/check_mesh.py --devices 8 --mesh tensor=2,data=4          # on a CPU: so many devices are made of it
    python scripts/check_mesh.py --devices 8 --mesh expert=4,tensor=2 --json # stdout gets nothing but the last line
    python scripts/launch_local.py --processes 2 -- scripts/check_mesh.py --devices 2 --mesh tensor=2,data=2

Random float32 weights; the model has experts where the mesh does. Decoding is speculative and meets whatever the engine
can do: prompts of several chunks, more requests than slots, a reused prefix, sampling with a bias and allowed tokens.
Tokens must be equal, losses within a rounding of float32, and nothing may be compiled while serving.

The last line is JSON: `{mesh, decode_equal, loss_max_diff, collectives_per_step, collective_bytes, ideal_bytes}` and
more. Collectives are those of one decode step in one device's program, bytes those of their results; the ideal is what
this cut of the model can't do without (`atlas_jax/lab/collectives.py`).
"""

import argparse
import contextlib
import dataclasses
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from atlas_jax import devices
from atlas_jax.config import ModelConfig, MoEConfig
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.plan import Bucket
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import Fixed
from atlas_jax.devices import Devices
from atlas_jax.lab.collectives import Collectives, count_collectives, ideal_collectives
from atlas_jax.lab.text_table import text_table
from atlas_jax.presets import abstract_params
from atlas_jax.sharding import Mesh, MeshError
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import cross_entropy
from atlas_jax.train.unroll import Rows, Unroll, head_loss

# Every axis of up to 4 divides it, `data`, `expert` and `fsdp` of 8 too.
DENSE = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    layers=("gdn", "attention"),
    q_heads=8,
    kv_heads=4,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    gdn_key_heads=4,
    gdn_value_heads=8,
    gdn_key_dim=8,
    gdn_value_dim=8,
    ffn_size=32,
)
EXPERTS = MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, shared_size=16)
MOE = dataclasses.replace(DENSE, ffn_size=0, moe=EXPERTS)
SLOTS, DRAFTS, ROUNDS, ROWS = 8, 2, 3, 8  # of the engine; rows of a training batch
LOSS_BOUND = 1e-4  # absolute; sums of a few hundred float32 terms in another order, a few updates apart


@dataclass(frozen=True)
class Config:
    """Which mesh, of what."""

    devices: Devices = Devices("tensor=2,data=4")
    steps: int = 6  # updates of the head
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints a table and a last line of JSON (the first process alone); returns what that line holds."""
    mesh = config.devices.join()
    devices.begin(mesh, lambda text: print(text, file=sys.stderr))
    result = compare(mesh, config.steps)
    if devices.first():
        rows = [(name, json.dumps(value)) for name, value in result.items()]
        print(text_table(("", "found"), rows), file=sys.stderr if config.json else sys.stdout)
        print(json.dumps(result), flush=True)
    return result


def compare(mesh: Mesh, steps: int) -> dict[str, Any]:
    """One device and the mesh, side by side."""
    cfg = MOE if mesh.expert > 1 else DENSE
    params = random_params(cfg)
    answers, _ = decode(params, cfg, Mesh())
    found, engine = decode(params, cfg, mesh)
    compiled = engine.compiles_after_warmup
    with shared_folder() as folder:
        alone = curve(params, cfg, Mesh(), steps, folder / "one")
        together = curve(params, cfg, mesh, steps, folder / "mesh")
    collectives, ideal = per_step(engine)
    return {
        "mesh": str(mesh),
        "decode_equal": found == answers,
        "loss_max_diff": float(np.abs(alone - together).max(initial=0)),
        "collectives_per_step": collectives.count,
        "collective_bytes": collectives.bytes,
        "ideal_bytes": ideal.bytes,
        "ideal_collectives": ideal.count,
        "kinds": collectives.kinds,
        "compiles_after_warmup": compiled,
        "processes": jax.process_count(),
        "tokens": sum(map(len, answers)),
        "losses": [round(float(loss), 4) for loss in together],
    }


def random_params(cfg: ModelConfig, seed: int = 0) -> Any:
    """Weights so large that picks vary and states matter."""
    rng = np.random.default_rng(seed)
    draw = lambda x: np.float32(rng.standard_normal(x.shape) * (0.3 if x.ndim > 1 else 0.03))
    return jax.tree.map(draw, abstract_params(cfg))


def decode(params: Any, cfg: ModelConfig, mesh: Mesh) -> tuple[list[tuple[int, ...]], Engine]:
    """Answers of an engine on the mesh, and the engine, all of whose slots were busy at some time."""
    buckets = BucketConfig(n=(at_once(mesh),), k=(DRAFTS + 1,))
    sizes = EngineConfig(SLOTS, 32, DRAFTS, buckets, prefill=(8,), keep=SLOTS, rounds=ROUNDS, mesh=mesh)
    engine = Engine(params, cfg, sizes, Fixed(DRAFTS))
    engine.warmup()
    return [completion.tokens for completion in engine.generate(requests(cfg))], engine


def at_once(mesh: Mesh) -> int:
    """Most sequences of a shard: half of all slots keep states for later, and any shard's may be all busy."""
    return min(SLOTS, 2 * SLOTS // mesh.data)


def requests(cfg: ModelConfig) -> list[Request]:
    """More than there are slots, of every kind."""
    rng = np.random.default_rng(0)
    prompt = lambda length: tuple(rng.integers(0, cfg.vocab_size, length).tolist())
    odd = np.arange(cfg.vocab_size) % 2 == 1
    sampling = Sampling(0.9, top_k=9, repetition_penalty=1.2, bias={3: 4.0}, allowed=odd, seed=1)
    shared = prompt(9)
    asked = [Request(prompt(length), 9) for length in (1, 3, 11, 5, 9, 2)]
    asked += [Request((*shared, 5), 9, prefix=9), Request(prompt(4), 9, sampling)]
    asked += [Request((*shared, 7), 9), Request(prompt(20), 9), Request(prompt(4), 9)]
    return [dataclasses.replace(request, ignore_eos=True) for request in asked]


def per_step(engine: Engine) -> tuple[Collectives, Collectives]:
    """Of the engine's decode step with all slots full: what it tells, and the ideal."""
    mesh, n, k = engine.config.mesh, at_once(engine.config.mesh), DRAFTS + 1
    text = engine.programs[Bucket(n, k, n * k, head=True)].as_text()
    return count_collectives(text), ideal_collectives(engine.cfg, mesh, n, k, np.dtype(engine.config.dtype).itemsize)


def curve(params: Any, cfg: ModelConfig, mesh: Mesh, steps: int, folder: Path) -> np.ndarray:
    """What a batch loses after each update of a head on the mesh; the first process alone knows."""

    def batch(i: int) -> tuple[np.ndarray, ...]:
        rng, shape = np.random.default_rng(i % 2), (ROWS, 12)
        return (
            rng.integers(0, cfg.vocab_size, shape).astype(np.int32),
            np.ones(shape, np.float32),
            np.zeros(shape, np.int32),
            rng.standard_normal((*shape, cfg.hidden_size)).astype(np.float32),
            np.tile(np.arange(8, dtype=np.int32), (ROWS, 1)),
        )

    def loss(head: Any, base: Any, *batch: Any) -> Any:
        return head_loss({**base, "mtp": head}, cfg, Rows(*batch), how=Unroll(2), measure=cross_entropy)

    base, rows = {name: leaf for name, leaf in params.items() if name != "mtp"}, []
    mean = jax.jit(lambda head: jnp.divide(*loss(head, base, *batch(0))))
    live = lambda head: {"exact": float(mean(head))}
    run = Run(folder, save_every=steps, log_every=1)
    train(loss, params["mtp"], base, batch, Schedule(steps, muon=False), run, report=rows.append, live=live, mesh=mesh)
    return np.array([row["exact"] for row in rows])


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder, the same one in every process."""
    name = multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32)))
    folder = Path(tempfile.gettempdir()) / f"check_mesh-{int(name)}"
    try:
        yield folder
        multihost_utils.sync_global_devices("trained")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    devices.add_arguments(parser)
    parser.set_defaults(mesh=Config.devices.mesh)
    add("--devices", dest="cpu_devices", type=int, metavar="N", help="the same as --cpu-devices")
    add("--steps", type=int, default=Config.steps, help="updates of the head [%(default)s]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    given = vars(parser.parse_args(args))
    several = devices.taken_from(given)
    return Config(several, **given)


if __name__ == "__main__":
    with devices.ending(MeshError):
        found = main(parse())
    if not (found["decode_equal"] and found["loss_max_diff"] < LOSS_BOUND and not found["compiles_after_warmup"]):
        sys.exit("NOT the same as one device")
