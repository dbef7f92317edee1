"""The key map between Hugging Face checkpoints of the family and our parameter tree, both ways.

Hugging Face stores linear weights `[out, in]` and projections apart; we store `[in, out]` and fuse those that share an
input. Qwen3-Next interleaves its GDN projections and attention gates per head group; they are sorted out here once, so
that one code path serves both layouts. NumPy only; what a tensor's dtype is on disk it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from atlas_jax.config import ModelConfig

Tensors = Mapping[str, np.ndarray]


class WeightError(ValueError):
    """Tensors that do not make the model of the config; the message names them."""


def params_from_hf(tensors: Tensors, cfg: ModelConfig, prefix: str = "model.") -> dict[str, Any]:
    """Build the parameter tree from tensors under their checkpoint names.

    `prefix` leads the trunk's names (`model.` or `model.language_model.`); `mtp.*` and `lm_head.weight` stand at the
    top. Raises `WeightError` naming each tensor that is missing, mis-shaped or left over.
    """
    used: set[str] = set()

    def take(name: str, *shape: int) -> np.ndarray:
        if name not in tensors:
            raise WeightError(f"the checkpoint lacks the tensor {name!r}")
        if tensors[name].shape != shape:
            raise WeightError(f"{name!r} has the shape {tensors[name].shape}, the config asks for {shape}")
        used.add(name)
        return tensors[name]

    params: dict[str, Any] = {
        "embed": take(f"{prefix}embed_tokens.weight", cfg.vocab_size, cfg.hidden_size),
        "layers": {
            i: _layer_from_hf(take, tensors, cfg, kind, f"{prefix}layers.{i}.") for i, kind in enumerate(cfg.layers)
        },
        "final_norm": take(f"{prefix}norm.weight", cfg.hidden_size),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = take("lm_head.weight", cfg.vocab_size, cfg.hidden_size)
    if cfg.mtp_layers:
        params["mtp"] = {
            "embed_norm": take("mtp.pre_fc_norm_embedding.weight", cfg.hidden_size),
            "hidden_norm": take("mtp.pre_fc_norm_hidden.weight", cfg.hidden_size),
            "fc": take("mtp.fc.weight", cfg.hidden_size, 2 * cfg.hidden_size).T,
            "layer": _layer_from_hf(take, tensors, cfg, "attention", "mtp.layers.0."),
            "norm": take("mtp.norm.weight", cfg.hidden_size),
        }
    if left := sorted(set(tensors) - used):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise WeightError(f"the config has no place for the tensors {shown}")
    return params


Take = Callable[..., np.ndarray]


def _layer_from_hf(take: Take, tensors: Tensors, cfg: ModelConfig, kind: str, at: str) -> dict[str, Any]:
    read = _gdn_from_hf if kind == "gdn" else _attention_from_hf
    return {
        "input_norm": take(f"{at}input_layernorm.weight", cfg.hidden_size),
        "mixer": read(take, tensors, cfg, at),
        "post_norm": take(f"{at}post_attention_layernorm.weight", cfg.hidden_size),
        "ffn": _moe_from_hf(take, tensors, cfg, f"{at}mlp.") if cfg.moe else _dense_from_hf(take, cfg, f"{at}mlp."),
    }


def _gdn_from_hf(take: Take, tensors: Tensors, cfg: ModelConfig, at: str) -> dict[str, Any]:
    at += "linear_attn."
    width, heads = cfg.hidden_size, cfg.gdn_value_heads
    if f"{at}in_proj_qkvz.weight" in tensors:
        qkvz = take(f"{at}in_proj_qkvz.weight", 2 * cfg.key_size + 2 * cfg.value_size, width)
        ba = take(f"{at}in_proj_ba.weight", 2 * heads, width)
        rows = np.concatenate([qkvz[i] for i in _next_qkvz_rows(cfg)[:3]])
        rows = np.concatenate([rows, *(ba[i] for i in _next_ba_rows(cfg)), qkvz[_next_qkvz_rows(cfg)[3]]])
    else:
        rows = np.concatenate(
            [
                take(f"{at}in_proj_qkv.weight", cfg.conv_channels, width),
                take(f"{at}in_proj_b.weight", heads, width),
                take(f"{at}in_proj_a.weight", heads, width),
                take(f"{at}in_proj_z.weight", cfg.value_size, width),
            ]
        )
    return {
        "in_proj": rows.T,
        "conv": take(f"{at}conv1d.weight", cfg.conv_channels, 1, cfg.conv_width)[:, 0].T,
        "a_log": take(f"{at}A_log", heads),
        "dt_bias": take(f"{at}dt_bias", heads),
        "norm": take(f"{at}norm.weight", cfg.gdn_value_dim),
        "out_proj": take(f"{at}out_proj.weight", width, cfg.value_size).T,
    }


def _next_qkvz_rows(cfg: ModelConfig) -> list[np.ndarray]:
    """Rows of q, k, v and z in Qwen3-Next's `in_proj_qkvz`, which groups them by key head."""
    ratio_dim = cfg.value_size // cfg.gdn_key_heads
    sizes = [cfg.gdn_key_dim, cfg.gdn_key_dim, ratio_dim, ratio_dim]
    grouped = np.arange(cfg.gdn_key_heads * sum(sizes)).reshape(cfg.gdn_key_heads, -1)
    return [part.reshape(-1) for part in np.split(grouped, np.cumsum(sizes)[:-1], axis=1)]


