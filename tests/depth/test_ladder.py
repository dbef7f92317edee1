"""The ladder's grammar, lookup and switches, against the semantics of the engine it takes them from."""

import random
import re
import sys
import warnings
from dataclasses import FrozenInstanceError, replace

import pytest

from atlas_jax.depth import LadderConfig, describe_bad_part, format_ladder, parse_ladder
from atlas_jax.depth.ladder import DEFAULT_STEPS

LADDER = "ATLAS_MTP_K_LADDER"
NO_LADDER = "ATLAS_NO_MTP_K_LADDER"
MAX_SEQS = "ATLAS_MTP_MAX_SEQS"
STATIC_RUNG = "ATLAS_MTP_STATIC_RUNG"
U64_MAX = 2**64 - 1


def quiet(environ: dict[str, str]) -> LadderConfig:
    """`from_env`, where any warning fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return LadderConfig.from_env(environ)


def loud(environ: dict[str, str], *said: str) -> LadderConfig:
    """`from_env`, where exactly one warning must come, point at this file and contain all of `said`."""
    with pytest.warns(UserWarning) as caught:
        config = LadderConfig.from_env(environ)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for text in said:
        assert text in str(caught[0].message)
    return config


# ---- grammar


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        pytest.param("4:3", ((4, 3),), id="one step"),
        pytest.param("4:3,8:2", ((4, 3), (8, 2)), id="two steps"),
        pytest.param("32:2, 4:3,8:3, 16:2,24:2", ((4, 3), (8, 3), (16, 2), (24, 2), (32, 2)), id="sorted"),
        pytest.param(" 4 : 3 ", ((4, 3),), id="both halves are trimmed"),
        pytest.param("\t4\n:\u30003\xa0", ((4, 3),), id="trimmed of Unicode white space"),
        pytest.param("\x854:3\u2029", ((4, 3),), id="NEL and paragraph separator are white space"),
        pytest.param("+4:+3", ((4, 3),), id="a plus sign is taken"),
        pytest.param("004:0003", ((4, 3),), id="leading zeros are taken"),
        pytest.param("0" * 5000 + "4:3", ((4, 3),), id="beyond Python's digit limit too"),
        pytest.param("0:0", ((0, 0),), id="zeros parse"),
        pytest.param(f"{U64_MAX}:{U64_MAX}", ((U64_MAX, U64_MAX),), id="largest integer"),
        pytest.param("4:1,8:3", ((4, 1), (8, 3)), id="drafts may grow"),
        pytest.param("8:2,4:3,8:1", ((4, 3), (8, 2), (8, 1)), id="duplicates stay, in written order"),
        pytest.param("8:1,4:3,8:2", ((4, 3), (8, 1), (8, 2)), id="and are not sorted by drafts"),
    ],
)
def test_wellformed(value: str, steps: tuple[tuple[int, int], ...]) -> None:
    assert parse_ladder(value) == steps
    assert describe_bad_part(value) is None


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        pytest.param("", "part 1 ('')", id="empty"),
        pytest.param(" ", "part 1 (' ')", id="blank"),
        pytest.param(",", "part 1 ('')", id="comma alone"),
        pytest.param("4:3,", "part 2 ('')", id="trailing comma"),
        pytest.param(",4:3", "part 1 ('')", id="leading comma"),
        pytest.param("4:3,,8:2", "part 2 ('')", id="double comma"),
        pytest.param("4:3,broken,8:2", "part 2 ('broken')", id="one bad part rejects the good ones"),
        pytest.param("4:3,8:x,bad", "part 2 ('8:x')", id="the first bad part is named"),
        pytest.param("4", "part 1 ('4')", id="no colon"),
        pytest.param(":", "part 1 (':')", id="colon alone"),
        pytest.param("4:", "part 1 ('4:')", id="no drafts"),
        pytest.param(":3", "part 1 (':3')", id="no n_max"),
        pytest.param("4:3:2", "part 1 ('4:3:2')", id="a second colon belongs to the number"),
        pytest.param("4::3", "part 1 ('4::3')", id="double colon"),
        pytest.param("4;3", "part 1 ('4;3')", id="other separator"),
        pytest.param("-4:3", "part 1 ('-4:3')", id="negative"),
        pytest.param("-0:1", "part 1 ('-0:1')", id="minus zero"),
        pytest.param("+:1", "part 1 ('+:1')", id="sign alone"),
        pytest.param("++4:1", "part 1 ('++4:1')", id="two signs"),
        pytest.param("+ 4:1", "part 1 ('+ 4:1')", id="space after the sign"),
        pytest.param("1 6:1", "part 1 ('1 6:1')", id="space inside a number"),
        pytest.param("1_6:1", "part 1 ('1_6:1')", id="underscore"),
        pytest.param("4.0:1", "part 1 ('4.0:1')", id="fraction"),
        pytest.param("1e1:1", "part 1 ('1e1:1')", id="exponent"),
        pytest.param("0x4:1", "part 1 ('0x4:1')", id="hexadecimal"),
        pytest.param("\uff14:3", "part 1 ('\uff14:3')", id="full-width digit"),
        pytest.param("\u0664:3", "part 1 ('\u0664:3')", id="Arabic digit"),
        pytest.param("4\uff1a3", "part 1 ('4\uff1a3')", id="full-width colon"),
        pytest.param("\xb2:3", "part 1 ('\xb2:3')", id="superscript"),
        pytest.param("4:3\0", "part 1 ('4:3\\x00')", id="NUL"),
        pytest.param("\x1c4:3", "part 1 ('\\x1c4:3')", id="file separator, which only Python strips"),
        pytest.param("4:3\x1f", "part 1 ('4:3\\x1f')", id="unit separator, which only Python strips"),
        pytest.param("\u200b4:3", "part 1 ('\\u200b4:3')", id="zero-width space is no white space"),
        pytest.param("\ufeff4:3", "part 1 ('\\ufeff4:3')", id="nor is a byte-order mark"),
        pytest.param(f"{U64_MAX + 1}:1", f"part 1 ('{U64_MAX + 1}:1')", id="2^64"),
        pytest.param(f"4:{10**20}", f"part 1 ('4:{10**20}')", id="far beyond 64 bits"),
    ],
)
def test_malformed_as_a_whole(value: str, bad: str) -> None:
    assert parse_ladder(value) is None
    assert describe_bad_part(value) == bad


def test_thousands_of_digits_are_malformed_not_an_error() -> None:
    """Python's own int() raises ValueError for these; the digit limit must not leak."""
    assert parse_ladder("9" * 5000 + ":1") is None


