"""Trains the draft head of a frozen base for acceptance; run it again after any interruption and it goes on.

    python scripts/self_distill.py                                  # the base's own answers to training prompts
    python scripts/train_head.py --data runs/distilled.jsonl        # from the head that the model has
    python scripts/train_head.py --data chats.jsonl --chat-template tokenizer_config.json --init fresh --measure lk
    python scripts/train_head.py --data runs/distilled.jsonl --batch 8 --mesh data=8            # on eight GPUs

The trunk runs once over the texts; its hiddens are cached beside the run and streamed from then on. Every
`--save-every` steps the head is checkpointed and judged by the real decode loop on held-out prompts; the best by
acceptance, pooled and of each regime, are kept in `RUN/best/`. The finished one goes to `--out` under its original
`mtp.*` names.

Several processes (`--coordinator`, `--processes`, `--process-id`) train one head and share the run's folder: the first
computes hiddens, judges, prints and writes, all of them write checkpoints. If one is lost, all end; start them again.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from atlas_jax import devices
from atlas_jax.config import ConfigError, ModelConfig
from atlas_jax.decode.telemetry import Acceptance
from atlas_jax.devices import Devices, ProcessError
from atlas_jax.files import written_whole
from atlas_jax.kernels.backends import choose
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import load_requests
from atlas_jax.sharding import Mesh, MeshError
from atlas_jax.train import heads, hiddens
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import MEASURES
from atlas_jax.train.replay import replay
from atlas_jax.train.texts import ChatTemplate, Text, corpus_texts, frequent_ids, read_jsonl
from atlas_jax.train.tokens import SPECIAL
from atlas_jax.train.unroll import Rows, Unroll, head_loss
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path("corpus")


@dataclass(frozen=True)
class Config:
    """What to train on, how, and where it goes."""

    data: tuple[Path, ...]  # JSONL files, of a shape told in atlas_jax/train/texts.py; "corpus": the base's own texts
    model: Path = ROOT / "checkpoints" / "small"  # the base, frozen
    run: Path = ROOT / "runs" / "train_head"
    hiddens: Path | None = None  # where they are cached, a folder for each data file; None: RUN/hiddens
    out: Path | None = None  # folder of the finished head; None: RUN/head
    init: str = "own"  # the head to start from: the model's own, "fresh", or a folder
    steps: int = 1000
    batch: int = 4  # rows of `length` tokens
    accumulate: int = 1  # batches of a step
    length: int = 1024
    chains: int = 128  # of a row at most
    depth: int = 3  # drafts of a chain
    decay: float = 0.8  # weight of depth j: decay^(j - 1)
    measure: Literal["text", "pick", "kl", "reverse_kl", "tv", "lk", "kl_to_tv"] = "pick"
    feed: Literal["text", "own"] = "text"  # what drafts from the second on are fed
    revisit: float = 1.0  # weight of chains that serving mostly passes over; 0.25 is about as three drafts visit them
    draft_vocab: int | None = None  # draft only the most frequent tokens; None: all, or the map that the head has
    peak: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    muon: bool = True
    compute: Literal["float32", "bfloat16"] = "float32"  # masters are float32
    seed: int = 0
    save_every: int = 100
    log_every: int = 20
    held_out: int = 24  # prompts a regime that a checkpoint is judged on
    skip_held_out: int = 96  # the first ones of each regime are for reports, not for choosing
    slots: int = 8  # of the decode loop that judges
    chat_template: Path | None = None  # a .jinja file or a tokenizer_config.json
    cpu_threads: int | None = None  # of XLA; None: all
    install: Literal["no", "last", "best"] = "no"  # put it into the model's directory: the last, or the best pooled
    json: bool = False  # stdout gets nothing but the last line
    devices: Devices = Devices()


def main(config: Config) -> dict[str, Any]:
    """Trains, keeps the best, writes the head, and prints a last line of JSON."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    mesh = config.devices.join()
    if config.cpu_threads is not None:
        use_cpu_threads(config.cpu_threads)
    console = Console(stderr=config.json, quiet=not devices.first())
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
    devices.begin(mesh, say)
    cfg, params = load_model(config.model, allow_missing="head")
    check_mesh(mesh, cfg, config.batch)
    if "mtp" not in params:
        cfg = replace(cfg, mtp_layers=1)
        params["mtp"] = heads.fresh_head(cfg, config.seed)  # what --init own then starts from
    tokenizer = ChatTokenizer.load(config.model).tokenizer
    template = ChatTemplate.load(config.chat_template) if config.chat_template else None
    by_file = {
        path: corpus_texts(tokenizer)
        if path == CORPUS
        else read_jsonl(path, cfg.vocab_size, tokenizer, template, cfg.eos_ids[:1])
        for path in config.data
    }
    texts = [text for found in by_file.values() for text in found]
    start = initial(config.init, params, cfg, config.seed)
    ids = start.pop("draft_ids", None)
    if config.draft_vocab is not None:
        if ids is not None and len(ids) != config.draft_vocab:
            raise SystemExit(f"the head to start from drafts {len(ids)} tokens, not {config.draft_vocab}")
        if ids is None:
            special = (tokenizer.token_to_id(token) for token in SPECIAL)
            always = sorted({*cfg.eos_ids, *(id for id in special if id is not None)})
            ids = frequent_ids(texts, config.draft_vocab, cfg.vocab_size, always)
    fixed = {} if ids is None else {"draft_ids": jnp.asarray(ids, jnp.int32)}
    mark = hiddens.base_mark(params)
    check_base(config.run, mark)
    places = ("run", "out", "data", "hiddens", "install", "json", "devices")
    settings = {name: value for name, value in asdict(config).items() if name not in places}
    devices.agree("texts, base and flags", (mark, settings, [text.tokens.tobytes() for text in texts]))
    config.run.mkdir(parents=True, exist_ok=True)

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        caches = []
        for path, found in by_file.items():
            task = progress.add_task(f"hiddens of {path.name}", total=None)
            cached = partial(
                hiddens.cache_hiddens,
                params,
                cfg,
                found,
                (config.hiddens or config.run / "hiddens") / path.stem,
                length=config.length,
                kernels=choose(),
                progress=lambda done, rows, task=task: progress.update(task, completed=done, total=rows),
            )
            caches.append(devices.by_first(cached) or cached())  # the others find it finished
            progress.update(task, completed=len(caches[-1]), total=len(caches[-1]))
    supervised = sum(int((cache.anchors < config.length).sum()) for cache in caches)
    tokens = sum(len(text.tokens) for text in texts)
    rows = sum(map(len, caches))
    say(f"{len(texts)} texts, {tokens:,} tokens, {supervised:,} chains in {rows} rows of {config.length}")
    if supervised < 0.01 * tokens:
        raise SystemExit(f"only {supervised} of {tokens} tokens are supervised: check the chat template's mask")

    requests, answers = devices.by_first(lambda: held_out(config, params, cfg, tokenizer, say)) or ({}, None)

    compute = jnp.dtype(config.compute)
    how = Unroll(config.depth, config.decay, feed=config.feed, revisit=config.revisit)
    measure = MEASURES[config.measure]
    base = {name: leaf for name, leaf in params.items() if name != "mtp"}
    if devices.first():
        base = jax.device_put(base)  # live figures need it on one device

    def loss(head: Any, base: Any, tokens: Any, weights: Any, segments: Any, hidden: Any, anchors: Any) -> Any:
        narrow = heads.cast({**base, "mtp": {**head, **fixed}}, compute)
        batch = Rows(tokens, weights, segments, hidden.astype(compute), anchors)
        return head_loss(narrow, cfg, batch, how=how, measure=measure)

    def evaluate(head: Any) -> dict[str, Any]:
        """The decode loop's verdict; keeps the best."""
        current = {**params, "mtp": {**jax.device_get(head), **fixed}}
        logs = heads.acceptance(current, cfg, requests, slots=config.slots)
        logs["pooled"] = heads.pooled(logs)
        for regime, log in logs.items():
            keep_best(config.run / "best" / regime, current, cfg, log)
        return {f"{name}_{regime}": value for regime, log in logs.items() for name, value in heads.rates(log).items()}

    def live(head: Any) -> dict[str, Any]:
        logs = replay({**base, "mtp": {**head, **fixed}}, cfg, answers, Unroll(3))
        return {f"live_{regime}": round(log.tok_step or 0.0, 3) for regime, log in logs.items()}

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    began = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=config.steps, told="")

        def report(row: dict[str, Any]) -> None:
            if "resumed_at" in row:
                say(f"resumed: {json.dumps(row)}")
            else:
                tok_step = ", ".join(f"{name[5:]} {row[name]:.2f}" for name in row if name.startswith("live_"))
                told = f"loss {row['loss']:.3f}, {row['tokens_per_s']:,} tokens/s, tokens a step: {tok_step}"
                progress.update(task, completed=row["step"], told=told)
                judged = {name: row[name] for name in row if name.startswith("tok_step")}
                if judged:
                    say(json.dumps({"step": row["step"], "loss": row["loss"]} | judged))

        data = {"data": [str(path) for path in config.data], "rows": rows, "base": mark}
        trained = train(
            loss,
            start,
            base,
            hiddens.batches(caches, config.batch, config.chains, config.seed),
            Schedule(config.steps, config.peak, config.warmup, config.weight_decay, muon=config.muon),
            Run(
                config.run,
                config.save_every,
                config.log_every,
                config.accumulate,
                settings=json.loads(json.dumps(settings | data, default=str)),
            ),
            evaluate,
            report,
            live,
            mesh,
        )

    def finish() -> dict[str, Any]:
        """Writes the head; what the last line holds."""
        out = config.out or config.run / "head"
        final = {**params, "mtp": {**jax.device_get(trained), **fixed}}
        facts = {"steps": config.steps, "measure": config.measure, "depth": config.depth, "feed": config.feed}
        heads.save_head(out, final, cfg, facts | {"seed": config.seed, "data": [path.name for path in config.data]})
        if config.install != "no":
            heads.install_head(config.model, out if config.install == "last" else config.run / "best" / "pooled")
        result = {"out": str(out), "steps": config.steps, "seconds": round(time.perf_counter() - began, 1)}
        best = sorted((config.run / "best").iterdir())
        return result | {path.name: json.loads((path / "head.json").read_text()) for path in best} | {"mesh": str(mesh)}

    result = devices.by_first(finish)
    if result is not None:
        print(json.dumps(result), flush=True)
    return result or {}


