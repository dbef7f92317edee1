"""Which checkpoint tensors make up which parameter leaf: one table, read from left to right or from right to left.

Hugging Face stores linear weights `[out, in]` and projections apart; we store `[in, out]` and fuse those that share an
input. Qwen3-Next groups its GDN projections by key head, some checkpoints hold experts one by one. A `Part` names a
checkpoint tensor and pairs views of it with views of the leaf; copying from one to the other is the import, copying
back is the export.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator

import numpy as np

from atlas_jax.config import ModelConfig
from atlas_jax.weights.shards import WeightError

LeafPath = tuple[str | int, ...]
Pairs = list[tuple[np.ndarray, np.ndarray]]

TRUNKS = ("model.language_model.", "language_model.model.", "model.")
DRAFT_IDS = "mtp.draft_ids"  # of heads trained here: the token ids of a reduced draft vocabulary


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a checkpoint spells the parameters.

    Attributes:
      trunk: leads `embed_tokens`, `layers` and `norm`.
      top: leads `lm_head` and `mtp`.
      grouped: GDN projections as `in_proj_qkvz` and `in_proj_ba`, by key head, as Qwen3-Next has them.
      fused_experts, fused_head_experts: all experts of a layer in one tensor, in the trunk and in the MTP head.
      draft_vocab: tokens of the head's reduced vocabulary, None for a head that scores all.
    """

    trunk: str = "model."
    top: str = ""
    grouped: bool = False
    fused_experts: bool = True
    fused_head_experts: bool = True
    draft_vocab: int | None = None

    @classmethod
    def of_release(cls, cfg: ModelConfig, trunk: str = "model.") -> Naming:
        """As the releases of the config's family name a text model."""
        following = cfg.family == "qwen3_next"
        return cls(trunk, "", following, not following, not following)

    @classmethod
    def find(cls, names: Collection[str], cfg: ModelConfig) -> Naming:
        """What the tensors of a checkpoint are called. Raises `WeightError` where it holds two trunks."""
        trunks = [trunk for trunk in TRUNKS if f"{trunk}embed_tokens.weight" in names]
        if len(trunks) > 1:
            raise WeightError(f"the checkpoint holds trunks under {' and '.join(trunks)}; delete one")
        start = next((t for t in TRUNKS if any(name.startswith(f"{t}layers.") for name in names)), "model.")
        trunk = trunks[0] if trunks else start
        wrapped = any(name.startswith(("language_model.lm_head", "language_model.mtp")) for name in names)
        default = cls.of_release(cfg)
        grouped = {name.split(".in_proj_")[1] for name in names if ".linear_attn.in_proj_" in name}

        def fused(at: str, otherwise: bool) -> bool:
            found = [name.partition(".mlp.experts.")[2] for name in names if name.startswith(at)]
            kinds = {rest[0].isdigit() for rest in found if rest}
            return kinds == {False} if len(kinds) == 1 else otherwise

        top = "language_model." if wrapped else ""
        return cls(
            trunk,
            top,
            "qkvz.weight" in grouped if grouped else default.grouped,
            fused(f"{trunk}layers.", default.fused_experts),
            fused(f"{top}mtp.", default.fused_head_experts),
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One checkpoint tensor of a leaf: `pairs(leaf, tensor)` are matching views of both, all of the tensor covered."""

    name: str
    shape: tuple[int, ...]
    pairs: Callable[[np.ndarray, np.ndarray], Pairs]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameter tree and the checkpoint tensors that fill it, whose last two axes are `swapped`."""

    path: LeafPath
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    swapped: bool = True

    def allocate(self, make: Callable[..., np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The leaf by `np.empty` or `np.zeros`, in memory in the tensors' order: filling it then moves whole rows."""
        if not self.swapped or len(self.shape) < 2:
            return make(self.shape, dtype)
        *lead, inputs, outputs = self.shape
        return make((*lead, outputs, inputs), dtype).swapaxes(-1, -2)


def leaves(cfg: ModelConfig, naming: Naming) -> Iterator[Leaf]:
    """All leaves of a model of this config, in the order of the layers."""
    width, vocab = cfg.hidden_size, cfg.vocab_size
    yield _same(("embed",), f"{naming.trunk}embed_tokens.weight", vocab, width)
    for i, kind in enumerate(cfg.layers):
        yield from _layer(cfg, kind, ("layers", i), f"{naming.trunk}layers.{i}.", naming.grouped, naming.fused_experts)
    yield _same(("final_norm",), f"{naming.trunk}norm.weight", width)
    if not cfg.tie_embeddings:
        yield _same(("lm_head",), f"{naming.top}lm_head.weight", vocab, width)
    if cfg.mtp_layers:
        yield from head_leaves(cfg, naming)


def head_leaves(cfg: ModelConfig, naming: Naming) -> Iterator[Leaf]:
    """The leaves of the MTP head."""
    width, at = cfg.hidden_size, f"{naming.top}mtp."
    yield _same(("mtp", "embed_norm"), f"{at}pre_fc_norm_embedding.weight", width)
    yield _same(("mtp", "hidden_norm"), f"{at}pre_fc_norm_hidden.weight", width)
    yield _linear(("mtp", "fc"), f"{at}fc.weight", 2 * width, width)
    yield from _layer(cfg, "attention", ("mtp", "layer"), f"{at}layers.0.", False, naming.fused_head_experts)
    yield _same(("mtp", "norm"), f"{at}norm.weight", width)
    if naming.draft_vocab is not None:
        yield _same(("mtp", "draft_ids"), f"{naming.top}{DRAFT_IDS}", naming.draft_vocab)


def tied_lm_head(cfg: ModelConfig, naming: Naming) -> Leaf:
    """The LM head that some checkpoints hold although it is the embedding."""
    return _same(("embed",), f"{naming.top}lm_head.weight", cfg.vocab_size, cfg.hidden_size)


def _layer(cfg: ModelConfig, kind: str, path: LeafPath, at: str, grouped: bool, fused: bool) -> Iterator[Leaf]:
    yield _same((*path, "input_norm"), f"{at}input_layernorm.weight", cfg.hidden_size)
    if kind == "gdn":
        yield from _gdn(cfg, (*path, "mixer"), f"{at}linear_attn.", grouped)
    else:
        yield from _attention(cfg, (*path, "mixer"), f"{at}self_attn.")
    yield _same((*path, "post_norm"), f"{at}post_attention_layernorm.weight", cfg.hidden_size)
    if cfg.moe is None:
        yield from _swiglu((*path, "ffn"), ("gate_up", "down"), f"{at}mlp.", cfg.ffn_size, cfg.hidden_size)
    else:
        yield from _moe(cfg, (*path, "ffn"), f"{at}mlp.", fused)


def _gdn(cfg: ModelConfig, path: LeafPath, at: str, grouped: bool) -> Iterator[Leaf]:
    width, heads, channels = cfg.hidden_size, cfg.gdn_value_heads, cfg.conv_channels
    # The leaf's columns are (q | k | v | b | a | z).
    start = np.cumsum([0, cfg.key_size, cfg.key_size, cfg.value_size, heads, heads, cfg.value_size]).tolist()
    q, k, v, b, a, z = ((first, last) for first, last in itertools.pairwise(start))
    if grouped:
        parts = [
            _by_group(f"{at}in_proj_qkvz.weight", cfg.gdn_key_heads, width, (q, k, v, z)),
            _by_group(f"{at}in_proj_ba.weight", cfg.gdn_key_heads, width, (b, a)),
        ]
    else:
        columns = {"qkv": (0, channels), "z": z, "b": b, "a": a}
        parts = [_columns(f"{at}in_proj_{name}.weight", width, *at_) for name, at_ in columns.items()]
    yield Leaf((*path, "in_proj"), (width, start[-1]), tuple(parts))
    conv = Part(f"{at}conv1d.weight", (channels, 1, cfg.conv_width), lambda leaf, tensor: [(leaf, tensor[:, 0].T)])
    yield Leaf((*path, "conv"), (cfg.conv_width, channels), (conv,))
    yield _same((*path, "a_log"), f"{at}A_log", heads)
    yield _same((*path, "dt_bias"), f"{at}dt_bias", heads)
    yield _same((*path, "norm"), f"{at}norm.weight", cfg.gdn_value_dim)
    yield _linear((*path, "out_proj"), f"{at}out_proj.weight", cfg.value_size, width)


def _attention(cfg: ModelConfig, path: LeafPath, at: str) -> Iterator[Leaf]:
    width, q_size, kv_size = cfg.hidden_size, cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim

    def q_and_gate(leaf: np.ndarray, tensor: np.ndarray) -> Pairs:
        # The tensor holds, head by head, the query and then its output gate; the leaf all queries, then all gates.
        mine = leaf[:, : 2 * q_size].reshape(width, 2, cfg.q_heads, cfg.head_dim)
        return [(mine, tensor.reshape(cfg.q_heads, 2, cfg.head_dim, width).transpose(3, 1, 0, 2))]

    parts = (
        Part(f"{at}q_proj.weight", (2 * q_size, width), q_and_gate),
        _columns(f"{at}k_proj.weight", width, 2 * q_size, 2 * q_size + kv_size),
        _columns(f"{at}v_proj.weight", width, 2 * q_size + kv_size, 2 * (q_size + kv_size)),
    )
    yield Leaf((*path, "qkv_proj"), (width, 2 * (q_size + kv_size)), parts)
    yield _same((*path, "q_norm"), f"{at}q_norm.weight", cfg.head_dim)
    yield _same((*path, "k_norm"), f"{at}k_norm.weight", cfg.head_dim)
    yield _linear((*path, "o_proj"), f"{at}o_proj.weight", q_size, width)


def _swiglu(path: LeafPath, keys: tuple[str, str], at: str, size: int, width: int) -> Iterator[Leaf]:
    gate, up = _columns(f"{at}gate_proj.weight", width, 0, size), _columns(f"{at}up_proj.weight", width, size, 2 * size)
    yield Leaf((*path, keys[0]), (width, 2 * size), (gate, up))
    yield _linear((*path, keys[1]), f"{at}down_proj.weight", size, width)


def _moe(cfg: ModelConfig, path: LeafPath, at: str, fused: bool) -> Iterator[Leaf]:
    moe, width = cfg.moe, cfg.hidden_size
    assert moe is not None
    count, size = moe.num_experts, moe.expert_size
    if fused:
        swapped = lambda leaf, tensor: [(leaf, tensor.swapaxes(1, 2))]
        gate_up = [Part(f"{at}experts.gate_up_proj", (count, 2 * size, width), swapped)]
        down = [Part(f"{at}experts.down_proj", (count, width, size), swapped)]
    else:
        gate_up = [
            _columns(f"{at}experts.{e}.{name}_proj.weight", width, first, first + size, expert=e)
            for e in range(count)
            for name, first in (("gate", 0), ("up", size))
        ]
        down = [_columns(f"{at}experts.{e}.down_proj.weight", size, 0, width, expert=e) for e in range(count)]
    yield _linear((*path, "router"), f"{at}gate.weight", width, count)
    yield Leaf((*path, "gate_up"), (count, width, 2 * size), tuple(gate_up))
    yield Leaf((*path, "down"), (count, size, width), tuple(down))
    yield from _swiglu(path, ("shared_gate_up", "shared_down"), f"{at}shared_expert.", moe.shared_size, width)
    gate = Part(f"{at}shared_expert_gate.weight", (1, width), lambda leaf, tensor: [(leaf, tensor[0])])
    yield Leaf((*path, "shared_gate"), (width,), (gate,))


def _same(path: LeafPath, name: str, *shape: int) -> Leaf:
    return Leaf(path, shape, (Part(name, shape, lambda leaf, tensor: [(leaf, tensor)]),), swapped=False)


def _linear(path: LeafPath, name: str, inputs: int, outputs: int) -> Leaf:
    return Leaf(path, (inputs, outputs), (_columns(name, inputs, 0, outputs),))


def _columns(name: str, inputs: int, first: int, last: int, expert: int | None = None) -> Part:
    """A linear layer that is the columns `first` to `last` of the leaf, or of its matrix for one expert."""

    def pairs(leaf: np.ndarray, tensor: np.ndarray) -> Pairs:
        return [((leaf if expert is None else leaf[expert])[:, first:last], tensor.T)]

    return Part(name, (last - first, inputs), pairs)


def _by_group(name: str, groups: int, inputs: int, columns: tuple[tuple[int, int], ...]) -> Part:
    """Several column ranges of the leaf in one tensor, whose rows are grouped: each group has its share of each."""
    shares = [(last - first) // groups for first, last in columns]

    def pairs(leaf: np.ndarray, tensor: np.ndarray) -> Pairs:
        rows = tensor.reshape(groups, sum(shares), inputs)
        found, at = [], 0
        for (first, last), share in zip(columns, shares, strict=True):
            mine = leaf[:, first:last].reshape(inputs, groups, share)
            found.append((mine, rows[:, at : at + share].transpose(2, 0, 1)))
            at += share
        return found

    return Part(name, (groups * sum(shares), inputs), pairs)
