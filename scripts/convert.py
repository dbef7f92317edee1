"""Reads a Hugging Face model directory of the family, reports what became of every tensor, and writes it anew.

    python scripts/convert.py path/to/model                          # check only: table, one line of JSON at the end
    python scripts/convert.py path/to/model path/to/copy             # the same names, dtypes and shards
    python scripts/convert.py path/to/model path/to/head --head-only # the MTP head, its config and tokenizer
    python scripts/convert.py --benchmark qwen3.5-0.8b               # how fast: random weights in a release's layout

Both ways are streamed: no more than one tensor is in memory above the model (`peak_rss_mb` is that of reading). FP8
weights come out in bfloat16. Nothing is left behind where it fails or is interrupted. `raw_read_seconds` is what merely
reading as many bytes into new memory takes, from a warm cache (measured on up to 4 GiB of them). `--benchmark` writes
its checkpoint into a temporary folder and reads it in a new process each time.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atlas_jax.config import ConfigError
from atlas_jax.lab.import_bench import write_random_release
from atlas_jax.lab.text_table import text_table
from atlas_jax.presets import PRESETS, preset
from atlas_jax.weights.checkpoint import check_model, export_model, import_model
from atlas_jax.weights.shards import Shards, WeightError

SAMPLE = 2**32
# Twice, each time into new memory: the first time fills the page cache.
RAW_READ = """
import sys, time
import numpy as np
for _ in range(2):
    began, done, kept = time.perf_counter(), 0, np.empty(int(sys.argv[1]), np.uint8)
    for name in sys.argv[2:]:
        with open(name, "rb", buffering=0) as file:
            while count := file.readinto(memoryview(kept)[done:]):
                done += count
    seconds = (time.perf_counter() - began) / max(done, 1)
    del kept
print(seconds)
"""
DTYPES = ("stored", "bfloat16", "float32")


@dataclass(frozen=True)
class Config:
    """What to read, and where to write it."""

    source: Path | None = None  # None: with `benchmark`
    target: Path | None = None  # None: only check
    dtype: str = "stored"  # in memory and in the target; "stored" keeps each tensor's own
    allow_missing: bool = False  # missing tensors become zeros, a missing head is left out
    head_only: bool = False  # write the MTP head alone
    list: bool = False  # every tensor by name
    benchmark: str | None = None  # a preset's name: time the import of random weights of it, and nothing else
    repetitions: int = 5  # of the benchmark
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Prints a report and a last line of JSON; returns what that line holds.

    Raises `ConfigError` or `WeightError` naming what does not fit.
    """
    result = convert(config) if config.benchmark is None else benchmark(config)
    print(json.dumps(result), flush=True)
    return result


def convert(config: Config) -> dict[str, Any]:
    """Check, read and, with a target, write; a table for people."""
    if config.source is None:
        raise ConfigError("name the directory of a checkpoint, or a model with --benchmark")
    if config.target is not None and config.target.exists() and any(config.target.iterdir()):
        raise WeightError(f"{config.target} exists; name a new directory")
    check_model(config.source, allow_missing=config.allow_missing)
    dtype = None if config.dtype == "stored" else _dtype(config.dtype)
    raw_seconds = _raw_read_seconds(Shards(config.source))
    before = _peak_rss_mb()
    with _progress("reading") as progress:
        began = time.perf_counter()
        imported = import_model(config.source, dtype, allow_missing=config.allow_missing, progress=progress)
        seconds = time.perf_counter() - began
    peak = _peak_rss_mb()
    report = imported.report
    if config.target is not None:
        with _progress("writing") as progress:
            export_model(
                config.source,
                config.target,
                imported.params,
                imported.cfg,
                dtype=dtype,
                head_only=config.head_only,
                progress=progress,
            )
    result = {
        "tensors_used": len(report.used),
        "tensors_ignored": len(report.ignored),
        "tensors_missing": len(report.missing),
        "bytes": report.nbytes,
        "seconds": round(seconds, 7),
        "raw_read_seconds": round(raw_seconds * report.nbytes, 7),
        "peak_rss_mb": round(peak, 1),
        "rss_before_mb": round(before, 1),
        "model_mb": round(sum(leaf.nbytes for leaf in _leaves(imported.params)) / 2**20, 1),
        "ignored": dict(Counter(report.ignored.values())),
        "missing": list(report.missing[:20]),
        "target": None if config.target is None else str(config.target),
    }
    if not config.json:
        fates = [(name, "used") for name in report.used] if config.list else [("tensors", f"{len(report.used)} used")]
        fates += [(name, f"ignored: {reason}") for name, reason in report.ignored.items()]
        fates += [(name, "MISSING") for name in report.missing]
        print(text_table(("tensor", "became"), fates))
        speed, raw = (report.nbytes / 1e9 / result[key] for key in ("seconds", "raw_read_seconds"))
        print(f"\n{report.nbytes / 1e9:.3f} GB at {speed:.2f} GB/s (merely reading: {raw:.2f}), peak {peak:,.0f} MiB")
    return result


