"""The training loop: a jitted update, Orbax checkpoints, a resume that continues exactly where it stopped."""

from __future__ import annotations

import dataclasses
import functools
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

from atlas_jax import sharding
from atlas_jax.files import written_whole
from atlas_jax.sharding import Mesh

Tree = Any
Batch = tuple[Any, ...]  # arrays
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

    A step takes `accumulate` batches and is what it would be with all of their rows in one: sums of losses and weights
    are added up, then divided. `settings` (JSON values: seed, data, what is frozen) is kept beside the checkpoints with
    the schedule. A resume with other settings is allowed, a longer run for example, and says what has changed.
    """

    directory: Path
    save_every: int = 100
    log_every: int = 20
    accumulate: int = 1
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
    live: Callable[[Tree], dict[str, Any]] | None = None,
    mesh: Mesh = Mesh(),
) -> Tree:
    """Minimise `loss(trained, frozen, *batch)`, a weighted sum and its weight, over `trained` for `schedule.steps`.

    `batches(i)` is a pure function of i, so that the step is also the data cursor and the state of every random choice:
    a checkpoint is parameters, optimizer state and step, and a run that was killed, at any moment, ends with the very
    parameters of one that was not. Checkpoints are written in the background, to a folder that gets its name when it is
    complete. Only what `trained` holds gets gradients or optimizer state.

    Metrics go to `metrics.jsonl` in the run's directory, one line every `log_every` steps, and to `report`; `live` adds
    to each of them, `evaluate` to those where a checkpoint is saved. Ctrl-C saves and raises. `FloatingPointError` for
    a loss that is no number, `ValueError` for one of exactly 0 and where nothing is supervised for `log_every` steps;
    each names the steps, and the last checkpoint is kept.

    On a `mesh`, rows of batches and everything in `trained`, `frozen` and the optimizer's state are cut as `sharding`
    says; a checkpoint restores onto any other mesh. Where it spans several processes, all of them call this with the
    same arguments; the first alone evaluates, reports and writes metrics, and Ctrl-C saves nothing, since it finds them
    at different steps. What comes back, and what is evaluated, is on the host.
    """
    if run.accumulate < 1:
        raise ValueError(f"accumulate is {run.accumulate}; a step takes at least one batch")
    optimizer = schedule.optimizer()

    def sums(trained: Tree, frozen: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss(trained, frozen, *batch)

    def gradients(trained: Tree, frozen: Tree, batch: Batch) -> tuple[jax.Array, jax.Array, Tree]:
        (total, weight), gradient = jax.value_and_grad(sums, has_aux=True)(trained, frozen, batch)
        return total, weight, gradient

    def apply(trained: Tree, state: Tree, found: tuple[jax.Array, jax.Array, Tree]) -> tuple[Tree, Tree, jax.Array]:
        total, weight, gradient = found
        safe = jnp.maximum(weight, 1e-9)  # batches without supervised tokens contribute nothing, not NaN
        gradient = jax.tree.map(lambda g: g / safe, gradient)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, jnp.stack([total / safe, weight])

    def update(trained: Tree, state: Tree, frozen: Tree, batch: Batch) -> tuple[Tree, Tree, jax.Array]:
        return apply(trained, state, gradients(trained, frozen, batch))

    trained = jax.tree.map(lambda x: jnp.array(x, copy=True), trained)  # donated: never the caller's arrays
    gather = put_batch = lambda tree: tree
    out: dict[str, Any] = {}
    if mesh.size == 1:
        state = optimizer.init(trained)
    else:
        devices = mesh.build()
        whole = sharding.whole(devices)
        trained, frozen = sharding.place(trained, devices), sharding.place(frozen, devices)
        places = sharding.shardings(jax.eval_shape(optimizer.init, trained), devices)
        state = jax.jit(optimizer.init, out_shardings=places)(trained)
        out = {"out_shardings": (sharding.shardings(trained, devices), places, whole)}
        whole_fn = jax.jit(lambda tree: tree, out_shardings=whole)
        gather = lambda tree: jax.device_get(whole_fn(tree))
        put_batch = functools.partial(sharding.place_batch, mesh=devices)
    step_fn = jax.jit(update, donate_argnums=(0, 1), **out)
    gradients_fn = jax.jit(gradients)
    add_fn = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    apply_fn = jax.jit(apply, donate_argnums=(0, 1), **out)
    alone, first_process = jax.process_count() == 1 or mesh.size == 1, jax.process_index() == 0
    run.directory.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager((run.directory / "state").resolve(), options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            saved = manager.restore(done, args=ocp.args.StandardRestore({"params": trained, "optimizer": state}))
            trained, state = saved["params"], saved["optimizer"]
        settings = {**run.settings, "accumulate": run.accumulate, **dataclasses.asdict(schedule)}
        metrics = run.directory / "metrics.jsonl"
        if first_process:
            changed = _settings_changed(run.directory / "settings.json", settings)
            _drop_after(metrics, done)
            if done:
                report({"resumed_at": done} | ({"changed": changed} if changed else {}))

        def save(step: int) -> None:
            if step > (manager.latest_step() or 0):
                # A copy, on the host if that has all of it: it is written while the next updates take over the buffers.
                copy = (lambda x: np.array(x, copy=True)) if alone else jnp.copy
                tree = jax.tree.map(copy, {"params": trained, "optimizer": state})
                manager.save(step, args=ocp.args.StandardSave(tree))

        recent: list[jax.Array] = []
        since = time.perf_counter()
        try:
            while done < schedule.steps:
                first = done * run.accumulate
                batch = put_batch(batches(first))
                if run.accumulate == 1:
                    trained, state, value = step_fn(trained, state, frozen, batch)
                else:
                    found = gradients_fn(trained, frozen, batch)
                    for i in range(first + 1, first + run.accumulate):
                        found = add_fn(found, gradients_fn(trained, frozen, put_batch(batches(i))))
                    trained, state, value = apply_fn(trained, state, found)
                done += 1
                recent.append(value)
                saving = done % run.save_every == 0 or done == schedule.steps
                if saving or done % run.log_every == 0:
                    losses, weights = np.stack(jax.device_get(recent)).T
                    _check(losses, weights, done)  # before anything is saved over a good checkpoint
                    seconds = time.perf_counter() - since
                    row: dict[str, Any] = {
                        "step": done,
                        "loss": round(float(losses.mean()), 4),
                        "tokens_per_s": round(len(recent) * run.accumulate * batch[0].size / seconds),
                    }
                    recent = []
                    judged = gather(trained) if live or (evaluate and saving) else None
                    if saving:
                        save(done)
                    if first_process:
                        row |= live(judged) if live else {}
                        row |= evaluate(judged) if evaluate and saving else {}
                        with metrics.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                        report(row)
                    since = time.perf_counter()
        except KeyboardInterrupt:
            if alone:
                save(done)
            raise
    return gather(trained)


def _check(losses: np.ndarray, weights: np.ndarray, done: int) -> None:
    first = done - len(losses) + 1
    if not np.isfinite(losses).all():
        step = first + int(np.argmin(np.isfinite(losses)))
        raise FloatingPointError(f"the loss is {losses[step - first]} at step {step}; the last checkpoint is kept")
    if (nothing := (losses == 0) & (weights > 0)).any():
        raise ValueError(f"the loss is exactly 0 at step {first + int(np.argmax(nothing))}; check what it compares")
    if not weights.any():
        raise ValueError(f"no token is supervised in the batches of steps {first} to {done}; nothing can be learnt")


def _drop_after(metrics: Path, step: int) -> None:
    """A run that was killed has told of steps that its checkpoint doesn't know; they will be told again."""
    if not metrics.exists():
        return
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = "".join(line for line in lines if json.loads(line)["step"] <= step)
    with written_whole(metrics) as part:
        part.write_text(kept)
