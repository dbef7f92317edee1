"""How fast a head trains, beside the frozen base's forward pass on the same batch, and where the time goes.

    python experiments/heads/throughput.py HIDDENS     # a cache that train_head.py made: runs/train_head/hiddens/...

Medians of interleaved runs on one CPU thread, with the trainer's default of up to 128 chains in a row of 1024 tokens,
with twice as many and with room for one at every token. Parts are whole programs that leave out what comes after them,
so that their differences are the parts: entries (keys and values of all rows), chains (the head's passes), scores (LM
head and loss), the backward pass, the optimizer. The base's forward pass is what a cache of hiddens saves every later
epoch. The last line is JSON.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.model import mtp
from atlas_jax.model.trunk import trunk
from atlas_jax.model.views import Full
from atlas_jax.train import hiddens
from atlas_jax.train.loop import Schedule
from atlas_jax.train.losses import cross_entropy
from atlas_jax.train.unroll import Rows, Unroll, head_loss, unroll
from atlas_jax.weights.checkpoint import load_model

ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path, repetitions: int = 7) -> dict[str, dict[str, float]]:
    """Prints a table for each number of chains and the line; returns the line's figures."""
    use_cpu_threads(1)
    cfg, params = load_model(ROOT / "checkpoints" / "small")
    cache = hiddens.load_hiddens(folder, params)
    result = {f"chains_{chains}": measure(cfg, params, cache, chains, repetitions) for chains in (128, 256, 1024)}
    print(json.dumps(result))
    return result


def measure(cfg: Any, params: Any, cache: hiddens.HiddenCache, chains: int, repetitions: int) -> dict[str, float]:
    """Seconds of each part on one batch with up to `chains` chains a row."""
    batch = tuple(map(jnp.asarray, hiddens.batches([cache], 4, chains, 0)(0)))
    base = jax.device_put({name: leaf for name, leaf in params.items() if name != "mtp"})
    head = jax.tree.map(jnp.asarray, params["mtp"])
    optimizer, how = Schedule(1000).optimizer(), Unroll(3)
    state = optimizer.init(head)
    positions = jnp.broadcast_to(jnp.arange(batch[0].shape[1]), batch[0].shape)
    loss = lambda head, base, batch: head_loss(
        {**base, "mtp": head}, cfg, Rows(*batch), how=how, measure=cross_entropy
    )[0]

    def step(head, base, batch):
        return optimizer.update(jax.grad(loss)(head, base, batch), state, head)[0]

    def passes(head, base, batch):
        return [depth.hidden for depth in unroll({**base, "mtp": head}, cfg, Rows(*batch), how)]

    def entries(head, base, batch):
        return mtp.head_entries({**base, "mtp": head}, cfg, batch[0][:, 1:], batch[3][:, :-1], positions[:, :-1])

    programs = {
        "base forward": lambda head, base, batch: trunk(base, cfg, batch[0], Full(positions, batch[2]))[0],
        "entries": entries,
        "and chains": passes,
        "and scores": loss,
        "and backward": jax.grad(loss),
        "and optimizer": step,
    }
    compiled = {name: jax.jit(program).lower(head, base, batch).compile() for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(repetitions):
        for name, program in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(program(head, base, batch))
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens, live = batch[0].size, int((batch[4] < batch[0].shape[1]).sum())
    print(f"{tokens} tokens, {live} chains of {how.depth}:")
    before = 0.0
    for name, seconds in medians.items():
        own = seconds - before if name.startswith("and") else seconds
        print(f"{name:15s} {1e3 * seconds:8.1f} ms, of which its own {1e3 * own:8.1f}")
        before = seconds
    return {
        "base_forward_tokens_s": round(tokens / medians["base forward"]),
        "training_tokens_s": round(tokens / medians["and optimizer"]),
        "training_chains_s": round(live / medians["and optimizer"]),
        "ratio": round(medians["base forward"] / medians["and optimizer"], 3),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