def benchmark(config: Config) -> dict[str, Any]:
    """Import a random checkpoint several times, beside merely reading it; a table for people."""
    if config.source is not None or config.repetitions < 1:
        raise ConfigError("--benchmark writes its own checkpoint (name no directory) and needs a repetition")
    cfg = preset(config.benchmark or "")
    say = lambda text: print(text, file=sys.stderr, flush=True)
    runs = []
    with tempfile.TemporaryDirectory(prefix="atlas-import-") as folder:
        directory = Path(folder) / config.benchmark
        write_random_release(directory, cfg, say=say)
        command = [sys.executable, __file__, str(directory), "--dtype", config.dtype, "--json"]
        for i in range(config.repetitions):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout))
            say(f"repetition {i + 1} of {config.repetitions}: {runs[-1]['seconds']:.3f} s")
    shares = [run["raw_read_seconds"] / run["seconds"] for run in runs]
    fields = ("seconds", "raw_read_seconds", "peak_rss_mb", "model_mb")
    result = {name: runs[0][name] for name in ("tensors_used", "tensors_ignored", "tensors_missing", "bytes")}
    result |= {name: statistics.median(run[name] for run in runs) for name in fields}
    result |= {
        "share_of_raw": round(statistics.median(shares), 3),
        "share_min": round(min(shares), 3),
        "share_max": round(max(shares), 3),
        "repetitions": len(runs),
        "model": config.benchmark,
        "dtype": config.dtype,
    }
    if not config.json:
        rows = [(run["seconds"], run["raw_read_seconds"], share) for run, share in zip(runs, shares, strict=True)]
        print(text_table(("seconds", "merely reading", "share of its speed"), rows))
        peak, model = (f"{result[name]:,.0f} MiB" for name in ("peak_rss_mb", "model_mb"))
        print(f"\n{result['bytes'] / 1e9:.3f} GB, peak {peak}, of which the model {model}")
    return result


def _dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for item in tree.values() for leaf in _leaves(item)] if isinstance(tree, dict) else [tree]


def _raw_read_seconds(shards: Shards) -> float:
    """Seconds a byte. In a process of its own, or its buffer would be in this one's peak."""
    files = [str(shards.directory / shard) for shard in shards.files]
    command = [sys.executable, "-c", RAW_READ, str(SAMPLE), *files]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_rss_mb() -> float:
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count what the parent had before this program began
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


class _progress:
    """A bar on the error stream, where that is a terminal."""

    def __init__(self, what: str):
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line; every option is a field of `Config`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, nargs="?", help="directory of a checkpoint")
    add("target", type=Path, nargs="?", help="new directory; without one the source is only checked")
    add("--dtype", choices=DTYPES, default=Config.dtype, help="in memory and in the target [%(default)s]")
    add("--allow-missing", action="store_true", help="missing tensors become zeros, a missing head is left out")
    add("--head-only", action="store_true", help="write the MTP head alone")
    add("--list", action="store_true", help="every tensor by name")
    add("--benchmark", choices=PRESETS, help="time the import of random weights in this release's layout")
    add("--repetitions", type=int, default=Config.repetitions, help="of the benchmark [%(default)s]")
    add("--json", action="store_true", help="stdout gets nothing but the last line")
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
