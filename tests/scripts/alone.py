"""Runs a script as `python scripts/NAME.py` does, but without a network, and without a decode loop to judge heads by.

    python alone.py [--die-at N] SCRIPT ARGUMENTS...

`--die-at`: process 1 is killed instead of getting its N-th batch.
"""

import os
import runpy
import signal
import sys
from collections import Counter

import jax

from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.train import corpora, heads, hiddens, tools_text
from atlas_jax.train.corpora import CorpusError


def fetch(*_):
    raise CorpusError("no network, says the test")


def answers(params, cfg, requests, slots):
    return {regime: [tuple(range(20, 28)) for _ in asked] for regime, asked in requests.items()}


def judged(params, cfg, requests, slots):
    assert jax.process_index() == 0
    return {regime: Acceptance(Counter({(3, 1): 1}), 2) for regime in requests}


def dying(at):
    real = hiddens.batches

    def batches(*args):
        found = real(*args)

        def batch(i):
            if i == at and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return found(i)

        return batch

    return batches


if __name__ == "__main__":
    corpora.fetch = tools_text.fetch = fetch
    heads.plain_answers, heads.acceptance = answers, judged
    sys.argv.pop(0)
    if sys.argv[0] == "--die-at":
        hiddens.batches = dying(int(sys.argv[1]))
        del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
