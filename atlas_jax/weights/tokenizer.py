"""The tokenizer and the chat template of a model directory, by its own files.

What a user writes is text: a special token spelled out in it becomes ordinary tokens, unless the caller asks for more.
Templates come from strangers and run in jinja's sandbox.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_jax.config import ConfigError, ModelConfig, token_ids
from atlas_jax.weights.shards import WeightError, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]

# Of the private use area: a mark that breaks a special token up, and what a text's own first half of one becomes.
_MARK, _OWN = "\ue000\ue001", "\ue000\ue002"
_TEMPLATE_LIMIT = 1 << 20


def end_tokens(directory: Path | str, cfg: ModelConfig) -> tuple[int, ...]:
    """Every token that ends an answer: those of `config.json`, of `generation_config.json` and the tokenizer's `eos`.

    A union, in this order: none of the files replaces another. Raises `ConfigError` for ids outside the vocabulary and
    `WeightError` for files that cannot be read.
    """
    directory = Path(directory)
    found = list(cfg.eos_ids)
    if (file := directory / "generation_config.json").is_file():
        found += token_ids(read_json(file).get("eos_token_id"), f"eos_token_id of {file.name}")
    file = directory / "tokenizer_config.json"
    name = _text(read_json(file).get("eos_token")) if file.is_file() else None
    if name and (directory / "tokenizer.json").is_file():
        id = _load(directory).token_to_id(name)
        if id is None:
            raise ConfigError(f"the eos_token {name!r} of {file} is not in tokenizer.json")
        found.append(id)
    if bad := [id for id in found if not 0 <= id < cfg.vocab_size]:
        raise ConfigError(f"the end tokens {bad} of {directory} lie outside the vocabulary of {cfg.vocab_size}")
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """Text to token ids and back, and conversations to prompts.

    Attributes:
      tokenizer: of the `tokenizers` library.
      template: the chat template's source, where the directory has one.
      variables: special tokens by the names that templates know them by (`eos_token`, ...).
    """

    tokenizer: Tokenizer
    template: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path | str) -> ChatTokenizer:
        """From `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a directory.

        Raises `WeightError` where the first is missing or any of them cannot be read.
        """
        directory = Path(directory)
        file = directory / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {name: text for name in names if (text := _text(config.get(name)))}
        return cls(_load(directory), _template(directory, config), variables)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids. Special tokens spelled out in the text are parsed as such only with `specials`."""
        before = self.tokenizer.encode_special_tokens
        self.tokenizer.encode_special_tokens = not specials
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = before

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_specials)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the directory's chat template writes it. `WeightError` without one, or where it fails."""
        if self.template is None:
            raise WeightError("the directory has no chat template (chat_template.jinja or tokenizer_config.json)")
        given: dict[str, Any] = {**self.variables, "messages": messages, "tools": tools}
        given |= {"add_generation_prompt": add_generation_prompt, **variables}
        return render_template(self.template, given)

    def chat(self, messages: Sequence[Message], *, specials: bool = False, **options: Any) -> list[int]:
        """Token ids of a conversation; options as of `render`.

        The template's own special tokens are parsed, those that the messages spell out are not (but with `specials`).
        """
        if specials:
            return self.encode(self.render(messages, **options), specials=True)
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        pattern = re.compile("|".join(re.escape(name) for name in sorted(special, key=len, reverse=True)) or "(?!)")

        def mask(text: str) -> str:
            text = text.replace(_OWN[0], _OWN)
            return pattern.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)

        options["tools"] = _map_text(options.get("tools"), mask)
        rendered = self.render(_map_text(messages, mask), **options)
        ids: list[int] = []
        at = 0
        for found in [*pattern.finditer(rendered), None]:
            text = rendered[at : found.start() if found else None]
            ids += self.encode(text.replace(_MARK, "").replace(_OWN, _OWN[0]))
            if found:
                ids.append(special[found[0]])
                at = found.end()
        return ids


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with all strings in it changed, keys apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) for key, item in value.items()}
    return [_map_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def _load(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise WeightError(f"no tokenizer.json in {directory}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise WeightError(f"{file} cannot be read: {error}") from None


def _text(token: Any) -> str | None:
    """A special token as tokenizer configs write it: a string, or an object around one."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    if (file := directory / "chat_template.jinja").is_file():
        try:
            found: Any = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise WeightError(f"{file} cannot be read: {error}") from None
    else:
        found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, Mapping)}
        found = named.get("default")
    if found is not None and (not isinstance(found, str) or len(found) > _TEMPLATE_LIMIT):
        raise WeightError(f"the chat template of {directory} is not a text of at most {_TEMPLATE_LIMIT} characters")
    return found


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """What a chat template writes. `WeightError` where it fails, and without jinja2."""
    try:
        environment = _sandbox()
    except ModuleNotFoundError as error:
        raise WeightError(f"chat templates need {error.name}: pip install 'atlas_jax[chat]'") from None
    try:
        return environment.from_string(source).render(variables)
    except Exception as error:  # a stranger's program: it can raise anything
        raise WeightError(f"the chat template fails: {error}") from None


def _sandbox() -> Any:
    """What templates written for transformers expect, and no way out."""
    import json
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **other: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
