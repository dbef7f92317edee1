"""Decodes on one device and on a mesh of forced host devices; `python decode_driver.py MESH...` prints a line of JSON.

Traffic that touches every program: prompts of several chunks, more requests than slots, a reused prefix, sampling with
a bias and allowed tokens, speculation that is right now and then.
"""

import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402
from tiny_models import TINY  # noqa: E402
from train.models import random_params  # noqa: E402

from atlas_jax.config import MoEConfig  # noqa: E402
from atlas_jax.decode.buckets import BucketConfig  # noqa: E402
from atlas_jax.decode.config import EngineConfig  # noqa: E402
from atlas_jax.decode.engine import Engine  # noqa: E402
from atlas_jax.decode.requests import Request  # noqa: E402
from atlas_jax.decode.sampling import Sampling  # noqa: E402
from atlas_jax.depth.policies import Fixed  # noqa: E402
from atlas_jax.sharding import Mesh  # noqa: E402

HEADS = {"q_heads": 4, "kv_heads": 2, "gdn_key_heads": 2, "gdn_value_heads": 4}
DENSE = dataclasses.replace(TINY, layers=("gdn", "attention"), vocab_size=32, **HEADS)
MOE = dataclasses.replace(DENSE, ffn_size=0, moe=MoEConfig(4, 2, 16, 16))


def requests():
    rng = np.random.default_rng(0)
    prompt = lambda length: tuple(rng.integers(0, 32, length).tolist())
    odd = np.arange(32) % 2 == 1
    shared = prompt(9)
    asked = [Request(prompt(length), 8, ignore_eos=True) for length in (1, 3, 11, 5, 9, 2)]
    asked += [Request(prompt(4), 8, Sampling(0.9, top_k=9, bias={3: 4.0}, allowed=odd, seed=1), ignore_eos=True)]
    return asked + [Request((*shared, 5), 8, prefix=9, ignore_eos=True), Request((*shared, 7), 8, ignore_eos=True)]


def run(params, cfg, mesh, n):
    buckets = BucketConfig(n=(n,), k=(3,))
    sizes = {"slots": 4, "keep": 4, "max_drafts": 2, "context": 32, "prefill": (8,)}
    engine = Engine(params, cfg, EngineConfig(**sizes, buckets=buckets, mesh=mesh), Fixed(2))
    engine.warmup()
    answers = [completion.tokens for completion in engine.generate(requests())]
    state, reused = engine.materialize(), engine.telemetry.reused
    cut = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((engine._params, state)))
    return answers, {"recompiles": engine.compiles_after_warmup, "cut": cut, "reused": reused}


def main(meshes):
    found = {}
    for text in meshes:
        mesh = Mesh.parse(text)
        cfg = MOE if mesh.expert > 1 else DENSE
        params = random_params(cfg, 0, 0.3)
        wanted, alone = run(params, cfg, Mesh(), 4)
        answers, facts = run(params, cfg, mesh, min(4, 8 // mesh.data))
        tokens = len({token for answer in wanted for token in answer})
        found[text] = {"equal": answers == wanted, "tokens": tokens, "reused_alone": alone["reused"], **facts}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