def check_mesh(mesh: Mesh, cfg: ModelConfig, batch: int) -> None:
    """Raises `MeshError`, before hours of hiddens, for a mesh that the model or the batch doesn't fit."""
    mesh.check(cfg)
    if batch % (shards := mesh.data * mesh.fsdp):
        raise MeshError(f"{mesh} cuts a batch in {shards}, and --batch is {batch}: give a multiple of {shards}")


def check_base(run: Path, base: str) -> None:
    """Raises `HeadError` where the checkpoints of `run` are of a head for another base."""
    settings = run / "settings.json"
    before = json.loads(settings.read_text()).get("base", base) if settings.exists() else base
    if before != base:
        raise heads.HeadError(f"{run} trains a head of the base {before}, and this one is {base}: name another --run")


def initial(init: str, params: Any, cfg: Any, seed: int) -> Any:
    """The head to start from, float32."""
    if init == "fresh":
        return heads.fresh_head(cfg, seed)
    found = params if init == "own" else heads.load_head(Path(init), params, cfg)
    return dict(found["mtp"])


def held_out(config: Config, params: Any, cfg: Any, tokenizer: Any, say: Any) -> tuple[Any, hiddens.HiddenCache]:
    """The prompts by regime that a checkpoint is judged on, and the base's answers to them."""
    wanted = config.skip_held_out + config.held_out
    found, offline = load_requests(("prose", "tools"), tokenizer, wanted)
    skip = 0 if offline else config.skip_held_out
    requests = {regime: asked[skip : skip + config.held_out] for regime, asked in found.items()}
    if offline:
        say(f"OFFLINE: {offline} Judged on our own prompts.")
    return requests, held_out_answers(config.run / "held_out", params, cfg, requests, config.slots)


