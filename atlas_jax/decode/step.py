"""One step, one program: verify, accept, commit, refill and propose, for every n and every depth.

The host says what runs in one small integer array, the program answers in another; what lives on the device between
steps is the decode state, donated and updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlas_jax import sharding
from atlas_jax.config import ModelConfig
from atlas_jax.decode import accept
from atlas_jax.decode.plan import Bucket, Plan, Result, StepConfig
from atlas_jax.decode.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    Places,
    Tables,
    add_noise,
    noise_keys,
    pick,
    probabilities,
)
from atlas_jax.decode.state import DecodeState
from atlas_jax.kernels.backends import Kernels
from atlas_jax.model import mtp
from atlas_jax.model import rollback as rollbacks
from atlas_jax.model.mixers import Params
from atlas_jax.model.rollback import Rollback
from atlas_jax.model.state import GdnCache
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Prefill, Step, materialize


def step(
    params: Params,
    state: DecodeState,
    packed: Int[Array, "N W"],
    cfg: ModelConfig,
    bucket: Bucket,
    config: StepConfig = StepConfig(),
    kernels: Kernels = Kernels(),
) -> tuple[DecodeState, Result]:
    """Run up to `config.rounds` steps of `bucket` on a packed plan; the state comes back updated (donate it).

    The plan says how many of them; a round in which a sequence ends is the last, on every shard of the data. Between
    rounds every sequence queues all of its drafts. Jit with all but the first three static.
    """
    plan = Plan.of(packed, bucket.k)
    run = functools.partial(_round, params, cfg=cfg, bucket=bucket, config=config, kernels=kernels)
    if config.rounds == 1:
        state, _, answer = run(state, plan)
        return state, jax.tree.map(lambda x: x[None], answer)

    shapes = jax.eval_shape(lambda state, plan: run(state, plan)[2], state, plan)
    answers = jax.tree.map(lambda x: jnp.zeros((config.rounds, *x.shape), x.dtype), shapes)

    def goes_on(carry: Any) -> Array:
        done, going, *_ = carry
        return going & (done < plan.rounds[0])

    def body(carry: Any) -> Any:
        done, _, state, now, answers = carry
        state, now, answer = run(state, now)
        put = lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, done, 0)
        going = sharding.everywhere(((now.num_rows > 0) == (plan.num_rows > 0)).all())
        return done + 1, going, state, now, jax.tree.map(put, answers, answer)

    start = (jnp.int32(0), jnp.bool(True), state, plan, answers)
    _, _, state, _, answers = jax.lax.while_loop(goes_on, body, start)
    return state, answers


def _round(
    params: Params,
    state: DecodeState,
    plan: Plan,
    *,
    cfg: ModelConfig,
    bucket: Bucket,
    config: StepConfig,
    kernels: Kernels,
) -> tuple[DecodeState, Plan, Result]:
    """One step; also the plan of the next one, if nothing else comes up."""
    n, k = bucket.n, bucket.k
    held = state.ledger.at[plan.slots].get(mode="fill", fill_value=0)
    told = jnp.stack([plan.lengths, plan.pending, plan.head], axis=1)
    fault = (plan.num_rows > 0) & (held != told).any(axis=1)
    # Whoever the slot belongs to still has it: as a padding sequence, this one neither reads nor writes any.
    nowhere = state.ledger.shape[0]
    plan = plan._replace(num_rows=jnp.where(fault, 0, plan.num_rows), slots=jnp.where(fault, nowhere, plan.slots))
    view = _view(plan, bucket, kernels, config.rollback)
    rows = jax.tree.map(lambda x: view.to_flat(jnp.repeat(x[:, None], k, axis=1)), plan.controls)

    # Verify. The token after row j stands at position lengths + j + 1.
    hidden, layers = trunk(params, cfg, view.to_flat(plan.tokens), view, state.layers)
    scores = logits(params, hidden)
    tables = Tables(state.text, state.bias, state.masks)
    place = jnp.arange(k)[None]
    before = (jnp.arange(k)[None, None] <= place[..., None]) & (place[:, None] < plan.num_rows[:, None, None])
    repeat = lambda x: jnp.repeat(x[:, None], k, axis=1)
    grid = Places(
        slots=repeat(plan.slots),
        positions=view.grid_positions + 1,
        lengths=repeat(plan.lengths),
        prompts=repeat(plan.prompts),
        more=repeat(plan.tokens),
        live=before,
        mask=jnp.broadcast_to(place, (n, k)),
    )
    places = jax.tree.map(view.to_flat, grid)
    if config.acceptance == "match":
        picked = pick(scores, rows, plan.controls, places, tables)
        picks = view.to_grid(picked)
        accepted = accept.matched(picks, plan.tokens[:, 1:], plan.num_rows)
    else:
        target = view.to_grid(probabilities(scores, rows, places, tables))
        accepted, picks = _judge(config.acceptance, target, state, plan)
        picked = view.to_flat(picks)
    is_end = (picks[:, :, None] == plan.ends[:, None, :]).any(axis=-1)
    count = accept.emitted_count(accepted, is_end, plan.num_rows, plan.room)
    active = count > 0
    last = jnp.maximum(count - 1, 0)[:, None]
    final = jnp.take_along_axis(picks, last, axis=1)[:, 0]

    # Commit: row 0 has entered the states, the accepted drafts are pending; the text goes on.
    committed = plan.lengths + count
    places = jnp.where(jnp.arange(k)[None] < count[:, None], plan.lengths[:, None] + 1 + jnp.arange(k)[None], 2**30)
    text = state.text.at[plan.slots[:, None], places].set(picks, mode="drop")
    filled = jnp.where(plan.head == plan.lengths, committed, plan.head) if bucket.head else plan.head
    ledger = jnp.stack([committed, count - 1, filled], axis=1)
    state = state._replace(
        layers=rollbacks.commit(layers, plan.slots, count),
        text=text,
        ledger=state.ledger.at[jnp.where(active, plan.slots, 2**30)].set(ledger, mode="drop"),
    )

    drafts, chances = jnp.zeros((n, 0), jnp.int32), jnp.zeros((n, 0))
    if bucket.head:
        if state.head is None:
            raise ValueError(f"{bucket} runs a draft head and the state was made without one")
        # Refill: the committed rows enter the head's own cache, made of the trunk's true hiddens and the tokens after
        # them. The head is one layer, so this takes no attention and no FFN.
        entries = mtp.head_entries(params, cfg, picked, hidden, view.positions)
        cache = dataclasses.replace(view, num_rows=count).write(state.head, *entries)
        recycled = jnp.take_along_axis(view.to_grid(hidden), last[:, :, None], axis=1)[:, 0]
        state = state._replace(head=cache)
        state, drafts, chances = _propose(
            params, state, plan, picks, count, final, recycled, cfg, bucket, config, kernels
        )

    answer = Result(
        jnp.concatenate([count[:, None], fault[:, None].astype(jnp.int32), picks, drafts], axis=1),
        _log_probs(scores, picked, plan, view),
        chances,
        *_top(scores, view, config.top_log_probs),
    )
    ended = (final[:, None] == plan.ends).any(axis=-1)
    room = plan.room - count
    going = active & ~ended & (room > 0)
    following = plan._replace(
        lengths=committed,
        pending=count - 1,
        head=filled,
        room=room,
        num_rows=jnp.where(going, jnp.minimum(jnp.minimum(plan.limit, k), room), 0),
        scripted=jnp.zeros_like(plan.scripted),
        tokens=jnp.concatenate([final[:, None], drafts], axis=1),
    )
    return state, following, answer


def _propose(
    params: Params,
    state: DecodeState,
    plan: Plan,
    picks: Int[Array, "N K"],
    count: Int[Array, " N"],
    final: Int[Array, " N"],
    recycled: Float[Array, "N D"],
    cfg: ModelConfig,
    bucket: Bucket,
    config: StepConfig,
    kernels: Kernels,
) -> tuple[DecodeState, Int[Array, "N P"], Float[Array, "N P"]]:
    """A chain of single rows that begins with the last committed one; each draft feeds the next."""
    n, k = bucket.n, bucket.k
    cache: Any = state.head
    draft, ids = final, params["mtp"].get("draft_ids")
    drafts: list[Array] = []
    chances: list[Array] = []
    proposals: list[Array] = []
    emitted = jnp.arange(k)[None] < count[:, None]
    tables, ones = Tables(state.text, state.bias, state.masks), lambda width: jnp.ones((n, width), bool)
    for j in range(k - 1):
        row = _single(plan, plan.lengths + count - 1 + j, count > 0, kernels)
        recycled, cache = mtp.head(params, cfg, draft, recycled, row, cache)
        scores = mtp.draft_logits(params, recycled)

        # Row 0's token, what this step emitted, the drafts so far: in this order, dead ones in between.
        place = Places(
            slots=plan.slots,
            positions=plan.lengths + count + j + 1,
            lengths=plan.lengths,
            prompts=plan.prompts,
            more=jnp.concatenate([plan.tokens[:, :1], picks, *(d[:, None] for d in drafts)], axis=1),
            live=jnp.concatenate([ones(1), emitted, ones(j)], axis=1),
            mask=jnp.full(n, -1),
        )
        if config.acceptance == "match":
            draft = pick(scores, plan.controls, plan.controls, place, tables, ids)
        else:
            proposal = probabilities(scores, plan.controls, place, tables, ids)
            noisy = add_noise(jnp.log(proposal), plan.controls, place.positions, DRAFT)
            draft = noisy.argmax(axis=-1).astype(jnp.int32)
            proposals.append(proposal)
        drafts.append(draft)
        if bucket.log_probs:
            found = draft if ids is None else jnp.searchsorted(ids, draft)
            chances.append(jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), found[:, None], axis=1)[:, 0])
    state = state._replace(head=cache)
    if proposals and state.proposals is not None:
        drawn = jnp.stack(proposals, axis=1).astype(state.proposals.dtype)
        state = state._replace(proposals=state.proposals.at[plan.slots, : k - 1].set(drawn, mode="drop"))
    stacked = lambda columns, dtype: jnp.stack(columns, axis=1) if columns else jnp.zeros((n, 0), dtype)
    return state, stacked(drafts, jnp.int32), stacked(chances, jnp.float32)


def _judge(
    rule: accept.Rule, target: Float[Array, "N K V"], state: DecodeState, plan: Plan
) -> tuple[Int[Array, " N"], Int[Array, "N K"]]:
    """Drafts accepted by a rule on distributions, and the rows' tokens: the accepted drafts and the one after them."""
    n, k, vocab = target.shape
    drafts = plan.tokens[:, 1:]
    repeat = lambda x: jnp.repeat(x[:, None], k - 1, axis=1).reshape(-1, *x.shape[1:])
    if k == 1 or state.proposals is None:
        accepted, last = jnp.zeros(n, jnp.int32), target[:, 0]
    else:
        drawn = state.proposals.at[plan.slots, : k - 1].get(mode="fill", fill_value=0).astype(target.dtype)
        given = jax.nn.one_hot(drafts, vocab, dtype=target.dtype)
        proposed = jnp.where(plan.scripted[:, None, None] > 0, given, drawn)
        places = (plan.lengths[:, None] + 1 + jnp.arange(k - 1)[None]).reshape(-1)
        keys = noise_keys(repeat(plan.controls.keys), places, ACCEPT)
        chance = jax.vmap(lambda key: jax.random.uniform(key, (), target.dtype))(keys).reshape(n, k - 1)
        judge = accept.rejection if rule == "rejection" else accept.block
        accepted, last = judge(target, proposed, drafts, plan.num_rows, chance)
    noisy = add_noise(jnp.log(last), plan.controls, plan.lengths + accepted + 1, RESIDUAL)
    final = noisy.argmax(axis=-1).astype(jnp.int32)
    padded = jnp.concatenate([drafts, final[:, None]], axis=1)
    return accepted, jnp.where(jnp.arange(k)[None] < accepted[:, None], padded, final[:, None])


