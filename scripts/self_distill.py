"""Lets the engine answer training prompts: text that a draft head will really meet, because the base wrote it.

    python scripts/self_distill.py                                    # greedy answers; run it again and it goes on
    python scripts/self_distill.py --variants 6 --prose 0 --out more.jsonl
    python scripts/self_distill.py --temperature 0.8 --out sampled.jsonl
    python scripts/self_distill.py --part 0/2 --out a.jsonl        # on one machine, and 1/2 to b.jsonl on another
    python scripts/self_distill.py --merge a.jsonl b.jsonl          # with the same flags: what one would have written

Prompts come from the training split only, cut as the held-out prompts of the demo are. Tool prompts also come as
variants with other names and numbers (`atlas_jax.train.variants`). One JSON line an answer, in the order in which they
finish: `{"id", "regime", "source", "prompt": [token ids], "reply": [token ids], "finished"}`, behind a first line that
tells the settings. Interrupt it at any time; a line cut off by a crash is dropped. `--merge` writes in the order of the
prompts, whoever answered them.
"""

import dataclasses
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_jax import devices
from atlas_jax.compile_cache import keep_compiled
from atlas_jax.config import ConfigError
from atlas_jax.decode.buckets import BucketConfig
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import PolicyError, parse_policy
from atlas_jax.devices import ProcessError
from atlas_jax.files import written_whole
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS
from atlas_jax.train.corpora import Document, Split, load_prose
from atlas_jax.train.hiddens import base_mark
from atlas_jax.train.tokens import prompts
from atlas_jax.train.tools_text import load_tools
from atlas_jax.train.variants import Variants
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Config:
    """What is answered, how, and where the answers go."""

    model: Path = ROOT / "checkpoints" / "small"
    out: Path = ROOT / "runs" / "distilled.jsonl"
    tools: int | None = None  # prompts of each variant; None: all
    variants: int = 4  # tool prompts as they are and in so many versions less one
    first_variant: int = 0  # 0 is the text as it is
    share: float = 0.7  # of names and numbers exchanged in a variant
    prose: int = 1500  # prompts
    prose_seed: int = 0  # of their places
    temperature: float = 0.0
    seed: int = 0  # of the sampling noise
    policy: str = "fixed1"  # lossless, so it only changes the speed
    slots: int = 16
    context: int = 768
    cpu_threads: int | None = 1  # of XLA; None leaves it alone
    part: str = ""  # i/n: every n-th prompt from the i-th on, from 0
    merge: tuple[Path, ...] = ()  # files of all parts, to make `out` of; nothing is answered
    json: bool = False  # stdout gets nothing but the last line


