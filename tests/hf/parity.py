"""Live parity with transformers: models that it wrote itself, read here; models written here, read there.

Not collected by an ordinary test run, which has no transformers: `make test-hf` names this file, in an environment of
its own (scripts/setup_hf.sh). Tiny random models of the three classes, in float32, with random norms and decays, so
that a missing `1 + w` or a transposed state fails; 1, 2 and 4 value heads a key head; shards of a few tensors.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from load_script import script
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel

from atlas_jax.config import ModelConfig
from atlas_jax.decode.engine import Engine, EngineConfig, Request
from atlas_jax.depth.policies import PolicyError
from atlas_jax.lab.against_hf import measure_against_hf
from atlas_jax.model import mtp
from atlas_jax.model.state import GdnCache, init_state
from atlas_jax.model.trunk import logits, trunk
from atlas_jax.model.views import Full, Prefill
from atlas_jax.weights.checkpoint import export_model, import_model, load_model, save_model, stitch
from atlas_jax.weights.shards import INDEX, Shards, WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

SMALL = Path(__file__).resolve().parents[2] / "checkpoints" / "small"
PROMPT = 11
BOUND = 1e-4

CLASSES = {
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}
CASES = [(name, ratio, tied) for name in CLASSES for ratio, tied in ((1, False), (2, True), (4, False))]


def build(name, ratio, tied, vocab=97):
    """A random model of transformers' own."""
    config_class, model_class = CLASSES[name]
    ffn = {"intermediate_size": 48}
    if name != "qwen3_5":
        ffn = {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    if name != "qwen3_next":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = config_class(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * ratio,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        **ffn,
    )
    torch.manual_seed(ratio)
    model = model_class(config).eval()
    randomise(model)
    return model


def randomise(module):
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "A_log" in name:
                weight.uniform_(-3, 1)
            elif "dt_bias" in name:
                weight.normal_()
            elif weight.ndim > 1:  # written, not added to: a module outside their model holds memory never set
                weight.normal_(std=0.2)
            else:  # norms, about the 0 or 1 that they begin with
                weight.add_(0.3 * torch.randn_like(weight))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-r{case[1]}{'-tied' * case[2]}")
def case(request, tmp_path_factory):
    """Their model, the directory that they wrote, and what is read from it."""
    model = build(*request.param)
    directory = tmp_path_factory.mktemp("theirs") / "model"
    model.save_pretrained(directory, max_shard_size="8KB")
    return model, directory, import_model(directory, allow_missing=True)


def tokens(count=40, seed=3):
    return np.random.default_rng(seed).integers(0, 97, (2, count))


def close(mine, theirs):
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else theirs
    np.testing.assert_allclose(np.asarray(mine), theirs, atol=BOUND * max(1.0, np.abs(theirs).max()), rtol=0)


def test_the_directory_is_sharded_and_all_of_it_is_used(case):
    _, directory, imported = case
    assert len(Shards(directory).files) > 5
    assert set(imported.report.used) == set(Shards(directory))
    assert all(".mtp." in f".{name}" for name in imported.report.missing) and imported.cfg.mtp_layers == 0
    with pytest.raises(WeightError, match=r"MTP head .*--allow-missing"):
        load_model(directory)


def test_logits(case):
    model, _, imported = case
    ids = tokens()
    theirs = model(torch.from_numpy(ids)).logits

    @jax.jit
    def score(params, ids):
        view = Full(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
        return logits(params, trunk(params, imported.cfg, ids, view)[0])

    close(score(imported.params, ids), theirs)


def test_states_after_a_prompt(case):
    model, _, imported = case
    cfg, ids = imported.cfg, tokens(PROMPT)
    theirs = model(torch.from_numpy(ids), use_cache=True).past_key_values.layers
    state = init_state(cfg, slots=2, length=32, max_drafts=0, dtype=jnp.dtype(jnp.float32), head=False)

    @jax.jit
    def prefill(params, ids, layers):
        view = Prefill(jnp.arange(2), jnp.zeros(2, int), jnp.full(2, PROMPT), 16)
        return trunk(params, cfg, jnp.pad(ids, ((0, 0), (0, 16 - PROMPT))), view, layers)[1]

    for cache, other in zip(prefill(imported.params, ids, state.layers), theirs, strict=True):
        if isinstance(cache, GdnCache):
            close(cache.state, other.recurrent_states[0])
            window = cache.window[:, : cfg.conv_width - 1, : cfg.conv_channels]
            close(window.swapaxes(1, 2), other.conv_states[0][..., 1:])
        else:
            close(cache.kv[:, 0, :, :PROMPT], other.keys)
            close(cache.kv[:, 1, :, :PROMPT], other.values)


def test_64_greedy_tokens(case):
    model, _, imported = case
    prompt = tokens(PROMPT)[:1]
    theirs = model.generate(torch.from_numpy(prompt), max_new_tokens=64, do_sample=False, pad_token_id=0)
    engine = Engine(imported.params, imported.cfg, EngineConfig(slots=1, context=128, max_drafts=0, prefill=(16,)))
    (mine,) = engine.generate([Request(prompt[0].tolist(), 64, ignore_eos=True)])
    assert list(mine.tokens) == theirs[0, PROMPT:].tolist()
    assert len(set(mine.tokens)) > 8  # no loop that any model falls into


def test_an_export_is_what_they_wrote_and_loads_there_unchanged(case, tmp_path):
    model, directory, imported = case
    export_model(directory, tmp_path / "ours", imported.params, imported.cfg)
    ours, theirs = Shards(tmp_path / "ours"), Shards(directory)
    assert ours.files == theirs.files and ours.entries.keys() == theirs.entries.keys()
    for name, entry in ours.entries.items():
        assert (entry.shard, entry.dtype, entry.shape) == dataclasses.astuple(theirs.entries[name])[:3]
        np.testing.assert_array_equal(ours[name], theirs[name])
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_release_layout_of_our_own_loads_there(case, tmp_path):
    model, _, imported = case
    save_model(tmp_path / "ours", imported.params, imported.cfg, np.float32)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_the_head_is_their_generic_mtp_module(case, tmp_path):
    """Two drafts deep, teacher forced; the head comes in a shard of its own, and its norms don't touch the trunk's."""
    model, directory, imported = case
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    torch.manual_seed(5)
    theirs = MtpModel(model, 1).eval()
    randomise(theirs.layers)
    whole = tmp_path / "whole"
    shutil.copytree(directory, whole)
    add_head(whole, theirs.layers[0])
    cfg, params = load_model(whole)
    without_head = {key: leaf for key, leaf in params.items() if key != "mtp"}
    jax.tree.map(np.testing.assert_array_equal, without_head, imported.params)  # the very same trunk

    ids = tokens(20)
    hidden = model.model(torch.from_numpy(ids)).last_hidden_state
    positions = torch.arange(17)[None].expand(2, -1)
    view = Full(jnp.asarray(positions.numpy()))
    head = jax.jit(lambda params, tokens, hidden: mtp.head(params, cfg, tokens, hidden, view)[0])
    theirs_in, mine_in = hidden[:, :17], jnp.asarray(hidden[:, :17].detach().numpy())
    for depth in (1, 2):
        nxt = ids[:, depth : depth + 17]
        theirs_in = theirs.forward_layer(0, theirs_in, positions, None, input_ids=torch.from_numpy(nxt))
        mine_in = head(params, nxt, mine_in)
        close(mine_in, theirs_in)
        close(logits(params, mine_in), theirs._project_to_logits(theirs_in))

    changed = {**params, "mtp": jax.tree.map(lambda leaf: leaf + 1, params["mtp"])}
    export_model(whole, tmp_path / "head", changed, cfg, head_only=True)
    stitch(whole, tmp_path / "head", tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "new")[1], changed)
    again = type(model).from_pretrained(tmp_path / "new")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def add_head(directory, layer):
    renamed = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    tensors = {}
    for name, tensor in layer.state_dict().items():
        first, _, rest = name.partition(".")
        place = f"mtp.layers.0.{rest}" if first == "mtp_block" else f"mtp.{renamed[first]}.{rest}"
        tensors[place] = tensor.numpy().copy()
    save_file(tensors, directory / "model-mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    (directory / INDEX).write_text(json.dumps(index))


def test_the_shipped_model_loads_there_and_scores_the_same():
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    cfg, params = load_model(SMALL)
    text = ChatTokenizer.load(SMALL).encode("It is a truth universally acknowledged, that a single man in possession")
    ids = np.asarray([text])
    view = Full(jnp.arange(len(text))[None])
    mine = jax.jit(lambda params, ids: logits(params, trunk(params, cfg, ids, view)[0]))(params, ids)
    close(mine, model(torch.from_numpy(ids)).logits)
    stored = load_file(SMALL / "model.safetensors")
    assert ModelConfig.load(SMALL).mtp_layers == 1 and "mtp.fc.weight" in stored


def test_decoding_is_measured_beside_theirs(tmp_path):
    """The same tokens on either side, and rates of what came after the first one."""
    model = build("qwen3_5", 2, True)
    model.save_pretrained(tmp_path)
    cfg, params = load_model(tmp_path, allow_missing=True)
    requests = {"prose": [Request(tokens(9)[i].tolist(), 12, ignore_eos=True) for i in range(2)]}
    (row,) = measure_against_hf(tmp_path, params, cfg, requests, [], repetitions=2, context=64)
    assert (row.policy, row.equal, row.excused, row.compared) == ("plain", True, 0, 48)
    assert row.ratio_min <= row.ratio_to_hf <= row.ratio_max and row.request_ratio_to_hf > 0
    assert row.tok_s > 0 and row.hf_tok_s > 0 and row.hf_threads >= 1


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_scripts_take_a_directory_that_they_wrote(name, tmp_path):
    """`generate --chat` on it gives their own tokens, by its template and end tokens; without a head only plainly."""
    model = build(name, 2, False, vocab=2048)
    ids = ChatTokenizer.load(SMALL).encode("Ahoy: ")

    def answer():
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()

    free = answer()
    end = next(token for i, token in enumerate(free) if i > 5 and token not in free[:i])
    model.generation_config.eos_token_id = [2047, end]
    theirs = answer()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}: {% endfor %}")
    generate = script("generate")
    config = generate.Config("Ahoy", model=tmp_path, policy="plain", max_new_tokens=24, chat=True)
    result = generate.main(config)
    assert theirs[-1] == end and result["tokens"] == len(theirs) < 24 and result["finished"] != "length"
    assert result["text"] == ChatTokenizer.load(tmp_path).decode(theirs, skip_specials=False)
    with pytest.raises(PolicyError, match="needs a draft head and the model has none"):
        generate.main(dataclasses.replace(config, policy="fixed2"))


TEMPLATE = """{%- if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}{% if loop.last %}{% continue %}{% endif %}
{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_chat_templates_render_as_there(tmp_path):
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = TEMPLATE
    mine = ChatTokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "  Où est le <b>bac</b>? "}, {"role": "system", "content": "x"}]
    tools = [{"name": "fähre", "parameters": {"type": "object"}}]
    rendered = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert mine.render(messages, tools=tools) == rendered
    assert mine.chat(messages, tools=tools) == theirs.encode(rendered, add_special_tokens=False)
