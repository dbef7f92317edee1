"""What a model needs and what fits, from its config alone: no weights, no GPU.

    python scripts/plan.py qwen3.5-4b                                     # tables, and one line of JSON at the end
    python scripts/plan.py path/to/model --gpu h100 --context 32768 --slots 8 --json       # only that line on stdout

MODEL is a preset's name or a directory with a config.json. Bytes of weights, states and caches; the most slots and the
longest context that fit; the least time of a step, by bucket, that bandwidth and peak allow. Core dependencies only.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.lab.plan import GPUS, USABLE, plan
from atlas_jax.lab.text_table import text_table
from atlas_jax.presets import PRESETS, preset


@dataclass(frozen=True)
class Config:
    """What to plan for."""

    model: str
    gpu: str = "h200"
    context: int = 4096  # tokens of a sequence
    slots: int = 32  # sequences at once
    drafts: int = 3  # most drafts of a step
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints tables and a last line of JSON; returns what that line holds. Raises `ConfigError` for no such model."""
    if config.gpu not in GPUS:
        raise ConfigError(f"unknown GPU {config.gpu!r}; there are {', '.join(GPUS)}")
    cfg = load(config.model)
    planned: dict[str, Any] = plan(cfg, GPUS[config.gpu], config.context, config.slots, config.drafts)
    result = {"model": config.model, "gpu": config.gpu, "context": config.context, "slots": config.slots, **planned}
    if not config.json:
        print(report(result))
    print(json.dumps(result), flush=True)
    return result


def load(model: str) -> ModelConfig:
    """The config of a preset or of a directory."""
    if model in PRESETS:
        return preset(model)
    if Path(model).exists():
        return ModelConfig.load(Path(model))
    raise ConfigError(f"{model!r} is no directory and no preset; there are {', '.join(PRESETS)}")


def report(result: dict[str, Any]) -> str:
    """The plan for people."""
    gpu, gb = GPUS[result["gpu"]], lambda count: f"{count / 1e9:,.3f} GB"
    small = lambda count: f"{count / 2**20:,.2f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
    rows = [
        ("weights", gb(result["weight_bytes"])),
        ("MTP head", gb(result["head_bytes"])),
        ("GDN state of a sequence", small(result["gdn_state_bytes_per_sequence"])),
        ("conv state of a sequence", small(result["conv_state_bytes_per_sequence"])),
        ("keys and values of a token", small(result["kv_bytes_per_token"])),
        ("the head's, of a token", small(result["head_kv_bytes_per_token"])),
        ("a pending row", small(result["pending_bytes_per_row"])),
        (f"a slot of {result['context']:,} tokens", small(result["slot_bytes"])),
        (f"free on one {result['gpu']} ({USABLE:.0%} of {gpu.memory / 1e9:.0f} GB)", gb(result["free_bytes"])),
        (f"most slots of {result['context']:,} tokens", f"{result['max_slots']:,}"),
        (f"longest context of {result['slots']} slots", f"{result['max_context']:,}"),
    ]
    floors: dict[int, list[float]] = {}
    for bucket, ms in result["floor_ms"].items():
        floors.setdefault(int(bucket.split("x")[0]), []).append(ms)
    header = ("n", *(f"{k + 1} rows" if k else "plain" for k in range(len(next(iter(floors.values()))))), "draft pass")
    steps = [(n, *times, result["draft_floor_ms"][str(n)]) for n, times in floors.items()]
    verdict = "" if result["max_slots"] >= result["slots"] else "\nIt does NOT fit as asked.\n"
    return f"""{text_table((result["model"], ""), rows)}
{verdict}
Least milliseconds of a trunk step at {result["context"]:,} tokens, and of one pass of the head:

{text_table(header, steps)}
"""


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="directory of a checkpoint, or one of " + ", ".join(PRESETS))
    add("--gpu", choices=GPUS, default=Config.gpu, help="[%(default)s]")
    add("--context", type=int, default=Config.context, help="tokens of a sequence [%(default)s]")
    add("--slots", type=int, default=Config.slots, help="sequences at once [%(default)s]")
    add("--drafts", type=int, default=Config.drafts, help="most drafts of a step [%(default)s]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
    return Config(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    try:
        main(parse())
    except ConfigError as error:
        sys.exit(f"error: {error}")