def prefill(
    params: Params,
    state: DecodeState,
    packed: Int[Array, " 4+T"],
    *,
    cfg: ModelConfig,
    width: int,
    kernels: Kernels = Kernels(),
) -> DecodeState:
    """Consume up to `width` prompt tokens of one sequence.

    `packed` is `(slot, start, count, tokens[0] ... tokens[width])`; the token after the last live one is needed too,
    because the head's own cache pairs each hidden with the token that follows it.
    """
    slots, start, count, tokens = packed[0:1], packed[1:2], packed[2:3], packed[None, 3:]
    view = Prefill(slots, start, count, width, kernels)
    hidden, layers = trunk(params, cfg, tokens[:, :-1], view, state.layers)
    column = jnp.arange(width + 1)[None]
    places = jnp.where(column <= count[:, None], start[:, None] + column, 2**30)
    held = state.ledger.at[slots, 2].get(mode="fill", fill_value=0)
    unbroken = (start == 0) | (held == start)
    filled = jnp.where(unbroken, start + count, held) if state.head is not None else jnp.zeros_like(count)
    ledger = jnp.stack([start + count, jnp.zeros_like(count), filled], axis=1)
    head = state.head
    if head is not None:
        head = view.write(head, *mtp.head_entries(params, cfg, tokens[:, 1:], hidden, view.positions))
    return state._replace(
        layers=layers,
        head=head,
        text=state.text.at[slots[:, None], places].set(tokens, mode="drop"),
        ledger=state.ledger.at[slots].set(ledger, mode="drop"),
    )


