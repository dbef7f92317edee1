"""Which objective makes a draft head that is accepted more, at the same budget? Run it again and it goes on.

    python experiments/heads/study.py --distilled runs/distilled.jsonl          # all arms, three seeds each
    python experiments/heads/study.py --distilled runs/distilled.jsonl --arms single-step unrolled
    python experiments/heads/study.py --distilled runs/distilled.jsonl --speed 1 8   # and tokens a second

Every arm trains fresh heads on the frozen base of `checkpoints/small` for the same number of steps on the same number
of chains of drafts (256 a step); what differs is in `ARMS`. The trunk's hiddens are cached once. Each head is judged by
the real decode loop on held-out prompts, greedy, three drafts. With `--speed`, the finished heads then decode in turns
beside plain decode, one seed a repetition. `results.json` has one entry a run, `results.csv` the same as a table,
`heads.png` the plot; `README.md` beside this file is the finding.
"""

import csv
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from race import engines_of, race, speeds

from atlas_jax.compile_cache import keep_compiled
from atlas_jax.files import written_whole
from atlas_jax.lab.bench import use_cpu_threads
from atlas_jax.lab.prompts import load_requests
from atlas_jax.train import heads, hiddens
from atlas_jax.train.loop import Run, Schedule, train
from atlas_jax.train.losses import MEASURES
from atlas_jax.train.texts import Text, corpus_texts, frequent_ids, read_jsonl
from atlas_jax.train.tokens import SPECIAL, load_tokenizer
from atlas_jax.train.unroll import Rows, Unroll, head_loss
from atlas_jax.weights.checkpoint import load_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Arm:
    """What an arm trains on and by."""

    texts: Literal["corpus", "distilled"] = "corpus"
    measure: str = "text"
    depth: int = 3
    feed: Literal["text", "own"] = "text"
    revisit: float = 1.0
    draft_vocab: int | None = None


ARMS = {
    "single-step": Arm(depth=1),
    "unrolled": Arm(),
    "kl": Arm(measure="kl"),
    "tv": Arm(measure="tv"),
    "lk": Arm(measure="lk"),
    "kl-to-tv": Arm(measure="kl_to_tv"),
    "on-policy": Arm(measure="lk", feed="own"),
    "self-distilled": Arm("distilled"),
    "distilled-lk": Arm("distilled", measure="lk"),
    "distilled-on-policy": Arm("distilled", feed="own", revisit=0.25),
    "distilled-single": Arm("distilled", depth=1),
    "vocab-256": Arm("distilled", draft_vocab=256),
    "vocab-512": Arm("distilled", draft_vocab=512),
    "vocab-1024": Arm("distilled", draft_vocab=1024),
}


@dataclass(frozen=True)
class Config:
    """What is run, and where."""

    distilled: tuple[Path, ...]  # JSONL of scripts/self_distill.py
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: int = 3
    steps: int = 400
    batch: int = 2
    chains: int = 128  # of a row
    peak: float = 2e-3
    prompts: int = 24  # held-out ones, a regime
    run: Path = ROOT / "runs" / "heads_study"
    hiddens: Path | None = None  # where those of the distilled texts are cached; None: RUN/hiddens
    speed: tuple[int, ...] = ()  # sequences active at once, for tokens a second
    speed_prompts: int = 16  # a regime
    cpu_threads: int = 1
    out: Path = HERE


