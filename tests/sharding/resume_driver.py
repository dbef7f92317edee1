"""Trains a few weights on a mesh; process 1 may kill itself. Prints JSON: where it went on from, and the weights."""

import argparse
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np

from atlas_jax import devices
from atlas_jax.train.loop import Run, Schedule, train

STEPS = 8


def loss(trained, frozen, x):
    out = x @ trained["layer"]["in_proj"] + trained["layer"]["norm"]
    return ((out - frozen["target"]) ** 2).sum(), np.float32(x.shape[0])


def main(folder, mesh, die_at):
    def batch(i):
        if i == die_at and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (np.random.default_rng(i).standard_normal((8, 4)).astype(np.float32),)

    start = {"layer": {"in_proj": np.eye(4, dtype=np.float32), "norm": np.zeros(4, np.float32)}}
    said = []
    run, schedule = Run(folder, save_every=2, log_every=2), Schedule(STEPS, warmup=2, muon=False)
    target = {"target": np.float32([1, -1, 2, 0])}
    trained = train(loss, start, target, batch, schedule, run, report=said.append, mesh=mesh)
    if jax.process_index() == 0:
        resumed = said[0].get("resumed_at", 0)
        print(json.dumps({"resumed_at": resumed, "weights": np.asarray(trained["layer"]["in_proj"]).tolist()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int)
    devices.add_arguments(parser)
    given = vars(parser.parse_args())
    main(mesh=devices.taken_from(given).join(), **given)
