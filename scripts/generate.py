"""Continues a text, streamed, and can show which tokens were drafted.

    python scripts/generate.py --prompt "It rained upon the Tuesday, and" --show-drafts
    python scripts/generate.py --chat --tools tools.jsonl --prompt "Which ferries go on Friday?"
    echo "SCENE II. A wood" | python scripts/generate.py --file -
    python scripts/generate.py --model path/to/model --chat --prompt "Hello" --policy fixed2
    python scripts/generate.py --model path/to/model --prompt "Hello" --mesh tensor=2    # on two GPUs

Any directory as Hugging Face has them; `--chat` goes by its own template where it has one. A special token spelled out
in the text is text (but with `--specials`). Ctrl-C ends the answer early. The last line is JSON. Of several processes,
started with the same flags but for `--process-id`, the first alone prints.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_jax import devices
from atlas_jax.config import ConfigError
from atlas_jax.decode.config import EngineConfig
from atlas_jax.decode.engine import Engine
from atlas_jax.decode.requests import Request, RequestError
from atlas_jax.decode.sampling import Sampling
from atlas_jax.depth.policies import PolicyError, parse_policy
from atlas_jax.devices import Devices, ProcessError
from atlas_jax.lab.advice import advise
from atlas_jax.lab.cost import CostError
from atlas_jax.lab.prompts import TextStream, chat
from atlas_jax.lab.trace import TraceError
from atlas_jax.sharding import MeshError
from atlas_jax.weights.checkpoint import load_model
from atlas_jax.weights.shards import WeightError
from atlas_jax.weights.tokenizer import ChatTokenizer

LEGEND = {"accepted draft": "green", "rejected draft": "red strike", "the model's own": "yellow"}


@dataclass(frozen=True)
class Config:
    """What to continue, and how. Exactly one of `prompt` and `file` is given."""

    prompt: str | None = None
    file: Path | None = None  # `-` reads the standard input
    model: Path = Path(__file__).resolve().parents[1] / "checkpoints" / "deep"
    policy: str = "ladder"  # plain, fixed1, fixed2, ..., ladder, adaptive_rung, dcut, survival, auto
    costs: str | None = None  # a table of scripts/measure_cost.py, for policies that weigh costs (survival, auto)
    acceptance: str | None = None  # p1,p2_cond,... or a trace, for auto; survival begins with it
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of the sampling noise
    chat: bool = False  # the text is a user's turn, and the assistant answers
    tools: Path | None = None  # one JSON schema a line; implies `chat`
    specials: bool = False  # parse special tokens that the text spells out
    show_drafts: bool = False  # colour accepted drafts, strike rejected ones through in place
    devices: Devices = Devices()


def main(config: Config) -> dict[str, Any]:
    """Streams the answer to stdout, then a summary and a last line of JSON; returns what that line holds."""
    from rich.console import Console

    mesh = config.devices.join()
    console = Console(force_terminal=config.show_drafts or None, quiet=not devices.first())
    devices.begin(mesh, lambda text: print(text, file=sys.stderr))
    text = _text(config)
    codec = ChatTokenizer.load(config.model)
    tokenizer, prompt = codec.tokenizer, _tokens(config, text, codec)
    devices.agree("prompt", prompt)
    cfg, params = load_model(config.model, allow_missing="head")
    request = Request(prompt, config.max_new_tokens, Sampling(config.temperature, seed=config.seed))
    end = len(request.prompt) + config.max_new_tokens
    advice = advise(config.costs, config.acceptance, cfg, (1,), context=len(request.prompt), longest=end)
    policy = parse_policy(config.policy, advice=advice)
    context = -(-(end + 1) // 128) * 128
    widths = tuple(width for width in EngineConfig.prefill if width < len(request.prompt)) or EngineConfig.prefill[:1]
    sizes = EngineConfig(slots=1, context=context, max_drafts=policy.max_drafts, prefill=widths, mesh=mesh)
    engine = Engine(params, cfg, sizes, policy)
    engine.check(request)  # before the compilation
    compile_s = engine.warmup()

    def show(text: str, style: str = "") -> None:
        console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    if config.show_drafts:
        for label, style in LEGEND.items():
            show(label, style)
            show("   ")
        show("\n\n")
    if not config.chat and config.tools is None:
        show(text, "dim")
    accepted_style, rejected_style, own_style = LEGEND.values() if config.show_drafts else ("", "", "")
    stream, emitted, finished = TextStream(tokenizer), [], "interrupted"
    try:
        for emission in engine.stream([request]):
            *accepted, last = emission.tokens
            emitted += emission.tokens
            rejected = emission.drafts[len(accepted) :]
            if rejected[:1] == (last,):  # right, but the answer ends here
                rejected = ()
            show("".join(map(stream.feed, accepted)), accepted_style)
            if config.show_drafts:
                show(_readable(tokenizer, rejected), rejected_style)
            show(stream.feed(last), own_style)
            finished = emission.finished or finished
    except KeyboardInterrupt:
        pass
    show(stream.close() + "\n")

    acceptance, seconds = engine.telemetry.total(), engine.telemetry.decode_s
    result = {
        "policy": policy.name,
        "text": tokenizer.decode(emitted, skip_special_tokens=False),
        "tokens": len(emitted),
        "steps": acceptance.steps,
        "tok_step": round(len(emitted) / acceptance.steps, 4) if acceptance.steps else None,
        "tok_s": round(len(emitted) / seconds, 1) if seconds else None,  # decode steps, prefill apart
        "finished": finished,
        "compile_s": round(compile_s, 1),
        "kernels": engine.kernels.describe(),
        "mesh": str(mesh),
    }
    rates = f"{result['tok_step'] or 0:.2f} tokens a step, {result['tok_s'] or 0:,.0f} tok/s"
    show(f"\n{policy.name}: {len(emitted)} tokens in {acceptance.steps} steps, {rates} ({finished})\n", "bold")
    if devices.first():
        print(json.dumps(result), flush=True)
    return result


def _text(config: Config) -> str:
    if (config.prompt is None) == (config.file is None):
        raise SystemExit("give exactly one of --prompt and --file")
    if config.prompt is not None:
        return config.prompt
    if str(config.file) == "-" and config.devices.coordinator is not None:
        raise SystemExit("--file - is the input of one process, and all of them need the text: name a file")
    return sys.stdin.read() if str(config.file) == "-" else config.file.read_text()


def _tokens(config: Config, text: str, codec: ChatTokenizer) -> list[int]:
    """The prompt: the text itself, or as a user's turn in the model's own format."""
    if not config.chat and config.tools is None:
        return codec.encode(text, specials=config.specials)
    lines = config.tools.read_text().splitlines() if config.tools else []
    tools = [json.loads(line) for line in lines if line.strip()]
    if codec.template is not None:
        return codec.chat([{"role": "user", "content": text}], tools=tools or None, specials=config.specials)
    return codec.encode(chat(text, tools), specials=True)  # `chat` lets no special token of the text through


def _readable(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    """Rejected drafts as text on one line; halves of characters are left out."""
    stream = TextStream(tokenizer)
    text = "".join(map(stream.feed, tokens)) + stream.close()
    return text.replace("\ufffd", "").replace("\n", "\u23ce")


if __name__ == "__main__":
    import tyro

    wrong = (ConfigError, CostError, MeshError, PolicyError, ProcessError, RequestError, TraceError, WeightError)
    with devices.ending(*wrong):
        main(tyro.cli(tyro.conf.OmitArgPrefixes[Config], description=__doc__))
