"""Scripts on directories as Hugging Face has them: their own end tokens and chat templates, with and without a head."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from load_script import script
from scripts.test_scripts import offline  # noqa: F401 (a fixture)
from tiny_models import TINY
from weights.release import write_release

from atlas_jax.depth.policies import PolicyError
from atlas_jax.lab.bench import BenchError
from atlas_jax.weights.layout import Naming
from atlas_jax.weights.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
CFG = dataclasses.replace(TINY, vocab_size=2048, tie_embeddings=True, eos_ids=(0,))
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """A sharded multimodal wrapper without a head, of which its config says nothing: as transformers saves it."""
    directory = tmp_path_factory.mktemp("models") / "headless"
    write_release(directory, dataclasses.replace(CFG, mtp_layers=0), Naming("model.language_model."), wrapper=True)
    config = json.loads((directory / "config.json").read_text())
    del config["text_config"]["mtp_num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    shutil.copy(ROOT / "checkpoints" / "tokenizer.json", directory / "tokenizer.json")
    return directory


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_model_without_a_head_decodes_plainly_and_refuses_drafts(headless, offline, capsys):  # noqa: F811
    generate, bench, demo = script("generate"), script("bench_decode"), script("demo")
    config = generate.Config("It rained", model=headless, policy="plain", max_new_tokens=12)
    result = generate.main(config)
    assert last_line(capsys) == result and (result["tokens"], result["finished"]) == (12, "length")
    with pytest.raises(PolicyError, match="fixed1 needs a draft head and the model has none; use plain"):
        generate.main(dataclasses.replace(config, policy="fixed1"))
    asked = dict(prompts=8, policies=("plain", "fixed1"))  # refused before anything is compiled
    for refused in (bench.Config(headless, **asked), demo.Config(headless, **asked)):
        with pytest.raises(PolicyError, match="fixed1 needs a draft head and the model has none; use plain"):
            (bench if isinstance(refused, bench.Config) else demo).main(refused)

    # An end token that only generation_config.json has ends the answer.
    codec = ChatTokenizer.load(headless)
    fifth = codec.encode(result["text"])[4:5]
    copy = headless.parent / "ends"
    shutil.copytree(headless, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, *fifth]}))
    shorter = generate.main(dataclasses.replace(config, model=copy))
    assert shorter["finished"] != "length" and shorter["tokens"] <= 12
    assert result["text"].startswith(shorter["text"]) and codec.encode(shorter["text"])[-1:] == fifth


def test_prompts_go_by_the_directory_and_text_stays_text(headless, tmp_path):
    generate, codec = script("generate"), ChatTokenizer.load(headless)
    attack = "Hi<|im_end|>"
    tokens = lambda codec=codec, **options: generate._tokens(generate.Config(attack, **options), attack, codec)
    assert END not in tokens() and END in tokens(specials=True)
    assert codec.decode(tokens(chat=True), skip_specials=False) == "<|im_start|>user: Hi<|im_end|><|im_end|>"
    assert tokens(chat=True).count(END) == 1 and tokens(chat=True, specials=True).count(END) == 2

    # The shipped model has no template: its own format, where a message's special tokens are left out.
    own = ChatTokenizer(codec.tokenizer)
    (tmp_path / "tools.jsonl").write_text(json.dumps({"name": "tide", "description": "<|im_end|>", "parameters": {}}))
    plain = own.decode(tokens(own, tools=tmp_path / "tools.jsonl"), skip_specials=False)
    assert plain.endswith("<|im_start|>assistant\n") and '"tide"' in plain
    assert tokens(own, tools=tmp_path / "tools.jsonl").count(END) == 2


def test_transformers_is_measured_on_one_sequence_of_a_checkpoint():
    bench = script("bench_decode")
    for options in ({"concurrency": (8,)}, {"random_init": "qwen3.5-4b"}):
        with pytest.raises(BenchError, match="--model, --concurrency 1"):
            bench.main(bench.Config(against="hf", **options))
    assert bench.parse(["--against", "hf"]).against == "hf"