def main(config: Config) -> dict[str, Any]:
    """Runs what is missing; prints a table and a last line of JSON."""
    if unknown := set(config.arms) - set(ARMS):
        raise SystemExit(f"no such arms: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    use_cpu_threads(config.cpu_threads)
    print(keep_compiled().describe(), flush=True)
    cfg, params = load_model(ROOT / "checkpoints" / "small")
    tokenizer = load_tokenizer(ROOT / "checkpoints" / "tokenizer.json")
    requests, offline = load_requests(("prose", "tools"), tokenizer, config.prompts)
    if offline:
        raise SystemExit(offline)
    always = sorted({*cfg.eos_ids, *(int(tokenizer.token_to_id(token)) for token in SPECIAL)})
    results = config.run / "results"
    results.mkdir(parents=True, exist_ok=True)
    path_of = lambda name, seed: results / f"{name}-{seed}.json"  # several processes can share the arms
    if not all(path_of(name, seed).exists() for name in config.arms for seed in range(config.seeds)):
        caches, texts = prepare(config, cfg, params, tokenizer)
    for seed in range(config.seeds):  # all arms once before any of them twice
        for name in config.arms:
            key, path = f"{name}/{seed}", path_of(name, seed)
            if path.exists():
                continue
            arm, began = ARMS[name], time.perf_counter()
            fixed = {}
            if arm.draft_vocab:
                ids = frequent_ids(texts["distilled"], arm.draft_vocab, cfg.vocab_size, always)
                fixed = {"draft_ids": jnp.asarray(ids)}
            head = run_arm(arm, name, seed, config, cfg, params, caches[arm.texts], fixed)
            seconds = time.perf_counter() - began
            current = {**params, "mtp": {**head, **fixed}}
            heads.save_head(config.run / "heads" / key, current, cfg, asdict(arm))
            logs = heads.acceptance(heads.load_head(config.run / "heads" / key, params, cfg), cfg, requests)
            logs["pooled"] = heads.pooled(logs)
            figures = {regime: heads.rates(log) for regime, log in logs.items()}
            run = {"arm": asdict(arm), "seed": seed, "steps": config.steps, "train_s": round(seconds, 1), **figures}
            write(path, json.dumps({key: run}) + "\n")
            tok_step = {regime: figures[regime]["tok_step"] for regime in figures}
            print(f"{key}: {seconds:.0f} s, tokens a step {tok_step}", flush=True)
    for concurrency in config.speed:
        run_speed(concurrency, config, cfg, params, requests)
    done: dict[str, Any] = {}
    for path in sorted(results.glob("*.json")):
        done |= json.loads(path.read_text())
    for path in sorted((config.run / "speed").glob("*.json")):
        regime, concurrency = path.stem.split("-")
        for key, found in json.loads(path.read_text()).items():
            done[key][regime] |= {f"{name}_c{concurrency}": found[name] for name in ("tok_s", "x_plain")}
    write(config.out / "results.json", json.dumps(done, indent=1) + "\n")
    table(done, config.out / "results.csv")
    plot(done, config.out / "heads.png")
    summary = summarise(done)
    for name, by in summary.items():
        print(f"{name:20s}" + "".join(f"  {r} {v['mean']:.3f} +- {v['sd']:.3f}" for r, v in by.items()))
    print(json.dumps(summary), flush=True)
    return summary


def prepare(config: Config, cfg: Any, params: Any, tokenizer: Any) -> tuple[dict[str, Any], dict[str, list[Text]]]:
    """Hiddens of the corpus and of the distilled texts."""
    say = lambda name: lambda done, rows: print(f"hiddens of {name}: {done} of {rows} rows", flush=True)
    corpus = hiddens.cache_hiddens(params, cfg, corpus_texts(tokenizer), config.run / "corpus", progress=say("corpus"))
    made: dict[str, Any] = {"corpus": [corpus], "distilled": []}
    texts: list[Text] = []
    for path in config.distilled:
        found = read_jsonl(path, cfg.vocab_size)
        folder = (config.hiddens or config.run / "hiddens") / path.stem
        made["distilled"].append(hiddens.cache_hiddens(params, cfg, found, folder, progress=say(path.name)))
        texts += found
    return made, {"distilled": texts}


def run_arm(
    arm: Arm, name: str, seed: int, config: Config, cfg: Any, params: Any, caches: Any, fixed: dict[str, Any]
) -> Any:
    """A trained head."""
    base = jax.device_put({key: leaf for key, leaf in params.items() if key != "mtp"})
    how = Unroll(arm.depth, feed=arm.feed, revisit=arm.revisit)

    def loss(head: Any, base: Any, *batch: Any) -> Any:
        return head_loss({**base, "mtp": {**head, **fixed}}, cfg, Rows(*batch), how=how, measure=MEASURES[arm.measure])

    trained = train(
        loss,
        heads.fresh_head(cfg, seed),
        base,
        hiddens.batches(caches, config.batch, config.chains, seed),
        Schedule(config.steps, config.peak),
        Run(config.run / "runs" / name / str(seed), save_every=config.steps, log_every=50),
        report=lambda row: None,
    )
    return jax.device_get(trained)


def run_speed(concurrency: int, config: Config, cfg: Any, params: Any, requests: Any) -> None:
    """Writes `{arm/seed: {tok_s, x_plain, ...}}` of the finished heads for each regime that has none yet."""
    folder = config.run / "speed"
    folder.mkdir(exist_ok=True)
    missing = [regime for regime in requests if not (folder / f"{regime}-{concurrency}.json").exists()]
    if not missing:
        return
    names = [name for name in config.arms if not ARMS[name].draft_vocab]  # maps make programs of another shape
    load = lambda name, seed: heads.load_head(config.run / "heads" / name / str(seed), params, cfg)
    each = {(name, seed): load(name, seed) for seed in range(config.seeds) for name in names}
    engines = engines_of(each, cfg, concurrency, 3, 768)
    entrants = lambda seed: {name: engines[name, seed] for name in names}
    for regime in missing:
        asked = requests[regime][: config.speed_prompts]
        cells = race(entrants, params, regime, asked, 3, config.seeds, lambda text: print(text, flush=True))
        found = {f"{name}/{i}": by for name, seeds in speeds(cells).items() for i, by in enumerate(seeds)}
        write(folder / f"{regime}-{concurrency}.json", json.dumps(found) + "\n")


def summarise(done: dict[str, Any]) -> dict[str, Any]:
    """Mean and spread over the seeds of the tokens a step, by arm and regime."""
    found: dict[str, Any] = {}
    for name in ARMS:
        runs = [run for key, run in done.items() if key.split("/")[0] == name]
        if runs:
            found[name] = {}
            for regime in ("prose", "tools", "pooled"):
                values = [run[regime]["tok_step"] for run in runs]
                mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
                found[name][regime] = {"mean": round(mean, 4), "sd": round(spread, 4), "n": len(values)}
    return found


def table(done: dict[str, Any], path: Path) -> None:
    """One line a run and regime."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = list(
            dict.fromkeys(name for run in done.values() for by in ("pooled", "prose", "tools") for name in run[by])
        )
        writer.writerow(["arm", "seed", "regime", "train_s", *names])
        for key, run in sorted(done.items()):
            for regime in ("prose", "tools", "pooled"):
                figures = [run[regime].get(name) for name in names]
                writer.writerow([key.split("/")[0], run["seed"], regime, run["train_s"], *figures])


def plot(done: dict[str, Any], path: Path) -> None:
    """Acceptance of each draft given those before it, and tokens of a step, by arm; bars are means, marks are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [name for name in ARMS if any(key.split("/")[0] == name for key in done)]
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), sharex="col", width_ratios=[2, 1])
    for row, regime in enumerate(("prose", "tools")):
        each = {name: [run[regime] for key, run in done.items() if key.split("/")[0] == name] for name in arms}
        for j, field in enumerate(("p1", "p2_cond", "p3_cond")):
            for i, name in enumerate(arms):
                values = [run[field] for run in each[name]]
                axes[row, 0].bar(i + 0.27 * (j - 1), statistics.fmean(values), 0.25, color=f"C{j}")
                axes[row, 0].plot([i + 0.27 * (j - 1)] * len(values), values, "k.", markersize=3)
        axes[row, 0].set_ylabel(f"{regime}: p1, p2_cond, p3_cond")
        axes[row, 0].set_ylim(0.2, 1)
        axes[row, 0].grid(axis="y", alpha=0.3)
        for i, name in enumerate(arms):
            values = [run["tok_step"] for run in each[name]]
            axes[row, 1].bar(i, statistics.fmean(values), 0.7, color="0.7")
            axes[row, 1].plot([i] * len(values), values, "k.", markersize=3)
        axes[row, 1].set_ylabel(f"{regime}: tokens a step, 3 drafts")
        axes[row, 1].set_ylim(1, 4)
        axes[row, 1].grid(axis="y", alpha=0.3)
    for column in (0, 1):
        axes[1, column].set_xticks(range(len(arms)), arms, rotation=60, ha="right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    with written_whole(path) as part:
        part.write_text(text)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
