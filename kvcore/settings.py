"""The settings of a plan: one table from which flags, variables, policy files and their help are made.

A value comes from a flag, else a ``KVCORE_*`` variable, else the policy file, else the default; it is parsed by the
same function wherever it comes from, and remembers where that was.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcore.contract.facts import Basis, Limit, LimitKind, LimitUnit, Phase, Reserve, ReserveKind, Stride
from kvcore.conventions import convention
from kvcore.errors import PolicyError
from kvcore.sizing.policy import OnShortage, Policy, ShareOf
from kvcore.units import parse_fraction, parse_size

__all__ = [
    "FILE_VARIABLE",
    "SETTINGS",
    "Resolved",
    "Setting",
    "misspelled_variables",
    "policy_of",
    "read_policy_file",
    "resolve",
]

#: A policy file has a few lines.
LARGEST_POLICY_FILE: Final = 64 * 1024
LARGEST_COUNT: Final = 2**63 - 1
#: Names the policy file, where no flag does.
FILE_VARIABLE: Final = "KVCORE_POLICY"
#: Variables that are no settings: those of the registry and of the replay platform.
OTHER_VARIABLES: Final = frozenset(
    {FILE_VARIABLE, "KVCORE_PLUGINS", "KVCORE_DISABLE_PLUGINS", "KVCORE_REPLAY", "KVCORE_REPLAY_BACKING"}
)

Parser = Callable[[str, str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``flags`` are its spellings on the command line, the first of which names it in messages."""

    name: str
    flags: tuple[str, ...]
    metavar: str
    parse: Parser
    help: str
    default: str
    many: bool = False
    switch: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"KVCORE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings that someone gave: parsed values, the texts they were parsed from, and where those came from."""

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    origins: Mapping[str, str]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of setting ``name``, or ``default`` if nobody gave one."""
        return self.values.get(name, default)


def _count(text: str, where: str) -> int:
    return _whole(text, where, 1)


def _count_or_zero(text: str, where: str) -> int:
    return _whole(text, where, 0)


def _whole(text: str, where: str, low: int) -> int:
    cleaned = text.strip().replace("_", "").replace(",", "")
    # isdigit keeps out signs, points and exponents; 19 digits keep out numbers that no count reaches.
    if not (cleaned.isascii() and cleaned.isdigit() and len(cleaned) <= 19) or not low <= int(cleaned) <= LARGEST_COUNT:
        raise PolicyError(
            "not a whole number in range",
            code="KV-POL-025",
            where=where,
            got=text[:80],
            expected=f"a whole number from {low} to 2**63 - 1",
        )
    return int(cleaned)


def _counts(text: str, where: str) -> tuple[int, ...]:
    return tuple(_count(part, where) for part in text.split(","))


def _size(text: str, where: str) -> int:
    return parse_size(text, where=where)


def _sizes(text: str, where: str) -> tuple[int, ...]:
    sizes = tuple(parse_size(part, where=where) for part in text.split(","))
    if min(sizes) == 0:
        raise PolicyError(
            "a cache of no size", code="KV-POL-024", where=where, got=text[:80], expected="at least a byte"
        )
    return sizes


def _share(text: str, where: str) -> Any:
    share = parse_fraction(text, where=where)
    if not 0 < share <= 1:
        raise PolicyError(
            "a share of memory is above 0 and at most 1",
            code="KV-POL-023",
            where=where,
            got=text[:80],
            expected="0 < utilization <= 1",
        )
    return share


def _word(text: str, where: str) -> str:
    if not text.strip():
        raise PolicyError("an empty value", code="KV-POL-027", where=where, expected="a name")
    return text.strip()


def _words(text: str, where: str) -> tuple[str, ...]:
    return tuple(_word(part, where) for part in text.split(","))


def _one_of(kind: type[Any]) -> Parser:
    def parse(text: str, where: str) -> Any:
        try:
            return kind(text.strip())
        except ValueError:
            expected = ", ".join(member.value for member in kind)
            raise PolicyError(
                "unknown choice", code="KV-POL-026", where=where, got=text[:80], expected=expected
            ) from None

    return parse


def _switch(text: str, where: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.strip().lower() not in known:
        raise PolicyError("not a switch", code="KV-POL-029", where=where, got=text[:80], expected="true or false")
    return known[text.strip().lower()]


def _reserve(text: str, where: str) -> Reserve:
    """``NAME=SIZE`` or ``NAME=SIZE:transient``."""
    name, separator, rest = text.partition("=")
    size, _, kind = rest.partition(":")
    if not separator or not name.strip() or kind not in ("", "transient", "persistent"):
        raise PolicyError(
            "not a reserve",
            code="KV-POL-041",
            where=where,
            got=text[:80],
            expected="NAME=SIZE or NAME=SIZE:transient",
        )
    transient = kind == "transient"
    return Reserve(
        name.strip(),
        parse_size(size, where=where),
        ReserveKind.TRANSIENT if transient else ReserveKind.PERSISTENT,
        Basis.DECLARED,
        where,
        "reserve asked for",
    )


def _reserves(text: str, where: str) -> tuple[Reserve, ...]:
    return tuple(_reserve(part, where) for part in text.split(","))


def _weights(text: str, where: str) -> Reserve:
    size = parse_size(text, where=where)
    reason = "the model's weights on this rank"
    return Reserve("weights", size, ReserveKind.PERSISTENT, Basis.DECLARED, where, reason, Phase.WEIGHTS)


def _activations(text: str, where: str) -> Reserve:
    size = parse_size(text, where=where)
    reason = "peak of a step's activations"
    return Reserve("activations", size, ReserveKind.TRANSIENT, Basis.DECLARED, where, reason, Phase.PROFILE)


def _index_limit(text: str, where: str) -> Limit:
    """``bits=32,signed,unit=elements,stride=layer``; the stride may be a number of units that one block adds."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    parts = {name: value for name, _, value in pairs}
    twice = len(parts) < len(pairs)
    unknown = set(parts) - {"bits", "signed", "unsigned", "unit", "stride"}
    # "signed=false" would read as unsigned and be taken as signed.
    valued = any(parts.get(name) for name in ("signed", "unsigned"))
    bits = parts.get("bits", "")
    unit = parts.get("unit", "elements")
    stride = parts.get("stride", Stride.LAYER.value)
    named = stride in {member.value for member in Stride}
    valid = bits in ("31", "32", "63", "64") and unit in ("elements", "bytes") and (named or stride.isdigit())
    if unknown or twice or valued or not valid or ("signed" in parts and "unsigned" in parts):
        raise PolicyError(
            "not an index limit",
            code="KV-POL-042",
            where=where,
            got=text[:80],
            expected="bits=32|64,signed|unsigned,unit=elements|bytes,stride=layer|layer_kv|all_layers|NUMBER",
        )
    signed = "unsigned" not in parts
    width = int(bits) - (1 if signed else 0)
    sign = "signed" if signed else "unsigned"
    return Limit(
        LimitKind.INDEX,
        LimitUnit(unit),
        2**width,
        f"a {sign} {bits}-bit index counting {unit}",
        where,
        stride=Stride(stride) if named else None,
        stride_size=None if named else _count(stride, where),
    )