def _next_ba_rows(cfg: ModelConfig) -> list[np.ndarray]:
    grouped = np.arange(2 * cfg.gdn_value_heads).reshape(cfg.gdn_key_heads, 2, -1)
    return [grouped[:, 0].reshape(-1), grouped[:, 1].reshape(-1)]


def _attention_from_hf(take: Take, tensors: Tensors, cfg: ModelConfig, at: str) -> dict[str, Any]:
    at += "self_attn."
    width, kv_size = cfg.hidden_size, cfg.kv_heads * cfg.head_dim
    # q_proj holds, head by head, the query and then its output gate.
    q = take(f"{at}q_proj.weight", 2 * cfg.q_heads * cfg.head_dim, width)
    q = q.reshape(cfg.q_heads, 2, cfg.head_dim, width).swapaxes(0, 1).reshape(-1, width)
    k, v = (take(f"{at}{name}_proj.weight", kv_size, width) for name in "kv")
    return {
        "qkv_proj": np.concatenate([q, k, v]).T,
        "q_norm": take(f"{at}q_norm.weight", cfg.head_dim),
        "k_norm": take(f"{at}k_norm.weight", cfg.head_dim),
        "o_proj": take(f"{at}o_proj.weight", width, cfg.q_heads * cfg.head_dim).T,
    }


