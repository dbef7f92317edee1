"""Every tensor of the reference dumps: whole forward, prefill, single steps, a 4-row verify, states, an MTP chain.

The dumps (`tests/data`) were made with a public implementation on seeded tiny models with random norms, so that a
missing `1 + w`, a swapped gate, a transposed state or a wrong head map fails. Bound: 1e-4 absolute in float64, where
only the dump's own float32 rounding is left (it reaches 9e-5 on logits of 20), and 1e-4 of a tensor's largest entry in
float32, where our rounding comes on top.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlas_jax.config import ModelConfig
from atlas_jax.model import mtp
from atlas_jax.model.ffn import route
from atlas_jax.model.mixers import delta_inputs
from atlas_jax.model.ops import l2_normalise
from atlas_jax.model.state import GdnCache, init_state
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full, Prefill, Step, materialize
from atlas_jax.weights.hf import params_from_hf, params_to_hf

DATA = Path(__file__).parents[1] / "data"
MODELS = ["qwen3_next_tiny", "qwen3_5_tiny", "qwen3_5_moe_tiny"]
PROMPT = 7


@pytest.fixture(scope="module", params=[(name, bits) for name in MODELS for bits in (32, 64)], ids=str)
def dump(request):
    name, bits = request.param
    reference = dict(np.load(DATA / f"{name}.npz"))
    cfg = ModelConfig.from_hf(json.loads((DATA / f"{name}.config.json").read_text()))
    weights = {k.removeprefix("w/"): v for k, v in reference.items() if k.startswith("w/")}
    if cfg.tie_embeddings:
        weights.pop("lm_head.weight", None)
    weights |= {k.removeprefix("mtp/w/"): v for k, v in reference.items() if k.startswith("mtp/w/")}
    dtype = np.dtype(f"float{bits}")
    reference = {k: v.astype(dtype) if v.dtype == np.float32 else v for k, v in reference.items()}
    with jax.enable_x64(bits == 64):
        yield cfg, params_from_hf({k: v.astype(dtype) for k, v in weights.items()}, cfg), reference


def close(actual, expected, bound=1e-4):
    assert actual.dtype == expected.dtype
    scale = 1.0 if expected.dtype == np.float64 else max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(actual), expected, atol=bound * scale, rtol=0)


def full_view(tokens):
    return Full(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))


class Recording:
    """A `Full` view that keeps what each mixer was given and gave."""

    def __init__(self, view):
        self.view, self.positions, self.seen = view, view.positions, []

    def recur(self, params, cfg, rows, cache):
        history = jnp.pad(rows, ((0, 0), (cfg.conv_width - 1, 0), (0, 0)))
        out, cache = self.view.recur(params, cfg, rows, cache)
        self.seen.append((*delta_inputs(params, cfg, history), out))
        return out, cache

    def attend(self, q, k, v, cache):
        self.seen.append((k, v))
        return self.view.attend(q, k, v, cache)


def test_whole_forward(dump):
    cfg, params, reference = dump

    @jax.jit
    def run(params, tokens):
        view = Recording(full_view(tokens))
        return trunk(params, cfg, tokens, view)[0], view.seen

    hidden, seen = run(params, reference["full/input_ids"])
    close(hidden, reference["full/hidden_postnorm"])
    close(logits(params, hidden), reference["full/logits"])
    for index, kind in enumerate(cfg.layers):
        if kind == "gdn":
            q, k, v, g, beta, core = seen[index]
            at = f"full/L{index}/gdn"
            close(q, l2_normalise(reference[f"{at}/q"]) * cfg.gdn_key_dim**-0.5)
            close(k, l2_normalise(reference[f"{at}/k"]))
            close(v, reference[f"{at}/v"])
            close(g, reference[f"{at}/g"])
            close(beta, reference[f"{at}/beta"])
            close(core, reference[f"{at}/core"])


def test_router(dump):
    cfg, _, reference = dump
    if cfg.moe is None:
        assert "full/L0/moe/logits" not in reference  # a dense model has none; nothing is skipped
        return
    for index in range(len(cfg.layers)):
        at = f"full/L{index}/moe"
        # The router sees log-probabilities here: softmax gives back the reference's own routing distribution.
        weights, ids = route(jnp.eye(cfg.moe.num_experts), cfg.moe, jnp.asarray(reference[f"{at}/logits"]))
        close(weights, reference[f"{at}/weights"])
        np.testing.assert_array_equal(ids, reference[f"{at}/indices"])


def check_state(cfg, state, reference, at, length):
    """GDN states and conv windows exactly, keys and values up to the length."""
    slots = jnp.array([2, 0])
    for index, cache in enumerate(state.layers):
        if isinstance(cache, GdnCache):
            close(cache.state[slots], reference[f"{at}/L{index}/rec"])
            window = cache.window[slots, : cfg.conv_width - 1, : cfg.conv_channels]
            close(window.swapaxes(1, 2), reference[f"{at}/L{index}/conv"][..., 1:])
        else:
            for which, name in enumerate("kv"):
                close(cache.kv[slots, which, :, :length], reference[f"{at}/L{index}/{name}"])


@functools.partial(jax.jit, static_argnames=("cfg", "width"))
def prefill(params, tokens, state, cfg, width=16):
    """Prefill both sequences, into slots 2 and 0 of 4, padded to `width`."""
    count = tokens.shape[1]
    view = Prefill(jnp.array([2, 0]), jnp.zeros(2, int), jnp.full(2, count), width)
    padded = jnp.pad(tokens, ((0, 0), (0, width - count)))
    hidden, layers = trunk(params, cfg, padded, view, state.layers)
    return hidden[:, :count], state._replace(layers=layers)


def step_view(rows, length):
    grid = jnp.arange(2 * rows).reshape(2, rows)
    slots, lengths = jnp.array([2, 0]), jnp.broadcast_to(length, 2)
    return Step(slots, lengths, jnp.full(2, rows), jnp.zeros(2, int), grid, grid.reshape(-1), False)


@functools.partial(jax.jit, static_argnames="cfg")
def decode(params, tokens, state, length, cfg):
    """All rows of `tokens` `[2, rows]` at once, behind `length` committed ones."""
    hidden, layers = trunk(params, cfg, tokens.reshape(-1), step_view(tokens.shape[1], length), state.layers)
    return logits(params, hidden).reshape(*tokens.shape, -1), state._replace(layers=layers)


def test_prefill_then_steps(dump):
    cfg, params, reference = dump
    tokens = reference["full/input_ids"]
    state = init_state(cfg, slots=4, length=32, max_drafts=3, dtype=reference["full/logits"].dtype, head=False)
    hidden, state = prefill(params, tokens[:, :PROMPT], state, cfg)
    close(hidden, reference["full/hidden_postnorm"][:, :PROMPT])
    check_state(cfg, state, reference, "cache_prefill", PROMPT)
    for j in range(4):
        scores, state = decode(params, tokens[:, PROMPT + j : PROMPT + j + 1], state, PROMPT + j, cfg)
        close(scores, reference[f"step{j}/logits"])
        if j in (0, 3):
            check_state(cfg, state, reference, f"cache_step{j}", PROMPT + j + 1)


def test_verify_four_rows_then_fold(dump):
    """Four rows at once give the four steps' logits; folding all of them gives the four steps' state."""
    cfg, params, reference = dump
    tokens = reference["full/input_ids"]
    state = init_state(cfg, slots=4, length=32, max_drafts=3, dtype=reference["full/logits"].dtype, head=False)
    _, state = prefill(params, tokens[:, :PROMPT], state, cfg)
    scores, state = decode(params, tokens[:, PROMPT:], state, PROMPT, cfg)
    close(scores, reference["verify/logits"])
    fold = jax.jit(materialize, static_argnums=(1, 5))
    folded = tuple(
        fold(params["layers"][i]["mixer"], cfg, cache, jnp.array([2, 0]), jnp.full(2, 3), 3)
        if isinstance(cache, GdnCache)
        else cache
        for i, cache in enumerate(state.layers)
    )
    check_state(cfg, state._replace(layers=folded), reference, "verify", PROMPT + 4)


@functools.partial(jax.jit, static_argnames="cfg")
def draft_head(params, cfg, tokens, hidden, cache, length):
    """The head on the rows of `tokens` `[2, rows]` behind `length` that it holds; a prompt where there are none."""
    rows = tokens.shape[1]
    if rows > 1:
        view = Prefill(jnp.array([2, 0]), jnp.zeros(2, int), jnp.full(2, rows), rows)
        hidden, cache = mtp.head(params, cfg, tokens, hidden, view, cache)
        return hidden, cache, view.positions
    view = step_view(1, length)
    hidden, cache = mtp.head(params, cfg, tokens[:, 0], hidden[:, 0], view, cache)
    return hidden[:, None], cache, view.positions[:, None]


def test_mtp_chain(dump):
    """Teacher-forced prompt rows, then two recursive drafts, at the position of the hidden (`pos_t`)."""
    cfg, params, reference = dump
    at = "mtp/pos_t"
    state = init_state(cfg, slots=4, length=32, max_drafts=3, dtype=reference["full/logits"].dtype, head=True)
    cache = state.head
    slots = jnp.array([2, 0])
    for j in range(3):
        tokens = jnp.asarray(reference[f"{at}/s{j}/tokens_in"])
        hidden_in = jnp.asarray(reference[f"{at}/s{j}/hidden_in"])
        hidden, cache, positions = draft_head(params, cfg, tokens, hidden_in, cache, PROMPT + j - 1)
        np.testing.assert_array_equal(positions, reference[f"{at}/s{j}/positions"])
        close(hidden, reference[f"{at}/s{j}/hidden_out"])
        scores = logits(params, hidden[:, -1])
        close(scores, reference[f"{at}/s{j}/logits_last"])
        np.testing.assert_array_equal(scores.argmax(-1), reference[f"{at}/drafts"][:, j])
    for which, name in enumerate("kv"):
        close(cache.kv[slots, which, :, :9], reference[f"{at}/kv_{name}"])


def test_head_entries_are_what_the_head_caches(dump):
    cfg, params, reference = dump
    tokens = jnp.asarray(reference["mtp/pos_t/s0/tokens_in"])
    hidden = jnp.asarray(reference["mtp/pos_t/s0/hidden_in"])
    k, v = mtp.head_entries(params, cfg, tokens, hidden, full_view(tokens).positions)
    close(k.swapaxes(1, 2), reference["mtp/pos_t/kv_k"][:, :, :PROMPT], 1e-5)
    close(v.swapaxes(1, 2), reference["mtp/pos_t/kv_v"][:, :, :PROMPT], 1e-5)


def test_export_is_the_inverse_of_import(dump):
    cfg, params, _ = dump
    tensors = params_to_hf(params, cfg)
    again = params_to_hf(params_from_hf(tensors, cfg), cfg)
    assert tensors.keys() == again.keys()
    for name in tensors:
        np.testing.assert_array_equal(tensors[name], again[name])