def test_trimmed_characters_are_exactly_pythons_less_the_four_separators() -> None:
    """Python strips Unicode's White_Space plus U+001C..U+001F; the grammar strips White_Space only."""
    python = {chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()}
    trimmed = {c for c in python if parse_ladder(f"{c}4{c}:{c}3{c}") == ((4, 3),)}
    assert trimmed == python - set("\x1c\x1d\x1e\x1f")


@pytest.mark.parametrize("text", ["4:3,8:3,16:1,32:1", "0:0", "4:3,4:1"])
def test_format_gives_the_written_form_back(text: str) -> None:
    steps = parse_ladder(text)
    assert steps is not None
    assert format_ladder(steps) == text


# ---- lookup


@pytest.mark.parametrize(
    ("n_active", "drafts"),
    [(0, 3), (1, 3), (4, 3), (5, 3), (8, 3), (9, 1), (16, 1), (17, 1), (32, 1), (33, 1), (64, 1)],
)
def test_default_ladder(n_active: int, drafts: int) -> None:
    """Both sides of each edge; beyond the last step its rung goes on, as the cap is another matter."""
    assert LadderConfig().drafts(n_active, 3) == drafts


@pytest.mark.parametrize(
    ("value", "n_active", "num_drafts", "drafts"),
    [
        pytest.param("4:3,8:2", 9, 3, 2, id="the last step falls through"),
        pytest.param("32:2, 4:3,8:3, 16:2,24:2", 17, 3, 2, id="unsorted, 17"),
        pytest.param("32:2, 4:3,8:3, 16:2,24:2", 8, 3, 3, id="unsorted, 8"),
        pytest.param("4:3", 1, 1, 1, id="clamped down to num_drafts"),
        pytest.param("4:9", 1, 4, 4, id="clamped down from beyond"),
        pytest.param("4:0", 1, 3, 1, id="0 drafts are clamped up to 1"),
        pytest.param("0:0", 5, 3, 1, id="also on falling through"),
        pytest.param("0:2,4:3", 0, 3, 2, id="n_max 0 holds for no sequence"),
        pytest.param("0:2,4:3", 1, 3, 3, id="and for nothing else"),
        pytest.param("8:2,4:3,8:1", 8, 3, 2, id="the first duplicate wins"),
        pytest.param("8:1,4:3,8:2", 8, 3, 1, id="as written, not the deepest"),
        pytest.param("4:3,8:2,8:1", 9, 3, 1, id="but falling through takes the last"),
        pytest.param("4:3", 1, 0, 0, id="num_drafts 0 comes before the clamp"),
        pytest.param("4:0", 1, 0, 0, id="whatever the rung"),
    ],
)
def test_lookup(value: str, n_active: int, num_drafts: int, drafts: int) -> None:
    assert quiet({LADDER: value}).drafts(n_active, num_drafts) == drafts


