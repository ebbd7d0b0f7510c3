"""Which layer is of which kind, from a config's own keys: lists, patterns, intervals.

Published configs spell the same thing in many ways; each way is one function that answers None if its key is absent.
A pattern that nobody knows, or that does not fit the number of layers, is an error: never full attention by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.errors import ConfigError
from kvcore.geometry.keys import Keys

__all__ = ["CHUNKED", "CROSS", "FULL", "NONE", "SLIDING", "STATE", "Kinds", "all_full", "every", "kinds_of", "required"]

FULL, SLIDING, CHUNKED, STATE, CROSS, NONE = "full", "sliding", "chunked", "state", "cross", "none"

#: The words of ``layer_types`` and ``layers_block_type`` (huggingface/transformers).
WORDS = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "sliding_attention": (SLIDING,),
    "chunked_attention": (CHUNKED,),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "mamba2": (STATE,),
    "conv": (STATE,),
    "hybrid": (STATE, FULL),
    "moe": (NONE,),
    "mlp": (NONE,),
}
#: The letters of ``hybrid_override_pattern`` (Nemotron-H) and of string patterns (EXAONE 4).
LETTERS = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}
WINDOW_LETTERS = {"L": SLIDING, "G": FULL}

Kinds = list[tuple[str, ...]]


def kinds_of(keys: Keys, count: int, default: Callable[[Keys, int], Kinds]) -> Kinds:
    """The kinds of each of ``count`` layers; ``default`` is the family's, for configs without any of the keys.

    A layer has several kinds if it keeps several things (Falcon-H1: a state and keys beside it).
    """
    for way in (
        _words,
        _override_pattern,
        _attention_types,
        _hybrid_pattern,
        _listed,
        _crossed,
        _interval,
        _window_pattern,
    ):
        kinds = way(keys, count)
        if kinds is not None:
            return kinds
    return default(keys, count)


def all_full(keys: Keys, count: int) -> Kinds:
    """Full attention everywhere, or a window everywhere if the config has one and uses it."""
    if "sliding_window" not in keys or not keys.flag("use_sliding_window", default=True):
        return [(FULL,)] * count
    first = keys.optional_integer("max_window_layers", low=0) if "use_sliding_window" in keys else 0
    # Qwen2 and 3: the first max_window_layers are full (configuration_qwen2.py).
    return [(SLIDING,) if index >= (first or 0) else (FULL,) for index in range(count)]


def every(interval: int, rest: str, *, at: int | None = None) -> Callable[[Keys, int], Kinds]:
    """Full attention in layer ``at`` of each ``interval`` (the last, if None), ``rest`` in the others."""
    position = interval - 1 if at is None else at
    return lambda _, count: [(FULL,) if index % interval == position else (rest,) for index in range(count)]


def required(*names: str) -> Callable[[Keys, int], Kinds]:
    """For families whose kinds are told by a key alone: without it nothing is assumed."""

    def missing(keys: Keys, _: int) -> Kinds:
        raise keys.missing(*names)

    return missing


def _words(keys: Keys, count: int) -> Kinds | None:
    for name in ("layer_types", "layers_block_type"):
        if name in keys:
            return [_word(keys, name, word) for word in _list(keys, name, count)]
    return None


def _word(keys: Keys, name: str, word: object) -> tuple[str, ...]:
    if not isinstance(word, str) or word not in WORDS:
        raise unknown_kind(keys, name, word, WORDS)
    return WORDS[word]


def _override_pattern(keys: Keys, count: int) -> Kinds | None:
    name = "hybrid_override_pattern"
    if name not in keys:
        return None
    return [(_letter(keys, name, letter, LETTERS),) for letter in _letters(keys, name, count)]


def _attention_types(keys: Keys, count: int) -> Kinds | None:
    """MiniMax: 1 is softmax attention, 0 linear."""
    name = "attn_type_list"
    return _numbers(keys, name, count, {0: STATE, 1: FULL}) if name in keys else None


def _hybrid_pattern(keys: Keys, count: int) -> Kinds | None:
    """MiMo-V2: 1 is a sliding window, 0 full attention."""
    name = "hybrid_layer_pattern"
    return _numbers(keys, name, count, {0: FULL, 1: SLIDING}) if name in keys else None


def _listed(keys: Keys, count: int) -> Kinds | None:
    """The layers with full attention by their numbers, from 0; in Kimi-Linear from 1."""
    if "linear_attn_config" in keys:
        inner = keys.inner("linear_attn_config")
        return _full_at(inner, "full_attn_layers", count, first=1)
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if name in keys:
            return _full_at(keys, name, count, first=0)
    return None


def _crossed(keys: Keys, count: int) -> Kinds | None:
    """The layers that attend to an encoder and to nothing else, by their numbers (Llama 3.2 vision)."""
    name = "cross_attention_layers"
    if name not in keys:
        return None
    return [(FULL,) if kinds != (FULL,) else (CROSS,) for kinds in _full_at(keys, name, count, first=0)]


def _interval(keys: Keys, count: int) -> Kinds | None:
    """One of so many layers has full attention, the others a state: the last (Qwen3-Next), or at an offset (Jamba)."""
    interval = keys.optional_integer("full_attention_interval")
    if interval is not None:
        return every(interval, STATE)(keys, count)
    period = keys.optional_integer("attn_layer_period")
    if period is None:
        return None
    return every(period, STATE, at=keys.integer("attn_layer_offset", low=0, high=period - 1))(keys, count)


def _window_pattern(keys: Keys, count: int) -> Kinds | None:
    """Of each so many layers the last is full (Gemma 3, Cohere 2), or a string of letters that repeats (EXAONE 4)."""
    name = "sliding_window_pattern"
    if name not in keys or "sliding_window" not in keys:
        return None
    if isinstance(keys.raw(name), str):
        letters = str(keys.raw(name))
        kinds = [_letter(keys, name, letter, WINDOW_LETTERS) for letter in letters]
        # The last layer is full whatever the pattern says (configuration_exaone4.py).
        return [(kinds[index % len(kinds)] if index < count - 1 else FULL,) for index in range(count)]
    return every(keys.integer(name), SLIDING)(keys, count)


def _list(keys: Keys, name: str, count: int) -> Sequence[object]:
    values = keys.raw(name)
    if not isinstance(values, list):
        raise keys.wrong(name, values, "a list with an entry for each layer")
    if len(values) != count:
        raise keys.contradiction(
            f"{name} does not fit the number of layers", got=f"{len(values)} entries", expected=f"{count} layers"
        )
    return values


def _letters(keys: Keys, name: str, count: int) -> str:
    letters = keys.raw(name)
    if not isinstance(letters, str):
        raise keys.wrong(name, letters, "a text with a letter for each layer")
    if len(letters) != count:
        raise keys.contradiction(
            f"{name} does not fit the number of layers", got=f"{len(letters)} letters", expected=f"{count} layers"
        )
    return letters


def _letter(keys: Keys, name: str, letter: str, known: dict[str, str]) -> str:
    if letter not in known:
        raise unknown_kind(keys, name, letter, known)
    return known[letter]


def _numbers(keys: Keys, name: str, count: int, known: dict[int, str]) -> Kinds:
    values = _list(keys, name, count)
    kinds: Kinds = []
    for value in values:
        if type(value) is not int or value not in known:
            raise unknown_kind(keys, name, value, known)
        kinds.append((known[value],))
    return kinds


def _full_at(keys: Keys, name: str, count: int, *, first: int) -> Kinds:
    values = keys.raw(name)
    if not isinstance(values, list) or not all(type(v) is int and first <= v < count + first for v in values):
        raise keys.wrong(name, values, f"numbers of layers from {first} to {count + first - 1}")
    full = {value - first for value in values}
    return [(FULL,) if index in full else (STATE,) for index in range(count)]


def unknown_kind(keys: Keys, name: str, got: object, known: object) -> ConfigError:
    """The error for a kind of layer that nobody knows."""
    return ConfigError(
        "unknown kind of layer",
        code="KV-CFG-023",
        where=f"{keys.where}: {keys.prefix}{name}",
        got=repr(got)[:80],
        expected=", ".join(str(word) for word in known) if isinstance(known, dict) else str(known),
        hint="kvcore does not take an unknown layer for full attention",
    )
