"""Puts a trained MTP head into a copy of the model directory that it was trained for.

    python scripts/stitch.py path/to/model path/to/head path/to/new

The copy has the model's names, dtypes, shards, config and tokenizer; every tensor but the head's is the same, bit for
bit. The head's directory holds `mtp.*` tensors and a config, with or without a trunk. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_jax.config import ConfigError
from atlas_jax.weights.checkpoint import stitch
from atlas_jax.weights.shards import WeightError


@dataclass(frozen=True)
class Config:
    """Which head goes into a copy of what."""

    model: Path
    head: Path
    target: Path
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints what was done and a last line of JSON; returns what that line holds. Errors name what does not fit."""
    replaced = stitch(config.model, config.head, config.target)
    result = {"target": str(config.target), "tensors_replaced": len(replaced)}
    if not config.json:
        print(f"{config.target}: {config.model} with the {len(replaced)} head tensors of {config.head}")
    print(json.dumps(result), flush=True)
    return result


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the original")
    parser.add_argument("head", type=Path, help="directory with the trained head")
    parser.add_argument("target", type=Path, help="new directory")
    parser.add_argument("--json", action="store_true", help="stdout gets nothing but the last line")
    return Config(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    try:
        main(parse())
    except (ConfigError, WeightError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.strerror or error}: {error.filename or ''}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was written")