def brute_drafts(value: str, n_active: int, num_drafts: int) -> int:
    """An oracle by another route: no sort, but a scan for the nearest n_max and for the furthest."""
    if num_drafts == 0:
        return 0
    pairs = [[int(x) for x in part.split(":")] for part in value.split(",")]
    reachable = [n_max for n_max, _ in pairs if n_max >= n_active]
    if reachable:
        wanted = next(d for n_max, d in pairs if n_max == min(reachable))
    else:
        wanted = [d for n_max, d in pairs if n_max == max(n for n, _ in pairs)][-1]
    return max(d for d in range(1, num_drafts + 1) if d == 1 or d <= wanted)


def test_random_ladders_agree_with_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        pairs = [(rng.randrange(12), rng.randrange(6)) for _ in range(rng.randint(1, 6))]
        value = format_ladder(tuple(pairs))
        config = quiet({LADDER: value})
        assert sorted(pairs) == sorted(config.steps)
        assert parse_ladder(format_ladder(config.steps)) == config.steps
        for n_active in range(14):
            num_drafts = rng.randrange(6)
            drafts = config.drafts(n_active, num_drafts)
            assert drafts == brute_drafts(value, n_active, num_drafts), (value, n_active, num_drafts)
            assert drafts == 0 if num_drafts == 0 else 1 <= drafts <= num_drafts


@pytest.mark.parametrize(("n_active", "num_drafts"), [(-1, 3), (1, -1)])
def test_negative_arguments_are_refused(n_active: int, num_drafts: int) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        LadderConfig().drafts(n_active, num_drafts)


# ---- the environment


def test_nothing_set() -> None:
    config = quiet({})
    assert config == LadderConfig()
    assert config.steps == DEFAULT_STEPS == ((4, 3), (8, 3), (16, 1), (32, 1))
    assert (config.enabled, config.max_seqs, config.adaptive_pinned) == (True, 32, False)


def test_only_the_mapping_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LADDER, "1:1")
    monkeypatch.setenv(NO_LADDER, "1")
    assert quiet({}) == LadderConfig()


def test_explicit_ladder_pins_adaptation() -> None:
    config = quiet({LADDER: "8:2"})
    assert config.steps == ((8, 2),)
    assert config.adaptive_pinned
    assert config.max_seqs == 32


@pytest.mark.parametrize("value", ["", "4:3,", "4:3,broken,8:2", "16:1;32:1", "\udcff"])
def test_malformed_ladder_gives_the_default_and_still_pins(value: str) -> None:
    """Never "no speculation", and presence is what pins. A byte that is no UTF-8 arrives as a surrogate."""
    config = loud({LADDER: value}, LADDER, str(describe_bad_part(value)), "4:3,8:3,16:1,32:1")
    assert config == LadderConfig(static_rung=True)
    assert config.adaptive_pinned


def test_spelling_the_default_out_differs_only_in_the_pin() -> None:
    config = quiet({LADDER: "4:3,8:3,16:1,32:1"})
    assert config == replace(LadderConfig(), static_rung=True)


@pytest.mark.parametrize("value", ["1", "yes", "true", "2"])
def test_no_ladder(value: str) -> None:
    config = quiet({NO_LADDER: value})
    assert not config.enabled
    assert [config.drafts(n, 3) for n in (1, 9, 33, 1000)] == [3, 3, 3, 3]
    assert config.drafts(1, 0) == 0
    assert config.max_seqs == 4
    assert config.adaptive_pinned


@pytest.mark.parametrize("value", ["0", "", "false", "False", "no", "OFF"])
def test_presence_variables_warn_where_the_value_looks_like_off(value: str) -> None:
    assert not loud({NO_LADDER: value}, NO_LADDER, repr(value)).enabled
    config = loud({STATIC_RUNG: value}, STATIC_RUNG, repr(value))
    assert config.adaptive_pinned
    assert config.enabled


def test_static_rung_pins_and_changes_nothing_else() -> None:
    assert quiet({STATIC_RUNG: "1"}) == LadderConfig(static_rung=True)


