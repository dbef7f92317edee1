"""The training loop: a jitted update, Orbax checkpoints, a resume that continues exactly where it stopped."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

Tree = Any
Batch = tuple[np.ndarray, ...]
Loss = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """AdamW or Muon with warm-up, cosine decay to a tenth, clipping and decay of matrices only.

    Muon (arXiv 2502.16982: updates scaled to AdamW's RMS, so both take the same rate) orthogonalises the matrices of
    the layers; embeddings, taps, norms and gates go by AdamW.
    """

    steps: int
    peak: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    muon: bool = True

    def optimizer(self) -> optax.GradientTransformation:
        warmup = min(self.warmup, self.steps // 5)  # short trial runs too
        rate = optax.warmup_cosine_decay_schedule(0.0, self.peak, warmup, self.steps, self.peak / 10)
        decayed = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
        if self.muon:
            inner = optax.contrib.muon(
                rate,
                muon_weight_dimension_numbers=_matrices,
                consistent_rms=0.2,
                adam_b2=0.95,
                weight_decay=self.weight_decay,
                weight_decay_mask=decayed,
            )
        else:
            inner = optax.adamw(rate, b2=0.95, weight_decay=self.weight_decay, mask=decayed)
        return optax.chain(optax.clip_by_global_norm(self.clip), inner)


def _matrices(params: Tree) -> Tree:
    """Muon's layer weights; None (AdamW) for everything else."""

    def kind(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        name = str(getattr(path[-1], "key", path[-1]))
        plain = leaf.ndim == 2 and name not in ("embed", "lm_head", "conv", "router")
        return optax.contrib.MuonDimensionNumbers() if plain else None

    return jax.tree_util.tree_map_with_path(kind, params)


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a run lives, how often it saves and speaks, and what else defines it.

    `settings` (JSON values: seed, data, what is frozen) is kept beside the checkpoints with the schedule. A resume with
    other settings is allowed, a longer run for example, and says what has changed.
    """

    directory: Path
    save_every: int = 100
    log_every: int = 20
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _settings_changed(path: Path, settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """`{name: [before, now]}` against the file, which then holds what is now."""
    now = json.loads(json.dumps(settings))
    before = json.loads(path.read_text()) if path.exists() else now
    path.write_text(json.dumps(now, indent=2) + "\n")
    return {name: [before.get(name), now.get(name)] for name in before | now if before.get(name) != now.get(name)}


def train(
    loss: Loss,
    trained: Tree,
    frozen: Tree,
    batches: Callable[[int], Batch],
    schedule: Schedule,
    run: Run,
    evaluate: Callable[[Tree], dict[str, float]] | None = None,
    report: Callable[[dict[str, Any]], None] = print,
) -> Tree:
    """Minimise `loss(trained, frozen, *batch)`, a weighted sum and its weight, over `trained` for `schedule.steps`.

    `batches(step)` is a pure function of the step, so a resumed run sees what it would have seen; the checkpoint holds
    parameters, optimizer state and step. Only what `trained` holds gets gradients or optimizer state. Metrics go to
    `metrics.jsonl` in the run's directory, one line every `log_every` steps, and to `report`. Ctrl-C saves and raises.
    """
    optimizer = schedule.optimizer()

    def mean(trained: Tree, frozen: Tree, *batch: jax.Array) -> jax.Array:
        total, weight = loss(trained, frozen, *batch)
        return total / jnp.maximum(weight, 1e-9)  # a batch without supervised tokens contributes nothing, not NaN

    def update(trained: Tree, state: Tree, frozen: Tree, *batch: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        value, gradient = jax.value_and_grad(mean)(trained, frozen, *batch)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    step_fn = jax.jit(update, donate_argnums=(0, 1))
    trained = jax.tree.map(lambda x: jnp.array(x, copy=True), trained)  # donated: never the caller's arrays
    state = optimizer.init(trained)
    run.directory.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((run.directory / "state").resolve(), options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            saved = manager.restore(done, args=ocp.args.StandardRestore({"params": trained, "optimizer": state}))
            trained, state = saved["params"], saved["optimizer"]
        changed = _settings_changed(run.directory / "settings.json", {**run.settings, **dataclasses.asdict(schedule)})
        if done:
            report({"resumed_at": done} | ({"changed": changed} if changed else {}))

        def save(step: int) -> None:
            if step > (manager.latest_step() or 0):
                tree = {"params": trained, "optimizer": state}
                manager.save(step, args=ocp.args.StandardSave(tree))
                manager.wait_until_finished()  # the next update donates these buffers

        losses: list[jax.Array] = []
        since = time.perf_counter()
        try:
            while done < schedule.steps:
                batch = batches(done)
                trained, state, value = step_fn(trained, state, frozen, *batch)
                done += 1
                losses.append(value)
                saving = done % run.save_every == 0 or done == schedule.steps
                if saving or done % run.log_every == 0:
                    mean_loss = float(np.mean(jax.device_get(losses)))
                    if not np.isfinite(mean_loss):  # before anything is saved over a good checkpoint
                        raise FloatingPointError(f"the loss is {mean_loss} at step {done}; the last checkpoint is kept")
                    seconds = time.perf_counter() - since
                    row: dict[str, Any] = {
                        "step": done,
                        "loss": round(mean_loss, 4),
                        "tokens_per_s": round(len(losses) * batch[0].size / seconds),
                    }
                    losses, since = [], time.perf_counter()
                    if saving:
                        save(done)
                        row |= evaluate(trained) if evaluate else {}
                        since = time.perf_counter()
                    with (run.directory / "metrics.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    report(row)
        except KeyboardInterrupt:
            save(done)
            raise
    return trained