def _kernels(text: str, where: str) -> tuple[Limit, ...]:
    """Names of known kernels; ``none`` alone says that the engine's default kernels do not hold."""
    from kvcore.sizing.kernels import NO_KERNEL, kernel

    names = _words(text, where)
    if names == (NO_KERNEL,):
        return ()
    return tuple(kernel(name, where).limit for name in names)


SETTINGS: Final = (
    Setting("tp", ("--tensor-parallel-size", "--tp"), "N", _count, "Tensor-parallel ranks.", "1"),
    Setting("pp", ("--pipeline-parallel-size", "--pp"), "N", _count, "Pipeline stages.", "1"),
    Setting("pp_layers", ("--pp-layers",), "N,N,...", _counts, "Layers of each pipeline stage.", "divided evenly"),
    Setting(
        "dcp", ("--decode-context-parallel-size", "--dcp"), "N", _count, "Ranks that share the tokens of a head.", "1"
    ),
    Setting("block_size", ("--block-size",), "TOKENS", _count, "Tokens per block.", "the engine's"),
    Setting("dtype", ("--dtype",), "DTYPE", _word, "Dtype of the model.", "the config's"),
    Setting("kv_cache_dtype", ("--kv-cache-dtype",), "DTYPE", _word, "Dtype of the cache.", "the model's"),
    Setting(
        "state_dtype", ("--mamba-ssm-cache-dtype", "--state-dtype"), "DTYPE", _word, "Dtype of states.", "the config's"
    ),
    Setting("draft_layers", ("--draft-layers",), "N", _count_or_zero, "Layers for multi-token prediction.", "0"),
    Setting("draft", ("--draft",), "CONFIG", _word, "Draft model that shares the cache.", "none"),
    Setting("engine", ("--engine",), "NAME[@VERSION]", convention, "Engine whose conventions hold.", "generic"),
    Setting("platform", ("--platform",), "NAME", _word, "Platform to use.", "the one available"),
    Setting("device", ("--device",), "INDEX|KEY", _word, "Device, by logical index or key.", "the first"),
    Setting(
        "device_profile",
        ("--device-profile",),
        "FILE[,FILE...]",
        _words,
        "Recorded device, in place of one here.",
        "none",
    ),
    Setting(
        "utilization",
        ("--gpu-memory-utilization", "--utilization"),
        "SHARE",
        _share,
        "Share of memory that the engine may use.",
        "0.9",
    ),
    Setting("utilization_of", ("--utilization-of",), "BASE", _one_of(ShareOf), "Of what it is a share.", "of_total"),
    Setting(
        "kv_cache_memory",
        ("--kv-cache-memory",),
        "SIZE[,SIZE...]",
        _sizes,
        "Size of the cache, for every rank or one each.",
        "a share of memory",
    ),
    Setting("weights", ("--weights",), "SIZE", _weights, "Weights that are still to be loaded, per rank.", "none"),
    Setting("activations", ("--activations",), "SIZE", _activations, "Peak of a step's activations.", "none"),
    Setting(
        "reserve", ("--reserve",), "NAME=SIZE[:transient]", _reserves, "Memory kept from the cache.", "none", many=True
    ),
    Setting("margin", ("--margin",), "SIZE", _size, "Memory kept free on purpose.", "0"),
    Setting("max_model_len", ("--max-model-len",), "TOKENS", _count, "Longest request.", "the model's"),
    Setting("max_num_seqs", ("--max-num-seqs",), "N", _count, "Requests at once.", "none"),
    Setting("max_num_batched_tokens", ("--max-num-batched-tokens",), "N", _count, "Tokens of one step.", "none"),
    Setting(
        "limit_to_demand",
        ("--limit-to-demand",),
        "",
        _switch,
        "No more blocks than max_num_seqs requests of max_model_len can use.",
        "false",
        switch=True,
    ),
    Setting(
        "index_limit",
        ("--index-limit",),
        "bits=32,signed,unit=elements,stride=layer",
        _index_limit,
        "Width of the kernel's index into the cache.",
        "undeclared",
    ),
    Setting(
        "kernel",
        ("--kernel",),
        "NAME[,NAME...]",
        _kernels,
        "Known kernels that index the cache.",
        "the engine's",
        many=True,
    ),
    Setting("max_blocks", ("--max-blocks",), "N", _count, "Cap on blocks; it can only lower.", "none"),
    Setting("max_blocks_reason", ("--reason",), "TEXT", _word, "Why there is a cap.", "none"),
    Setting("num_blocks_override", ("--num-blocks-override",), "N", _count, "Blocks in place of the sum.", "none"),
    Setting(
        "on_shortage",
        ("--on-shortage",),
        "CHOICE",
        _one_of(OnShortage),
        "If it does not fit: refuse, warn, shrink.",
        "refuse",
    ),
)