def test_no_ladder_beats_a_written_one() -> None:
    config = quiet({NO_LADDER: "1", LADDER: "8:1"})
    assert config.drafts(1, 3) == 3
    assert config.max_seqs == 4


def test_malformed_beside_no_ladder_says_what_is_really_used() -> None:
    config = loud({NO_LADDER: "1", LADDER: "bad"}, LADDER, "'bad'", f"no ladder, as {NO_LADDER} is set")
    assert config.drafts(9, 3) == 3


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(
    ("value", "cap"),
    [("8", 8), ("+8", 8), ("0", 0), ("1", 1), ("008", 8), ("1000", 1000), (str(U64_MAX), U64_MAX)],
)
def test_cap_as_written(value: str, cap: int, disabled: bool) -> None:
    """A written cap holds with and without a ladder."""
    assert quiet({MAX_SEQS: value} | ({NO_LADDER: "1"} if disabled else {})).max_seqs == cap


@pytest.mark.parametrize(("disabled", "default"), [(False, 32), (True, 4)])
@pytest.mark.parametrize(
    "value",
    [" 8", "8 ", "8\n", "", "-1", "-0", "eight", "8.0", "1_6", "\uff18", str(U64_MAX + 1), "9" * 5000],
)
def test_unparseable_cap_gives_the_default(value: str, disabled: bool, default: int) -> None:
    """Unlike the ladder's parts the cap isn't trimmed."""
    environ = {MAX_SEQS: value} | ({NO_LADDER: "1"} if disabled else {})
    assert loud(environ, MAX_SEQS, repr(value), f"default {default}").max_seqs == default


def test_every_bad_value_gets_its_own_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        config = LadderConfig.from_env({LADDER: "x", NO_LADDER: "0", MAX_SEQS: " 8", STATIC_RUNG: "off"})
    named = [re.match(r"\w+", str(w.message)) for w in caught]
    assert {m.group() for m in named if m} == {LADDER, NO_LADDER, MAX_SEQS, STATIC_RUNG}
    assert len(caught) == 4
    assert config == LadderConfig(enabled=False, static_rung=True)


# ---- the cap


@pytest.mark.parametrize(
    ("environ", "n_active", "drafts"),
    [
        pytest.param({}, 32, 1, id="at the cap"),
        pytest.param({}, 33, 0, id="beyond it plain decode"),
        pytest.param({MAX_SEQS: "64"}, 33, 1, id="a higher cap lets the last step go on"),
        pytest.param({MAX_SEQS: "1"}, 1, 3, id="single sequence only: 1"),
        pytest.param({MAX_SEQS: "1"}, 2, 0, id="single sequence only: 2"),
        pytest.param({MAX_SEQS: "0"}, 1, 0, id="0 never speculates"),
        pytest.param({NO_LADDER: "1"}, 4, 3, id="no ladder: at its cap"),
        pytest.param({NO_LADDER: "1"}, 5, 0, id="no ladder: beyond it"),
        pytest.param({NO_LADDER: "1", MAX_SEQS: "8"}, 8, 3, id="no ladder: a written cap"),
        pytest.param({LADDER: "64:2"}, 33, 0, id="a longer ladder doesn't raise the cap"),
    ],
)
def test_step_drafts(environ: dict[str, str], n_active: int, drafts: int) -> None:
    assert quiet(environ).step_drafts(n_active, 3) == drafts


def test_step_drafts_without_speculation() -> None:
    assert LadderConfig().step_drafts(1, 0) == 0


# ---- the config itself


def test_the_default_cap_follows_the_ladder_switch() -> None:
    """So that `replace` and direct construction mean what the environment variables mean."""
    assert LadderConfig(enabled=False).max_seqs == 4
    assert replace(LadderConfig(enabled=False), enabled=True).max_seqs == 32
    assert LadderConfig(enabled=False).adaptive_pinned


def test_it_is_frozen_and_hashable() -> None:
    config = LadderConfig()
    assert hash(config) == hash(LadderConfig())
    with pytest.raises(FrozenInstanceError):
        config.enabled = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"steps": ()}, "at least one step"),
        ({"steps": ((8, 3), (4, 1))}, "ascend"),
        ({"steps": ((4, -1),)}, "negative"),
        ({"cap": -1}, "0 or more"),
    ],
)
def test_invalid_configs_are_refused(arguments: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LadderConfig(**arguments)


def test_equal_n_max_are_ascending() -> None:
    assert LadderConfig(steps=((4, 3), (4, 1))).drafts(4, 3) == 3