def fold_pending(
    params: Params,
    state: DecodeState,
    packed: Int[Array, "4 N"],
    *,
    cfg: ModelConfig,
    fold: int,
    rollback: Rollback = "deferred",
    kernels: Kernels = Kernels(),
) -> DecodeState:
    """Fold pending rows (at most `fold`) into the GDN states of their slots: for tests, saving, prefix reuse.

    `packed` is, per sequence, its slot, the rows to fold (fewer than are pending drops the rest), and what the ledger
    then says: committed positions and entries of the head's cache.
    """
    slots, pending, lengths, head = packed
    ledger = jnp.stack([lengths, jnp.zeros_like(lengths), head], axis=1)
    layers = tuple(
        materialize(params["layers"][i]["mixer"], cfg, cache, slots, pending, fold, kernels, rollback)
        if isinstance(cache, GdnCache)
        else cache
        for i, cache in enumerate(state.layers)
    )
    return state._replace(layers=layers, ledger=state.ledger.at[slots].set(ledger, mode="drop"))


def copy_slot(params: Params, state: DecodeState, packed: Int[Array, " 2"]) -> DecodeState:
    """Copy all that one slot holds to another: `packed` is `(from, to)`. For prefix reuse."""
    source, target = packed
    # Read before anything is written: fused with the write, XLA copies the whole pool.
    held = jax.lax.optimization_barrier(
        jax.tree.map(lambda pool: jax.lax.dynamic_index_in_dim(pool, source, keepdims=True), state)
    )
    put = lambda pool, row: jax.lax.dynamic_update_slice_in_dim(pool, row, target, 0)
    return jax.tree.map(put, state, held)


