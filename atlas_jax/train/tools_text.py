"""The *tools* regime: benchmark rows of function calls, written as chat transcripts.

A row has a question, the schemas of the functions on offer and the accepted answers. The transcript is what a
chat model with tools would read and write:

    <|im_start|>system\\n ... <tools>\\n{one schema a line}\\n</tools><|im_end|>\\n
    <|im_start|>user\\n ... <|im_end|>\\n
    <|im_start|>assistant\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n

Function names are what must not leak from training to test: a schema seen in training makes its calls easy to
guess. So rows are split by connected components of "offers the same function name".
"""

import hashlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from atlas_jax.train.corpora import CACHE, CALLS, Document, Split, fetch

CALL_FILES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
REFUSAL_FILES = ("irrelevance", "live_irrelevance")  # no function on offer fits: the answer is a sentence
MAX_SCHEMA_CHARS = 1500  # about 500 tokens: a transcript then fits a training row of 1,024 tokens whole
MAX_SAME_TOOLS = 3  # transcripts with one identical <tools> block; more would teach the block by heart
HELD_OUT_SHARE = 0.2  # of the components other than the giant one

_SPECIAL = re.compile(r"<\|[a-z_]+\|>|</?tool(?:s|_call)>")
_SCHEMA_TYPES = {
    **{"dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer"},
    **{"tuple": "array", "Array": "array", "ArrayList": "array", "String": "string", "char": "string"},
    **{"Boolean": "boolean"},
}
_REFUSALS = (
    "None of the available tools can do this: I only have {tools}.",
    "I cannot answer this with {tools}, so I make no call.",
    "That is outside what {tools} can do.",
    "There is no suitable tool for this request; on offer here: {tools}.",
    "Sorry, {tools} would not help with that.",
)


def load_tools(cache: Path = CACHE) -> Split:
    """Single-turn function calls and refusals, as transcripts; train and held-out share no function name."""
    rows: list[dict] = []
    answers: dict[str, list[dict]] = {}
    with zipfile.ZipFile(fetch(cache, (CALLS,))[CALLS.name]) as wheel:
        for name in CALL_FILES + REFUSAL_FILES:
            rows += _json_lines(wheel.read(f"bfcl_eval/data/BFCL_v4_{name}.json"))
        for name in CALL_FILES:
            lines = _json_lines(wheel.read(f"bfcl_eval/data/possible_answer/BFCL_v4_{name}.json"))
            answers |= {line["id"]: line["ground_truth"] for line in lines}
    rows = [row for row in rows if row["function"]]  # a handful offer nothing: not about tools
    train_ids, held_out_ids = split_by_function(
        {row["id"]: [f["name"] for f in row["function"]] for row in rows}
    )
    documents = {row["id"]: transcript(row, answers.get(row["id"])) for row in rows}
    return Split("tools", *(tuple(_cap(documents[row] for row in ids)) for ids in (train_ids, held_out_ids)))


def _json_lines(data: bytes) -> list[dict]:
    return [json.loads(line) for line in data.decode().split("\n") if line.strip()]


