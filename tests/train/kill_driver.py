"""Trains a tiny head in children that are killed at random moments: `python kill_driver.py FOLDER KILLS SEED [STEPS]`.

A child is forked before JAX starts its backend, so that it costs a second and not the imports. Prints the steps that
the killed children had reached, and a digest of the parameters with which the run ended.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401 (imported before the forks)
from tiny_models import TINY
from train.models import random_params

from atlas_jax.train import hiddens
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import cross_entropy
from atlas_jax.train.unroll import Rows, Unroll, head_loss

STEPS = 10


def run(folder: Path, pause: float, steps: int) -> str:
    """The whole run, or what is left of it; a digest of the trained head."""
    rng = np.random.default_rng(0)
    head = random_params(TINY)["mtp"]
    base = {"embed": rng.standard_normal((TINY.vocab_size, TINY.hidden_size)).astype(np.float32)}
    shape = (16, 12)
    cache = hiddens.HiddenCache(
        tokens=rng.integers(0, TINY.vocab_size, shape).astype(np.int32),
        weights=np.ones(shape, np.float32),
        segments=np.zeros(shape, np.int32),
        hidden=rng.standard_normal((*shape, TINY.hidden_size)).astype(np.float32),
        anchors=np.tile(np.arange(10, dtype=np.int32), (16, 1)),
        regimes=np.zeros(shape, np.int8),
        names=("text",),
    )
    rows = hiddens.batches([cache], 4, 6, 0)

    def batches(i):
        time.sleep(pause)
        return rows(i)

    loss = lambda head, base, *batch: head_loss(
        {**base, "mtp": head}, TINY, Rows(*batch), how=Unroll(1), measure=cross_entropy
    )
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))  # restarts compile nothing
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    settings, schedule = Run(folder, save_every=2, log_every=2), Schedule(steps, warmup=3, muon=False)
    trained = train(loss, head, base, batches, schedule, settings, report=lambda row: None)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trained)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def child(folder: Path, pause: float, steps: int) -> int:
    """Fork a run; its pid."""
    pid = os.fork()
    if pid == 0:
        digest = run(folder, pause, steps)
        (folder / "digest.json").write_text(json.dumps(digest))
        os._exit(0)
    return pid


def main(folder: Path, kills: int, seed: int, steps: int = STEPS) -> None:
    """Kill so many (fewer, if the run ends before), then let the rest run."""
    rng, reached = random.Random(seed), []
    metrics = folder / "metrics.jsonl"
    told = lambda: metrics.read_bytes() if metrics.exists() else b""
    ended = lambda pid: os.waitpid(pid, os.WNOHANG) != (0, 0)
    while len(reached) < kills:
        before, pid, end = told(), child(folder, 0.02, steps), None
        early = rng.random() < 0.1  # most are killed only after a sign of life: dying before proves little
        while not (done := ended(pid)) and (end is None or time.monotonic() < end):
            if end is None and (early or told() != before):
                end = time.monotonic() + rng.expovariate(5.0)
            time.sleep(0.005)
        if done:
            break  # the run ended before its kill
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        saved = [int(path.name) for path in (folder / "state").glob("*") if path.name.isdigit()]
        reached.append(max(saved, default=0))
    if not (folder / "digest.json").exists():
        assert os.waitpid(child(folder, 0.0, steps), 0)[1] == 0
    print(json.dumps({"reached": reached, "digest": json.loads((folder / "digest.json").read_text())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