_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
#: Spellings that a policy file may use too: a flag without its dashes.
_FILE_NAMES: Final = {
    **{flag.lstrip("-").replace("-", "_"): setting.name for setting in SETTINGS for flag in setting.flags},
    **{setting.name: setting.name for setting in SETTINGS},
}


def resolve(
    flags: Mapping[str, str | Sequence[str] | bool | None],
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    origin: str | None = None,
    names: Iterable[str] | None = None,
) -> Resolved:
    """Every setting that someone gave, by precedence. Raises :class:`PolicyError` for a value that cannot be.

    ``flags`` maps a setting's name to its text; ``origin`` says where these come from, if not from the command line.
    Without ``file``, the variable ``KVCORE_POLICY`` may name one. ``names`` are the settings that matter (None: all).
    """
    file = file if file is not None else environ.get(FILE_VARIABLE)
    from_file = {} if file is None else read_policy_file(file)
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    levels: dict[str, int] = {}
    for setting in SETTINGS if names is None else [_BY_NAME[name] for name in names]:
        found = _given(setting, flags, environ, from_file, file, origin)
        if found is not None:
            text, place, levels[setting.name] = found
            _refuse_control_characters(text, place)
            values[setting.name] = setting.parse(text, place)
            texts[setting.name], origins[setting.name] = text, place
    loser = _overridden(levels)
    if loser is not None:
        for held in (values, texts, origins):
            del held[loser]
    return Resolved(values, texts, origins)