def split_by_function(names: dict[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Splits row ids into (train, held out), function names by row id, such that no name occurs on both
    sides.

    Rows that share a name, directly or through others, stay together. The largest such component trains (in
    the real data it holds nearly half of the rows); a hash of its first name decides for each other one.
    Order is kept.
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for offered in names.values():
        for name in offered:
            a, b = sorted((root(offered[0]), root(name)))
            parent[b] = (
                a  # the root is the component's first name in alphabetical order, whatever the rows' order
            )
    component = {row: root(offered[0]) for row, offered in names.items()}
    largest = max(sorted(set(component.values())), key=Counter(component.values()).__getitem__, default=None)
    held = {
        name for name in component.values() if name != largest and _hash(name) % 1000 < 1000 * HELD_OUT_SHARE
    }
    return [row for row in names if component[row] not in held], [
        row for row in names if component[row] in held
    ]


def transcript(row: dict, answer: Sequence[dict] | None) -> Document:
    """One row as a `Document`; `answer` is its list of accepted calls, None where no function fits.

    The called functions are always offered; others, in order, only while the schemas stay within
    `MAX_SCHEMA_CHARS`.
    """
    calls = None if answer is None else [_call(call) for call in answer]
    schemas = _fit(row["function"], {call["name"] for call in calls or ()})
    messages = [dict(message, content=_plain(message["content"])) for message in row["question"][0]]
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system") or "You can call functions."
    tools = "\n".join(_plain(json.dumps(schema, ensure_ascii=False)) for schema in schemas)
    if calls:
        blocks = (_plain(json.dumps(call, ensure_ascii=False)) for call in calls)
        reply = "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
    else:
        listed = ", ".join(schema["name"] for schema in schemas[:3])
        reply = _REFUSALS[_hash(messages[-1]["content"]) % len(_REFUSALS)].format(tools=listed)

    turns = [("system", f"{system}\n\n<tools>\n{tools}\n</tools>")]
    turns += [(m["role"], m["content"]) for m in messages if m["role"] != "system"] + [("assistant", reply)]
    text, replies = "", []
    for role, content in turns:
        text += f"<|im_start|>{role}\n"
        start = len(text)
        text += f"{content}<|im_end|>"
        if role == "assistant":
            replies.append((start, len(text)))
        text += "\n"
    return Document(f"{CALLS.name}/{row['id']}", text, tuple(replies))


def _fit(functions: Sequence[dict], called: set[str]) -> list[dict]:
    schemas = [
        {key: _schema(f[key]) for key in ("name", "description", "parameters") if key in f} for f in functions
    ]
    sizes = [len(json.dumps(schema, ensure_ascii=False)) for schema in schemas]
    keep = {i for i, schema in enumerate(schemas) if schema["name"] in called} or {0}
    room = MAX_SCHEMA_CHARS - sum(sizes[i] for i in keep)
    for i, size in enumerate(sizes):
        if i not in keep and size <= room:
            keep.add(i)
            room -= size
    return [schemas[i] for i in sorted(keep)]


def _schema(node):
    """A JSON schema with the usual names of types; the benchmark's own are those of three programming
    languages."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    named = {key: _schema(value) for key, value in node.items()}
    if isinstance(named.get("type"), str):
        named["type"] = _SCHEMA_TYPES.get(named["type"], named["type"])
    return named


def _call(call: dict) -> dict:
    ((name, arguments),) = call.items()
    chosen = {key: _first(values) for key, values in arguments.items()}
    return {"name": name, "arguments": {key: value for key, value in chosen.items() if value != ""}}


def _first(accepted: list):
    """The first accepted value that is not the "may be left out" mark (an empty string), else that mark.

    The members of an object, and of the objects in a list, are lists of accepted values again; deeper ones
    are literal.
    """
    value = next((value for value in accepted if value != ""), "")
    if isinstance(value, list):
        return [_members(item) for item in value]
    return _members(value)


def _members(value):
    if not isinstance(value, dict):
        return value
    chosen = {key: _first_literal(inner) for key, inner in value.items()}
    return {key: inner for key, inner in chosen.items() if inner != ""}


def _first_literal(accepted):
    if not isinstance(accepted, list):
        return accepted
    return next((value for value in accepted if value != ""), "")


def _plain(text: str) -> str:
    """Text that cannot open or close a turn: the special tokens' names are cut out of it."""
    return _SPECIAL.sub("", text).strip()


def _cap(documents: Iterable[Document]) -> Iterable[Document]:
    seen: Counter[str] = Counter()
    for document in documents:
        tools = document.text[document.text.index("<tools>") : document.text.index("</tools>")]
        seen[tools] += 1
        if seen[tools] <= MAX_SAME_TOOLS:
            yield document


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