def _swiglu_from_hf(take: Take, at: str, size: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    gate, up = (take(f"{at}{name}_proj.weight", size, width) for name in ("gate", "up"))
    return np.concatenate([gate, up]).T, take(f"{at}down_proj.weight", width, size).T


def _dense_from_hf(take: Take, cfg: ModelConfig, at: str) -> dict[str, Any]:
    gate_up, down = _swiglu_from_hf(take, at, cfg.ffn_size, cfg.hidden_size)
    return {"gate_up": gate_up, "down": down}


def _moe_from_hf(take: Take, tensors: Tensors, cfg: ModelConfig, at: str) -> dict[str, Any]:
    moe, width = cfg.moe, cfg.hidden_size
    assert moe is not None
    if f"{at}experts.gate_up_proj" in tensors:  # one tensor for all experts
        gate_up = take(f"{at}experts.gate_up_proj", moe.num_experts, 2 * moe.expert_size, width).swapaxes(1, 2)
        down = take(f"{at}experts.down_proj", moe.num_experts, width, moe.expert_size).swapaxes(1, 2)
    else:
        pairs = [
            _swiglu_from_hf(take, f"{at}experts.{e}.", moe.expert_size, width) for e in range(moe.num_experts)
        ]
        gate_up, down = (np.stack(part) for part in zip(*pairs, strict=True))
    shared_gate_up, shared_down = _swiglu_from_hf(take, f"{at}shared_expert.", moe.shared_size, width)
    return {
        "router": take(f"{at}gate.weight", moe.num_experts, width).T,
        "gate_up": gate_up,
        "down": down,
        "shared_gate_up": shared_gate_up,
        "shared_down": shared_down,
        "shared_gate": take(f"{at}shared_expert_gate.weight", 1, width)[0],
    }


def params_to_hf(params: Mapping[str, Any], cfg: ModelConfig, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The tensors of `params` under their Qwen3.5 checkpoint names (fused experts); inverse of `params_from_hf`."""
    if cfg.family != "qwen3_5":
        raise WeightError("only the Qwen3.5 layout is written; Qwen3-Next's interleaved one is read only")
    out: dict[str, np.ndarray] = {
        f"{prefix}embed_tokens.weight": params["embed"],
        f"{prefix}norm.weight": params["final_norm"],
    }
    if not cfg.tie_embeddings:
        out["lm_head.weight"] = params["lm_head"]
    for i, kind in enumerate(cfg.layers):
        out |= _layer_to_hf(params["layers"][i], cfg, kind, f"{prefix}layers.{i}.")
    if cfg.mtp_layers:
        mtp = params["mtp"]
        out |= {
            "mtp.pre_fc_norm_embedding.weight": mtp["embed_norm"],
            "mtp.pre_fc_norm_hidden.weight": mtp["hidden_norm"],
            "mtp.fc.weight": mtp["fc"].T,
            "mtp.norm.weight": mtp["norm"],
            **_layer_to_hf(mtp["layer"], cfg, "attention", "mtp.layers.0."),
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in out.items()}


def _layer_to_hf(layer: Mapping[str, Any], cfg: ModelConfig, kind: str, at: str) -> dict[str, np.ndarray]:
    mixer, ffn = layer["mixer"], layer["ffn"]
    out = {
        f"{at}input_layernorm.weight": layer["input_norm"],
        f"{at}post_attention_layernorm.weight": layer["post_norm"],
    }
    if kind == "gdn":
        sizes = [cfg.conv_channels, cfg.gdn_value_heads, cfg.gdn_value_heads]
        qkv, b, a, z = np.split(np.asarray(mixer["in_proj"]).T, np.cumsum(sizes))
        out |= {
            f"{at}linear_attn.{name}": tensor
            for name, tensor in {
                "in_proj_qkv.weight": qkv,
                "in_proj_b.weight": b,
                "in_proj_a.weight": a,
                "in_proj_z.weight": z,
                "conv1d.weight": np.asarray(mixer["conv"]).T[:, None],
                "A_log": mixer["a_log"],
                "dt_bias": mixer["dt_bias"],
                "norm.weight": mixer["norm"],
                "out_proj.weight": np.asarray(mixer["out_proj"]).T,
            }.items()
        }
    else:
        q_size, kv_size = cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        q_gate, k, v = np.split(np.asarray(mixer["qkv_proj"]).T, np.cumsum([2 * q_size, kv_size]))
        q_gate = q_gate.reshape(2, cfg.q_heads, cfg.head_dim, -1).swapaxes(0, 1).reshape(2 * q_size, -1)
        out |= {
            f"{at}self_attn.{name}.weight": tensor
            for name, tensor in {
                "q_proj": q_gate,
                "k_proj": k,
                "v_proj": v,
                "q_norm": mixer["q_norm"],
                "k_norm": mixer["k_norm"],
                "o_proj": np.asarray(mixer["o_proj"]).T,
            }.items()
        }
    at += "mlp."
    if cfg.moe is None:
        return out | _swiglu_to_hf(ffn["gate_up"], ffn["down"], at)
    return out | {
        f"{at}gate.weight": np.asarray(ffn["router"]).T,
        f"{at}experts.gate_up_proj": np.asarray(ffn["gate_up"]).swapaxes(1, 2),
        f"{at}experts.down_proj": np.asarray(ffn["down"]).swapaxes(1, 2),
        f"{at}shared_expert_gate.weight": np.asarray(ffn["shared_gate"])[None],
        **_swiglu_to_hf(ffn["shared_gate_up"], ffn["shared_down"], f"{at}shared_expert."),
    }


def _swiglu_to_hf(gate_up: Any, down: Any, at: str) -> dict[str, np.ndarray]:
    gate, up = np.split(np.asarray(gate_up).T, 2)
    return {
        f"{at}gate_proj.weight": gate,
        f"{at}up_proj.weight": up,
        f"{at}down_proj.weight": np.asarray(down).T,
    }
