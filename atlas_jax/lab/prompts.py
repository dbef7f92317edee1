"""Between words and tokens: the prompts that decoding is measured on, chat turns, and text from streamed tokens."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_jax.decode.requests import Request
from atlas_jax.train import corpora, tokens
from atlas_jax.train.corpora import CACHE, CorpusError
from atlas_jax.train.tools_text import MAX_SCHEMA_CHARS, load_tools, transcript

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = {"prose": 128, "tools": 96}  # a call ends with <|im_end|> before that, prose goes on
MAX_PROMPT_TOKENS = 640


def requests_for(
    regime: str,
    tokenizer: Tokenizer,
    count: int,
    max_new_tokens: int | None = None,
    *,
    cache: Path = CACHE,
) -> list[Request]:
    """`count` greedy requests on held-out prompts of a regime. Raises `CorpusError` where its texts cannot be had."""
    if regime not in MAX_NEW_TOKENS:
        raise ValueError(f"unknown regime {regime!r}; there are {', '.join(MAX_NEW_TOKENS)}")
    split = corpora.load_prose(cache) if regime == "prose" else load_tools(cache)
    found = tokens.prompts(split, tokenizer, count, max_tokens=MAX_PROMPT_TOKENS)
    return [Request(prompt.ids, max_new_tokens or MAX_NEW_TOKENS[regime]) for prompt in found]


def load_requests(
    regimes: Sequence[str], tokenizer: Tokenizer, count: int, max_new_tokens: int | None = None
) -> tuple[dict[str, list[Request]], str | None]:
    """Requests by regime: held-out ones, or all from `own_prompts` if any text cannot be had; then also why not."""
    try:
        return {regime: requests_for(regime, tokenizer, count, max_new_tokens) for regime in regimes}, None
    except CorpusError as error:
        own = own_prompts(tokenizer)
        made = {
            regime: [Request(ids, max_new_tokens or MAX_NEW_TOKENS[regime]) for ids in own[regime][:count]]
            for regime in regimes
        }
        return made, str(error)


def own_prompts(tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Eight prompts a regime, token ids, in our own words: for machines that cannot fetch the held-out texts."""
    texts = {"prose": _PROSE, "tools": [chat(question, schemas) for question, schemas in _tools()]}
    return {regime: [tuple(tokenizer.encode(text).ids) for text in written] for regime, written in texts.items()}


def chat(user: str, schemas: Sequence[Mapping[str, Any]] = ()) -> str:
    """A user's turn up to where the assistant speaks, in the format the model was trained on (`tools_text`).

    Schemas are `{"name", "description", "parameters"}`, or wrapped as `{"function": {...}}`. `ValueError` for one
    without a name, or more of them than a training transcript held.
    """
    functions = [schema.get("function", schema) for schema in schemas]
    if any("name" not in function for function in functions):
        raise ValueError("every tool needs a name")
    row = {"id": "", "question": [[{"role": "user", "content": user}]], "function": functions or [{"name": ""}]}
    document = transcript(row, None)
    text = document.text[: document.replies[-1][0]]
    if not functions:
        return text[text.index("<|im_start|>user") :]
    offered = text.partition("<tools>\n")[2].partition("\n</tools>")[0].count("\n") + 1
    if offered != len(functions):
        raise ValueError(f"{len(functions)} tools take more than {MAX_SCHEMA_CHARS} characters; offer fewer")
    return text