def set_bias(state: DecodeState, slot: Int[Array, ""], bias: Float[Array, " V"]) -> DecodeState:
    """Give a slot its logit bias."""
    return state._replace(bias=jax.lax.dynamic_update_index_in_dim(state.bias, bias, slot, 0))


def set_masks(state: DecodeState, slot: Int[Array, ""], masks: Array) -> DecodeState:
    """Give a slot the allowed tokens of the next step's rows, as bits `[K, V / 32]`."""
    return state._replace(masks=jax.lax.dynamic_update_index_in_dim(state.masks, masks, slot, 0))


def _log_probs(scores: Float[Array, "R V"], picked: Int[Array, " R"], plan: Plan, view: Step) -> Float[Array, "N K"]:
    def found(scores: Array) -> Array:
        return jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), picked[:, None], axis=1)[:, 0]

    nothing = lambda scores: jnp.zeros(scores.shape[0], scores.dtype)
    return view.to_grid(jax.lax.cond((plan.wants > 0).any(), found, nothing, scores))


def _top(scores: Float[Array, "R V"], view: Step, count: int) -> tuple[Array, Array]:
    best, ids = jax.lax.top_k(jax.nn.log_softmax(scores, axis=-1) if count else scores, count)
    return view.to_grid(ids), view.to_grid(best)


def _view(plan: Plan, bucket: Bucket, kernels: Kernels, rollback: Rollback) -> Step:
    n, k, rows = bucket.n, bucket.k, bucket.rows
    told = (plan.slots, plan.lengths, plan.num_rows, plan.pending)
    cells = jnp.arange(n * k, dtype=jnp.int32).reshape(n, k)
    if rows == n * k:
        return Step(*told, cells, cells.reshape(-1), False, kernels, rollback)
    offsets = jnp.cumsum(plan.num_rows) - plan.num_rows
    column = jnp.arange(k)[None, :]
    to_flat = jnp.where(column < plan.num_rows[:, None], offsets[:, None] + column, rows)
    to_grid = jnp.full(rows, n * k, jnp.int32).at[to_flat].set(cells, mode="drop")
    return Step(*told, to_flat, to_grid, True, kernels, rollback)


def _single(plan: Plan, lengths: Int[Array, " N"], active: Array, kernels: Kernels) -> Step:
    cells = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    nothing = jnp.zeros_like(lengths)
    return Step(plan.slots, lengths, active.astype(jnp.int32), nothing, cells[:, None], cells, False, kernels)
