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

# Fields that the family leaves at one value; anything else is another model.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mtp_use_dedicated_embeddings": False,
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
        if self.moe and self.moe.experts_per_token > self.moe.num_experts:
            raise ConfigError(f"{self.moe.experts_per_token} experts per token of {self.moe.num_experts} there are")
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
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config is a {type(text).__name__}, not an object")
        model_type = text.get("model_type", config.get("model_type"))
        if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not of this family: {sorted(_MODEL_TYPES)}")
        for name, only in _ONLY.items():
            if text.get(name, only) != only:
                raise ConfigError(f"{name} {text[name]!r} is not supported, only {only!r}")
        if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
            raise ConfigError("models that mix dense and MoE layers are not supported")
        return cls._from_text_config(text, config, "qwen3_next" if model_type == "qwen3_next" else "qwen3_5")

    @classmethod
    def _from_text_config(
        cls, text: Mapping[str, Any], wrapper: Mapping[str, Any], family: Literal["qwen3_next", "qwen3_5"]
    ) -> ModelConfig:
        num_layers, interval = _whole(text, "num_hidden_layers", most=4096), _whole(text, "full_attention_interval", 4)
        names = text.get("layer_types") or [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)
        ]
        if not isinstance(names, list) or len(names) != num_layers or not all(_HF_KINDS.get(str(n)) for n in names):
            raise ConfigError(f"layer_types must be {num_layers} names out of {sorted(_HF_KINDS)}")
        rope = text.get("rope_parameters") or text
        if not isinstance(rope, Mapping):
            raise ConfigError(f"rope_parameters is a {type(rope).__name__}, not an object")
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_type {rope['rope_type']!r} is not supported, only 'default'")
        moe = None
        if text.get("num_experts"):
            if not text.get("norm_topk_prob", True):
                raise ConfigError("norm_topk_prob false is not supported: the family always normalises")
            moe = MoEConfig(
                num_experts=_whole(text, "num_experts", most=2**16),
                experts_per_token=_whole(text, "num_experts_per_tok"),
                expert_size=_whole(text, "moe_intermediate_size"),
                shared_size=_whole(text, "shared_expert_intermediate_size"),
            )
        head_dim = _whole(text, "head_dim")
        tied = text.get("tie_word_embeddings", wrapper.get("tie_word_embeddings", False))
        if not isinstance(tied, bool):
            raise ConfigError(f"tie_word_embeddings is {tied!r}, not true or false")
        return cls(
            vocab_size=_whole(text, "vocab_size"),
            hidden_size=_whole(text, "hidden_size"),
            layers=tuple(_HF_KINDS[name] for name in names),
            q_heads=_whole(text, "num_attention_heads"),
            kv_heads=_whole(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * _real(rope, "partial_rotary_factor", 0.25)),
            rope_theta=_real(rope, "rope_theta"),
            gdn_key_heads=_whole(text, "linear_num_key_heads"),
            gdn_value_heads=_whole(text, "linear_num_value_heads"),
            gdn_key_dim=_whole(text, "linear_key_head_dim"),
            gdn_value_dim=_whole(text, "linear_value_head_dim"),
            conv_width=_whole(text, "linear_conv_kernel_dim"),
            ffn_size=0 if moe else _whole(text, "intermediate_size"),
            moe=moe,
            norm_eps=_real(text, "rms_norm_eps", 1e-6),
            tie_embeddings=tied,
            mtp_layers=_whole(text, "mtp_num_hidden_layers", 1, least=0),
            max_positions=_whole(text, "max_position_embeddings", 262144),
            eos_ids=token_ids(text.get("eos_token_id", wrapper.get("eos_token_id")), "eos_token_id of config.json"),
            family=family,
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
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not readable JSON: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds a JSON {type(content).__name__}, not an object")
        return cls.from_hf(content)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Token ids as configs write them: nothing, one, or a list. Raises `ConfigError` for anything else."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id) is not int for id in listed):
        raise ConfigError(f"{where} is {value!r}, not a token id or a list of them")
    return tuple(dict.fromkeys(listed))


def _whole(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = 2**31) -> int:
    value = config.get(name, default)
    if value is None:
        raise ConfigError(f"config.json lacks the field {name!r}")
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"config.json: {name} is {value!r}, not a whole number from {least} to {most}")
    return value


def _real(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if value is None:
        raise ConfigError(f"config.json lacks the field {name!r}")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: {name} is {value!r}, not a positive number")
    return float(value)
