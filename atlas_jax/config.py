"""What a model is: one frozen dataclass, read from a Hugging Face `config.json` or written back as one.

Axis letters used in every signature of the project:

| letter | axis | letter | axis |
|---|---|---|---|
| `N` | sequences of a batch | `D` | hidden size |
| `T` | tokens of one sequence | `Hq Hkv Dh` | attention heads, key-value heads, head dim |
| `K` | rows of one sequence in a step | `Hk Hv Dk Dv` | GDN key heads, value heads and their dims |
| `R` | flat rows of a step | `C` | GDN conv channels, `2 Hk Dk + Hv Dv` |
| `S` | slots of the state pool | `W` | conv width (taps) |
| `L` | cache length | `E I V` | experts, FFN width, vocabulary |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["gdn", "attention"]

_HF_KINDS: dict[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "attention"}
_HF_NAMES = {kind: name for name, kind in _HF_KINDS.items()}
_MODEL_TYPES = {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
}


class ConfigError(ValueError):
    """A configuration that no model of this family has; the message names the field and the way out."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: `experts_per_token` of `num_experts` SwiGLUs, plus one shared and gated SwiGLU."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a hybrid GDN language model and of its MTP head (`mtp_layers` is 0 or 1)."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_width: int = 4
    ffn_size: int = 0
    moe: MoEConfig | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    mtp_layers: int = 1
    max_positions: int = 262144
    eos_ids: tuple[int, ...] = ()
    family: Literal["qwen3_next", "qwen3_5"] = "qwen3_5"

    def __post_init__(self) -> None:
        if (self.ffn_size > 0) == (self.moe is not None):
            raise ConfigError("exactly one of ffn_size (dense) and moe must be set")
        if self.q_heads % self.kv_heads:
            raise ConfigError(f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.gdn_value_heads % self.gdn_key_heads:
            raise ConfigError(
                f"gdn_value_heads {self.gdn_value_heads} is not a multiple of gdn_key_heads {self.gdn_key_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(f"rotary_dim {self.rotary_dim} must be even and within head_dim {self.head_dim}")
        if unknown := set(self.layers) - set(_HF_NAMES):
            raise ConfigError(f"unknown layer kinds {sorted(unknown)}; known: {sorted(_HF_NAMES)}")
        if self.mtp_layers not in (0, 1):
            raise ConfigError(f"mtp_layers is {self.mtp_layers}; only one recursive MTP layer is supported")
        if bad := [i for i in self.eos_ids if not 0 <= i < self.vocab_size]:
            raise ConfigError(f"eos ids {bad} lie outside the vocabulary of {self.vocab_size}")

    @property
    def key_size(self) -> int:
        """`Hk * Dk`, the width of GDN q and of GDN k."""
        return self.gdn_key_heads * self.gdn_key_dim

    @property
    def value_size(self) -> int:
        """`Hv * Dv`, the width of GDN v, of z and of the mixer's output."""
        return self.gdn_value_heads * self.gdn_value_dim

    @property
    def conv_channels(self) -> int:
        """`C`: q, k and v of all heads pass the causal convolution together."""
        return 2 * self.key_size + self.value_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the text model of a Hugging Face config (Qwen3-Next, Qwen3.5 / 3.6 / 3.8, dense or MoE).

        A multimodal wrapper is entered through its `text_config`. Raises `ConfigError` for any other model.
        """
        text = config.get("text_config", config)
        model_type = text.get("model_type", config.get("model_type"))
        if model_type not in _MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not of this family: {sorted(_MODEL_TYPES)}")
        if text.get("output_gate_type", "swish") != "swish":
            raise ConfigError(f"output_gate_type {text['output_gate_type']!r} is not supported, only 'swish'")
        if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
            raise ConfigError("models that mix dense and MoE layers are not supported")
        try:
            return cls._from_text_config(text, config)
        except KeyError as missing:
            raise ConfigError(f"config.json lacks the field {missing}") from None

    @classmethod
    def _from_text_config(cls, text: Mapping[str, Any], wrapper: Mapping[str, Any]) -> ModelConfig:
        num_layers = text["num_hidden_layers"]
        interval = text.get("full_attention_interval", 4)
        names = text.get("layer_types") or [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)
        ]
        if len(names) != num_layers or not set(names) <= set(_HF_KINDS):
            raise ConfigError(f"layer_types must be {num_layers} names out of {sorted(_HF_KINDS)}")
        rope = text.get("rope_parameters") or text
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_type {rope['rope_type']!r} is not supported, only 'default'")
        moe = None
        if text.get("num_experts"):
            if not text.get("norm_topk_prob", True):
                raise ConfigError("norm_topk_prob false is not supported: the family always normalises")
            moe = MoEConfig(
                num_experts=text["num_experts"],
                experts_per_token=text["num_experts_per_tok"],
                expert_size=text["moe_intermediate_size"],
                shared_size=text["shared_expert_intermediate_size"],
            )
        eos = text.get("eos_token_id", wrapper.get("eos_token_id"))
        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            layers=tuple(_HF_KINDS[name] for name in names),
            q_heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            rotary_dim=int(text["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
            rope_theta=float(rope["rope_theta"]),
            gdn_key_heads=text["linear_num_key_heads"],
            gdn_value_heads=text["linear_num_value_heads"],
            gdn_key_dim=text["linear_key_head_dim"],
            gdn_value_dim=text["linear_value_head_dim"],
            conv_width=text["linear_conv_kernel_dim"],
            ffn_size=0 if moe else text["intermediate_size"],
            moe=moe,
            norm_eps=text.get("rms_norm_eps", 1e-6),
            tie_embeddings=text.get("tie_word_embeddings", wrapper.get("tie_word_embeddings", False)),
            mtp_layers=text.get("mtp_num_hidden_layers", 1),
            max_positions=text.get("max_position_embeddings", 262144),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            family="qwen3_next" if text["model_type"] == "qwen3_next" else "qwen3_5",
        )

    def to_hf(self) -> dict[str, Any]:
        """The text-model `config.json` that `from_hf` reads back to an equal config."""
        moe_suffix = "_moe" if self.moe and self.family == "qwen3_5" else ""
        ffn: dict[str, Any] = {"intermediate_size": self.ffn_size}
        if self.moe:
            ffn = {
                "num_experts": self.moe.num_experts,
                "num_experts_per_tok": self.moe.experts_per_token,
                "moe_intermediate_size": self.moe.expert_size,
                "shared_expert_intermediate_size": self.moe.shared_size,
            }
        return {
            "model_type": "qwen3_next" if self.family == "qwen3_next" else f"qwen3_5{moe_suffix}_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": len(self.layers),
            "layer_types": [_HF_NAMES[kind] for kind in self.layers],
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.gdn_key_heads,
            "linear_num_value_heads": self.gdn_value_heads,
            "linear_key_head_dim": self.gdn_key_dim,
            "linear_value_head_dim": self.gdn_value_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
            },
            "tie_word_embeddings": self.tie_embeddings,
            "mtp_num_hidden_layers": self.mtp_layers,
            "max_position_embeddings": self.max_positions,
            "eos_token_id": list(self.eos_ids) or None,
            **ffn,
        }

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read `config.json` in the directory `path`, or the file itself."""
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"no config.json at {file}")
        return cls.from_hf(json.loads(file.read_text()))