def _overridden(levels: Mapping[str, int]) -> str | None:
    """A size given on the command line takes the place of a share in a file, and the other way round."""
    ways = [name for name in ("utilization", "kv_cache_memory") if name in levels]
    if len(ways) < 2 or levels[ways[0]] == levels[ways[1]]:
        return None  # two at one level contradict each other, and policy_of says so
    return min(ways, key=lambda name: levels[name])


def misspelled_variables(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """A line for each ``KVCORE_*`` variable that no one reads and that looks like a setting's.

    Others stay unmentioned: a plugin may have variables of its own.
    """
    known = {setting.variable for setting in SETTINGS} | OTHER_VARIABLES
    lines = []
    for name in sorted(environ):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85) if name.startswith("KVCORE_") else []
        if near and name not in known:
            lines.append(f"{name} is no setting and has no effect: did you mean {near[0]}?")
    return tuple(lines)


def read_policy_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """The settings in a TOML policy file, as texts. An unknown key is an error that suggests the nearest."""
    table = _toml(path)
    texts: dict[str, str] = {}
    for key, value in table.items():
        name = _FILE_NAMES.get(key.replace("-", "_"))
        if name is None:
            near = difflib.get_close_matches(key.replace("-", "_"), _FILE_NAMES, n=1)
            raise PolicyError(
                "unknown setting",
                code="KV-POL-002",
                where=f"{path}: {key}",
                expected=", ".join(_BY_NAME),
                hint=f"did you mean {near[0]}?" if near else None,
            )
        if name in texts:
            raise PolicyError("a setting given twice", code="KV-POL-003", where=f"{path}: {key}", got=name)
        texts[name] = _as_text(value, f"{path}: {key}")
    return texts


def policy_of(resolved: Resolved) -> Policy:
    """The policy that the settings say. Raises :class:`PolicyError` for settings that do not go together."""
    if ("max_blocks" in resolved.values) != ("max_blocks_reason" in resolved.values):
        raise PolicyError(
            "a cap on blocks needs a reason, and a reason a cap",
            code="KV-POL-021",
            where=resolved.origins.get("max_blocks") or resolved.origins.get("max_blocks_reason"),
            expected="--max-blocks N --reason TEXT",
        )
    both = [name for name in ("utilization", "kv_cache_memory", "num_blocks_override") if name in resolved.values]
    if "kv_cache_memory" in both and "utilization" in both:
        raise PolicyError(
            "a share of memory and an absolute size: one would have no effect",
            code="KV-POL-043",
            where=" and ".join(resolved.origins[name] for name in ("utilization", "kv_cache_memory")),
            expected="one of them",
        )
    named = [resolved.get(name) for name in ("weights", "activations")]
    reserves = (*(r for r in named if r is not None), *resolved.get("reserve", ()))
    _refuse_same_names(reserves)
    fields = {
        name: resolved.values[name]
        for name in (
            "utilization",
            "utilization_of",
            "kv_cache_memory",
            "margin",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "limit_to_demand",
            "max_blocks",
            "max_blocks_reason",
            "num_blocks_override",
            "on_shortage",
        )
        if name in resolved.values
    }
    limit = resolved.get("index_limit")
    kernels = resolved.get("kernel", ())
    return Policy(
        **fields,
        reserves=reserves,
        limits=(*kernels, *(() if limit is None else (limit,))),
        origins=dict(resolved.origins),
    )