class TextStream:
    """Text from tokens as they come: a character is given out when its last byte is there, never half of it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that `token` completes, perhaps none; bytes that can't be text become U+FFFD.

        A token that the tokenizer lacks is no text, as in its own `decode`: models are padded beyond their tokenizer.
        """
        if token in self._special:
            return self.close() + self._special[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return ""
        return self._decoder.decode(bytes(_byte_of()[char] for char in piece))

    def close(self) -> str:
        """What an unfinished character leaves: nothing, or one U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones are themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_PROSE = (  # none ends with a blank: in the vocabulary it belongs to the word that follows
    "The carriage that had been promised for nine did not come until past eleven, and by then the two sisters had "
    "talked over every house in the county, and every gentleman who might be thought to live in one.",
    "Mr. Ashdown was a man of few words and many opinions, and it was the wish of his whole family that he would "
    "keep the one as close as the other. His wife, who had long given up hoping for silence,",
    "It rained upon the Tuesday, and upon the Wednesday, and on the Thursday the river stood so high in the lower "
    "meadow that no letter could be carried across it. Anne, at her window, thought only",
    '"You are very good to call upon us," said Mrs. Harcourt, "for we see nobody at this season, and my poor '
    "brother has not left his room since the ball. I hope you found the roads",
    "GUARD\n\nWho walks there? Stand, and tell me what you are.\n\n"
    "MESSENGER\n\nA friend to this sad house, and to its lord,\nThat rode all night to bring him bitter news.\n\n"
    "GUARD\n\n",
    "DUKE\n\nThou hast my ring, my seal, and my good word;\nWhat more wouldst thou have of me ere I go?\n\n"
    "LADY\n\nMy lord, I would have nothing but thy stay,\n",
    "FIRST SERVANT\n\nThe table's laid, and yet no master comes.\n\n"
    "SECOND SERVANT\n\nHe is in love, and men in love eat not.\n\n"
    "FIRST SERVANT\n\nThen pray he love till supper, for this goose\n",
    "SCENE II. A wood near the castle.\n\n[Enter two Lords, with torches]\n\n"
    "FIRST LORD\n\nHow dark it is! I cannot see my hand,\nNor hear the hounds that led us from the path.\n\n"
    "SECOND LORD\n\n",
)


def _tools() -> list[tuple[str, list[dict[str, Any]]]]:
    """Questions with the functions on offer."""
    text, whole, real = {"type": "string"}, {"type": "integer"}, {"type": "number"}

    def tool(name: str, description: str, required: str, **properties: dict[str, str]) -> dict[str, Any]:
        described = {key: kind | {"description": key.replace("_", " ")} for key, kind in properties.items()}
        parameters = {"type": "object", "properties": described, "required": required.split()}
        return {"name": name, "description": description, "parameters": parameters}

    ferries = tool(
        "ferry_timetable",
        "Lists the ferries between two harbours on a day.",
        "origin destination",
        origin=text,
        destination=text,
        day=text,
    )
    paint = tool(
        "paint_needed",
        "Computes how many litres of paint a wall takes.",
        "width_m height_m",
        width_m=real,
        height_m=real,
        coats=whole,
    )
    room = tool(
        "book_rehearsal_room",
        "Books a rehearsal room for a choir.",
        "room date singers",
        room=text,
        date=text,
        singers=whole,
    )
    hive = tool(
        "log_hive_weight",
        "Records the weight of a bee hive.",
        "hive_id weight_kg",
        hive_id=whole,
        weight_kg=real,
        remark=text,
    )
    tide = tool("tide_height", "Tells the height of the tide at a place and hour.", "place", place=text, hour=whole)
    loan = tool(
        "library_loan_extend",
        "Extends the loan of a library book.",
        "card_number title",
        card_number=text,
        title=text,
        weeks=whole,
    )
    bread = tool(
        "scale_bread_recipe",
        "Scales a bread recipe to a number of loaves.",
        "recipe loaves",
        recipe=text,
        loaves=whole,
        hydration_percent=whole,
    )
    star = tool(
        "star_visible",
        "Tells whether a star is above the horizon.",
        "star latitude longitude",
        star=text,
        latitude=real,
        longitude=real,
    )
    return [
        ("Which ferries go from Oban to Craignure on Friday?", [ferries]),
        ("How much paint do I need for a wall that is 4.5 m wide and 2.6 m high, with two coats?", [paint, tide]),
        ("Please book the room Lindgren for our 24 singers on 2031-03-14.", [room]),
        ("Hive 7 weighs 38.4 kg today, the lid was loose.", [hive, loan]),
        ("How high is the tide at Whitby at 16 o'clock?", [ferries, tide]),
        ("Extend my loan of The Stone Raft by 3 weeks, my card is K-20417.", [loan]),
        ("I want 6 loaves of the recipe called Sunday rye at 72 percent hydration.", [bread]),
        ("Can I see Vega from latitude 59.3 and longitude 18.1 right now?", [star, hive]),
    ]