def main(config: Config) -> dict[str, Any]:
    """Writes the answers that are missing and prints a last line of JSON."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if config.cpu_threads is not None:
        use_cpu_threads(config.cpu_threads)
    console.print(keep_compiled().describe(), highlight=False, markup=False, soft_wrap=True)
    cfg, params = load_model(config.model, allow_missing="head")
    tokenizer = ChatTokenizer.load(config.model).tokenizer
    asked = dict(training_prompts(config, tokenizer))
    settings = {"model": base_mark(params), "temperature": config.temperature, "seed": config.seed}
    if config.merge:
        result = {"out": str(config.out), "answers": merge(config.merge, config.out, list(asked), settings)}
        print(json.dumps(result), flush=True)
        return result
    asked = dict(devices.share(list(asked.items()), config.part))
    written = read(config.out, settings)
    missing = {id: prompt for id, prompt in asked.items() if id not in written}
    console.print(f"{len(asked)} prompts, {len(asked) - len(missing)} answered already, in {config.out}")
    policy = parse_policy(config.policy)
    sizes = tuple(2**i for i in range((config.slots - 1).bit_length() + 1))
    buckets = BucketConfig(n=sizes, k=tuple(range(1, policy.max_drafts + 2)))
    options = EngineConfig(config.slots, config.context, policy.max_drafts, buckets)
    engine = Engine(params, cfg, options, policy)
    began, tokens = time.perf_counter(), 0
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn("{task.fields[rate]} tok/s"))
    with config.out.open("a") as file, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("answering", total=len(missing), rate="-")
        for id, reply, finished in answers(engine, missing, config):
            regime, source, ids = missing[id]
            row = {"id": id, "regime": regime, "source": source, "prompt": ids, "reply": reply, "finished": finished}
            file.write(json.dumps(row) + "\n")
            file.flush()
            tokens += len(reply)
            progress.update(task, advance=1, rate=round(tokens / (time.perf_counter() - began)))
    seconds = time.perf_counter() - began
    result = {
        "out": str(config.out),
        "answers": len(asked),
        "new": len(missing),
        "new_tokens": tokens,
        "seconds": round(seconds, 1),
        "tok_s": round(tokens / seconds, 1),
    }
    print(json.dumps(result), flush=True)
    return result


def training_prompts(config: Config, tokenizer: "Tokenizer") -> Iterable[tuple[str, tuple[str, str, list[int]]]]:
    """`(id, (regime, source, token ids))`; the ids of a larger request include those of a smaller one."""
    tools = load_tools()
    variants = Variants(tools.train)
    for variant in range(config.first_variant, config.first_variant + config.variants):
        found = [variants.prompt(document, variant, config.share) for document in tools.train]
        documents: tuple[Document, ...] = tuple(document for document in found if document)
        cut = prompts(Split("tools", (), documents), tokenizer, None, max_tokens=MAX_PROMPT_TOKENS, seed=variant)
        for prompt in cut[: config.tools]:
            yield prompt.source, ("tools", prompt.source, list(prompt.ids))
    if config.prose:
        prose = load_prose()
        split = dataclasses.replace(prose, held_out=prose.train)
        found = prompts(split, tokenizer, config.prose, seed=config.prose_seed)
        for i, prompt in enumerate(found):
            yield f"prose/{config.prose}/{config.prose_seed}/{i}", ("prose", prompt.source, list(prompt.ids))


def answers(
    engine: Engine, asked: dict[str, tuple[str, str, list[int]]], config: Config
) -> Iterable[tuple[str, list[int], str]]:
    """`(id, reply, why it ended)` as they finish, every slot kept busy."""
    names: dict[int, str] = {}
    waiting = iter(asked.items())
    try:
        while True:
            while len(names) < 2 * config.slots and (following := next(waiting, None)):
                id, (regime, _, ids) = following
                seed = config.seed + zlib.crc32(id.encode())  # the same whatever is missing
                sampling = Sampling(temperature=config.temperature, seed=seed)
                names[engine.submit(Request(ids, MAX_NEW_TOKENS[regime], sampling))] = id
            if engine.idle:
                return
            for emission in engine.step():
                if emission.finished:
                    reply = engine.completion(emission.request).tokens
                    yield names.pop(emission.request), list(reply), emission.finished
    finally:
        engine.cancel_all()


def read(path: Path, settings: dict[str, Any]) -> set[str]:
    """Ids that `path` holds already; see `read_lines`."""
    return {id for id, _ in read_lines(path, settings)}


def read_lines(path: Path, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Ids and whole lines of the answers that `path` holds already; a first line tells the settings.

    A line cut off by a crash is cut off the file. Raises `SystemExit` for answers of another model or at another
    temperature.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not path.read_bytes().strip():
        path.write_text(json.dumps({"settings": settings}) + "\n")
        return []
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)
        return read_lines(path, settings)
    first, *lines = whole.decode().splitlines()
    if (found := json.loads(first).get("settings")) != settings:
        sys.exit(f"{path} holds answers for {found}, not {settings}; give another --out")
    return [(json.loads(line)["id"], line) for line in lines]


def merge(parts: Iterable[Path], out: Path, asked: Sequence[str], settings: dict[str, Any]) -> int:
    """Write the answers of the parts to `out`, in the order asked, and return their number.

    Raises `SystemExit`, and writes nothing, for a part that is missing or of other settings, for a prompt that has no
    answer or two different ones, and for an answer that was not asked for.
    """
    lines: dict[str, str] = {}
    for path in parts:
        if not path.is_file():
            sys.exit(f"{path}: no such file; name the files of all parts")
        for id, line in read_lines(path, settings):
            if lines.setdefault(id, line) != line:
                sys.exit(f"{path} answers {id} differently from another part")
    if stray := set(lines) - set(asked):
        sys.exit(f"{len(stray)} answers were not asked for, {min(stray)} among them: give the flags of the parts")
    if missing := [id for id in asked if id not in lines]:
        sys.exit(f"{len(missing)} prompts have no answer, {missing[0]} among them: finish all parts and name them all")
    with written_whole(out) as part:
        part.write_text("\n".join([json.dumps({"settings": settings}), *(lines[id] for id in asked)]) + "\n")
    return len(asked)


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Config, description=__doc__))
    except (ConfigError, PolicyError, ProcessError, WeightError) as error:
        sys.exit(f"error: {error}")