def _refuse_same_names(reserves: Sequence[Reserve]) -> None:
    """A name is a reserve's identity in the sum, so that of two with one name only one would count."""
    seen: dict[str, str] = {}
    for reserve in reserves:
        if reserve.name in seen:
            raise PolicyError(
                "a reserve named twice: only one of them would count",
                code="KV-POL-046",
                where=" and ".join(dict.fromkeys((seen[reserve.name], reserve.source))),
                got=reserve.name,
                expected="a name of its own for each reserve",
            )
        seen[reserve.name] = reserve.source


def _refuse_control_characters(text: str, where: str) -> None:
    """No name, path or number has them; in a path they would fail late, on a terminal they would act."""
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text):
        raise PolicyError(
            "a value with control characters",
            code="KV-POL-037",
            where=where,
            got=ascii(text[:80]),
            expected="characters that can be printed",
        )


def _given(
    setting: Setting,
    flags: Mapping[str, str | Sequence[str] | bool | None],
    environ: Mapping[str, str],
    from_file: Mapping[str, str],
    file: str | os.PathLike[str] | None,
    origin: str | None,
) -> tuple[str, str, int] | None:
    """The text that decides a setting, where it stands, and how far it takes precedence."""
    flag = flags.get(setting.name)
    if isinstance(flag, bool):
        flag = "true" if flag else None
    if flag is not None and not isinstance(flag, str):
        flag = ",".join(flag) or None
    if flag is not None:
        return flag, setting.flags[-1] if origin is None else f"{origin}: {setting.name}", 3
    if setting.variable in environ:
        return environ[setting.variable], setting.variable, 2
    if setting.name in from_file:
        return from_file[setting.name], f"{file}: {setting.name}", 1
    return None


def _toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    import importlib

    # The standard library's parser; before Python 3.11 the package it was made from.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(LARGEST_POLICY_FILE + 1)
    except OSError as error:
        raise PolicyError(
            "cannot read the policy file", code="KV-POL-001", where=str(path), got=error.strerror
        ) from error
    if len(raw) > LARGEST_POLICY_FILE:
        raise PolicyError(
            "the policy file is too large",
            code="KV-POL-004",
            where=str(path),
            expected=f"{LARGEST_POLICY_FILE:,} bytes",
        )
    try:
        table: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(
            "the policy file is not valid TOML", code="KV-POL-005", where=str(path), got=error, expected="TOML"
        ) from error
    return table


def _as_text(value: object, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, str)):
        # repr of a float is its shortest decimal form, so 0.9 stays nine tenths; nan and inf fail to parse later.
        return value if isinstance(value, str) else repr(value)
    if isinstance(value, list) and value and all(isinstance(item, (int, str)) for item in value):
        return ",".join(str(item) for item in _no_bools(value, where))
    raise PolicyError(
        "a setting of the wrong type",
        code="KV-POL-006",
        where=where,
        got=type(value).__name__,
        expected="a text, a number, true or false, or a list of texts and numbers",
    )


def _no_bools(values: Iterable[object], where: str) -> Iterable[object]:
    for value in values:
        if isinstance(value, bool):
            raise PolicyError("a setting of the wrong type", code="KV-POL-006", where=where, got=repr(value))
        yield value
