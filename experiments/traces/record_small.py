"""Records `small.jsonl.gz`: what 4 drafts of the shipped model met on held-out prose and tool prompts, 4 at once.

    python experiments/traces/record_small.py

Acceptance does not depend on how fast the machine is. `load_trace` says how other depths are read from it.
"""

import sys
from pathlib import Path

from atlas_jax.lab.ablate_decode import record
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import load_requests
from atlas_jax.train.tokens import load_tokenizer
from atlas_jax.weights.checkpoint import load_model

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "checkpoints" / "small"


def main() -> None:
    use_cpu_threads(1)
    cfg, params = load_model(MODEL)
    requests, offline = load_requests(("prose", "tools"), load_tokenizer(MODEL / "tokenizer.json"), 32)
    if offline:
        sys.exit(f"error: the held-out texts cannot be had: {offline}")
    record(HERE / "small.jsonl.gz", params, cfg, requests, 4)


if __name__ == "__main__":
    main()