def held_out_answers(directory: Path, params: Any, cfg: Any, requests: Any, slots: int) -> hiddens.HiddenCache:
    """The base's own answers to the held-out prompts, with their hiddens: for live figures, never for training."""
    path = directory / "answers.json"
    if path.exists():
        answers = json.loads(path.read_text())
    else:
        answers = heads.plain_answers(params, cfg, requests, slots)
        with written_whole(path) as part:
            part.write_text(json.dumps(answers))
    texts = [
        Text.answer(request.prompt, reply, regime)
        for regime, asked in requests.items()
        for request, reply in zip(asked, answers[regime], strict=True)
    ]
    return hiddens.cache_hiddens(params, cfg, texts, directory / "hiddens")


def keep_best(directory: Path, params: Any, cfg: Any, log: Acceptance) -> None:
    """Keep the head if more of its drafts are accepted than of the one that is there."""
    now = heads.rates(log)
    if (directory / "head.json").exists():
        before = json.loads((directory / "head.json").read_text())
        if before["mean_accepted"] >= now["mean_accepted"]:
            return
    heads.save_head(directory, params, cfg, now)


if __name__ == "__main__":
    import tyro

    wrong = (ConfigError, FloatingPointError, heads.HeadError, hiddens.CacheError, MeshError, ProcessError, WeightError)
    with devices.ending(*wrong):
        main(tyro.cli(tyro.conf.OmitArgPrefixes[Config], description=__doc__))
