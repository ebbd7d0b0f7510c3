"""The text of a plan, an explanation and a refusal, made from their JSON-ready data: a saved answer reads the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.report.text import Section
from kvcore.units import format_bytes, format_count, format_percent

__all__ = ["allocation_sections", "explain_sections", "plan_sections", "refusal_sections", "sum_sections"]


def plan_sections(data: Mapping[str, Any]) -> list[Section]:
    """The answer in a screen: what fits, what decided, what to know."""
    kernel = data["kernel_block_size"]
    kernels = "" if kernel is None else f" ({data['block_size'] // kernel} kernel blocks of {kernel})"
    block = f"of {format_count(data['block_size'])} tokens{kernels}, {_bytes(data['bytes_per_block'])} each"
    usable = f"in {format_count(data['usable_blocks'])} usable blocks"
    rows = [("blocks", format_count(data["num_blocks"]), block)]
    if data["tokens"] is not None:
        rows.append(("tokens", format_count(data["tokens"]), usable))
    else:
        rows += _request_rows(data)
    if data["max_concurrency"] is not None:
        length = f"requests of {format_count(data['max_model_len'])} tokens at once"
        rows.append(("concurrency", f"{data['max_concurrency']:,.2f}", length))
    rows.append(("cache", format_bytes(data["cache_bytes"]), f"{format_count(data['cache_bytes'])} bytes on a rank"))
    rows.append(("bound by", data["binding"]["kind"], data["binding"]["reason"]))
    rows += _cost_rows(data)
    if data["engine"] != "generic":
        rows.append(_printed_row(data))
    sections = [Section(_title(data), rows=tuple(rows), right=(1,))]
    if len(data["groups"]) > 1:
        sections.append(_groups(data))
    if len(data["ranks"]) > 1:
        sections.append(_ranks(data))
    if data["flags"] is not None:
        sections.append(Section("To do this", lines=tuple(data["flags"].splitlines())))
    return [*sections, *_lifts(data), *_remarks(data)]


def _cost_rows(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What a bound other than memory leaves unused, and where an index stops being safe."""
    rows = []
    binding, without = data["binding"], data["blocks_without_binding"]
    if without > data["num_blocks"]:
        lost = without - data["num_blocks"]
        share = f"{format_percent(lost, without)} of {format_count(without)} without it"
        rows.append(("left idle", format_bytes(binding["idle_bytes"]), f"{format_count(lost)} blocks, {share}"))
    if binding["first_unsafe_block"] is not None:
        rows.append(("first unsafe", format_count(binding["first_unsafe_block"]), "block number, counted from 0"))
    return rows


def _lifts(data: Mapping[str, Any]) -> list[Section]:
    if not data["lifts"]:
        return []
    rows = tuple(
        (
            lift["knob"],
            lift["value"] or "-",
            "-" if lift["num_blocks"] is None else format_count(lift["num_blocks"]),
            "-" if lift["tokens"] is None else format_count(lift["tokens"]),
            "-" if lift["cache_bytes"] is None else format_bytes(lift["cache_bytes"]),
            lift["text"],
        )
        for lift in data["lifts"]
    )
    return [Section("What would lift it", ("knob", "value", "blocks", "tokens", "cache", ""), rows, right=(2, 3, 4))]


def _request_rows(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What one request costs where no single number of tokens is right."""
    rows = [
        ("a request", format_bytes(data["fixed_bytes_per_request"]), "whatever its length: windows and states"),
        ("a token", format_bytes(data["marginal_bytes_per_token"]), "of each request beyond that"),
        ("at least", format_count(data["smallest_request_blocks"]), "blocks for the shortest request"),
    ]
    if data["padding_bytes"]:
        groups, whole = len(data["groups"]), len(data["groups"]) * data["bytes_per_block"]
        share = format_percent(data["padding_bytes"], whole)
        rows.append(("padding", format_bytes(data["padding_bytes"]), f"{share} of a block of each of {groups} groups"))
    return rows


def _printed_row(data: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the engine's own log will say."""
    concurrency = data["engine_concurrency"]
    at = "" if concurrency is None else f", concurrency {concurrency:,.2f} at {format_count(data['max_model_len'])}"
    return (f"{data['engine']} prints", format_count(data["engine_tokens"]), f"tokens{at}")


def explain_sections(data: Mapping[str, Any]) -> list[Section]:
    """The whole sum, so that a person can add it up by hand."""
    return [
        Section(_title(data)),
        _terms(data["terms"], data["available_bytes"]),
        _division(data),
        _bounds(data["bounds"], data["binding"]),
        *_lifts(data),
        _groups(data),
        _ranks(data),
        _settings(data),
        *_remarks(data),
    ]


def sum_sections(data: Mapping[str, Any]) -> list[Section]:
    """The terms, the division and the bounds alone: why the number is what it is."""
    return [
        Section(_title(data)),
        _terms(data["terms"], data["available_bytes"]),
        _division(data),
        _bounds(data["bounds"], data["binding"]),
    ]


def refusal_sections(data: Mapping[str, Any]) -> list[Section]:
    """Why not, by how much, and what would help."""
    rows = (
        ("needed", format_count(data["needed_blocks"]) + " blocks", _bytes(data["needed_bytes"])),
        ("available", format_count(data["allowed_blocks"]) + " blocks", _bytes(data["available_bytes"])),
        ("gap", "", _bytes(data["gap_bytes"])),
        ("largest length", format_count(data["largest_model_len"]) + " tokens", ""),
    )
    remedies = tuple((remedy["knob"], remedy["text"]) for remedy in data["remedies"])
    return [
        Section(rows=rows, right=(1,)),
        _terms(data["terms"], sum(term["signed_bytes"] for term in data["terms"])),
        _bounds(data["bounds"], data["binding"]),
        Section("What would help", rows=remedies),
    ]


def allocation_sections(data: Mapping[str, Any]) -> list[Section]:
    """What was allocated, verified and released."""
    verified = f"{format_count(data['verified_blocks'])} blocks in {format_count(data['verified_tensors'])} tensors"
    device = data["device"]
    rows = (
        ("allocated", format_bytes(data["allocated_bytes"]), f"on {device['platform']} device {device['key']}"),
        ("committed", format_bytes(data["committed_bytes"]), "backed by real memory"),
        ("verified", format_bytes(data["verified_bytes"]), f"written and read back, {verified}"),
        ("released", format_bytes(data["released_bytes"]), "freed"),
    )
    return [Section(f"Rank {data['rank']}", rows=rows, right=(1,))]


def _title(data: Mapping[str, Any]) -> str:
    device = data["device"]
    where = "no device" if device is None else f"{device['platform']} device {device['key']} ({device['name']})"
    ranks = len(data["ranks"])
    return f"{data['model']} on {where}, {ranks} rank{'s' if ranks > 1 else ''}"


def _terms(terms: Sequence[Mapping[str, Any]], available: int) -> Section:
    rows = [
        ("", term["name"], f"{term['signed_bytes']:,}", format_bytes(term["signed_bytes"]), _because(term))
        for term in terms
    ]
    rows.append(("=", "available", f"{available:,}", format_bytes(available), "for the cache on one rank"))
    return Section("Memory", ("", "term", "bytes", "", "why"), tuple(rows), right=(2, 3))


def _because(term: Mapping[str, Any]) -> str:
    return f"{term['reason']} [{term['source']}, {term['basis']}]"


def _division(data: Mapping[str, Any]) -> Section:
    rows: tuple[tuple[str, ...], ...] = (
        ("", "blocks", format_count(data["num_blocks"]), "decided by " + data["binding"]["kind"]),
        ("x", "bytes per block", format_count(data["bytes_per_block"]), _per_block(data)),
        ("=", "cache", format_count(data["cache_bytes"]), _rounding(data)),
        ("+", "unused", format_count(data["unused_bytes"]), "less than one block, if memory decided"),
        ("=", "available", format_count(data["available_bytes"]), ""),
        (
            "",
            "usable blocks",
            format_count(data["usable_blocks"]),
            f"without {data['reserved_blocks']} kept by the engine",
        ),
        ("x", "tokens per block", format_count(data["block_size"]), ""),
        ("=", "tokens", format_count(data["tokens"]), ""),
    )
    return Section("Blocks", ("", "", "number", "note"), rows, right=(2,))


def _shared(data: Mapping[str, Any]) -> str:
    if data["block_tokens"] == data["block_size"]:
        return ""
    return f"{format_count(data['block_size'])} on each of the ranks that share a request's tokens"


def _per_block(data: Mapping[str, Any]) -> str:
    if len(data["groups"]) > 1:
        return "a page in each slot of the pool"
    return f"{format_count(data['bytes_per_token'])} bytes per token x {format_count(data['block_size'])} tokens"


def _rounding(data: Mapping[str, Any]) -> str:
    rounding = data["cache_bytes"] - data["num_blocks"] * data["bytes_per_block"]
    return f"with {format_count(rounding)} bytes by which the device rounds tensors up" if rounding else ""


def _bounds(bounds: Sequence[Mapping[str, Any]], binding: Mapping[str, Any]) -> Section:
    rows = tuple(
        (
            "*" if bound == binding else "",
            bound["kind"],
            format_count(bound["max_blocks"]),
            format_bytes(bound["idle_bytes"]),
            f"{bound['reason']} [{bound['source']}]",
        )
        for bound in bounds
    )
    return Section("Bounds (* decides)", ("", "bound", "blocks", "idle", "why"), rows, right=(2, 3))


def _groups(data: Mapping[str, Any]) -> Section:
    rows = tuple(
        (
            group["name"],
            _growth(group),
            format_count(group["layers"]),
            "-" if group["growth"] == "request" else format_count(group["block_size"]),
            format_count(group["bytes_per_token"] or group["bytes_per_request"]),
            "; ".join(f"{s['name']} {s['heads']} x {s['width']} {s['dtype']}" for s in group["stores"]),
        )
        for group in data["groups"]
    )
    headers = ("group", "grows", "layers", "tokens/block", "bytes", "a layer's stores")
    return Section("Layers on this rank", headers, rows, right=(2, 3, 4))


def _growth(group: Mapping[str, Any]) -> str:
    words = {"token": "by token", "request": "by request", "window": "to window", "chunk": "to chunk"}
    word = words.get(group["growth"], group["growth"])
    return word if group["window"] is None else f"{word} {format_count(group['window'])}"


def _ranks(data: Mapping[str, Any]) -> Section:
    """One row for neighbouring ranks that are alike: thousands of ranks differ in a few ways."""
    runs: list[list[Mapping[str, Any]]] = []
    for rank in data["ranks"]:
        if runs and _alike(runs[-1][-1]) == _alike(rank):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    rows = tuple(
        (
            "*" if any(rank["rank"] == data["tightest_rank"] for rank in run) else "",
            str(run[0]["rank"]) if len(run) == 1 else f"{run[0]['rank']}-{run[-1]['rank']}",
            format_count(run[0]["layers"]),
            format_count(run[0]["bytes_per_block"]),
            format_bytes(run[0]["available_bytes"]),
            format_count(run[0]["num_blocks"]),
            format_bytes(run[0]["idle_bytes"]),
        )
        for run in runs
    )
    headers = ("", "ranks", "layers", "bytes/block", "available", "blocks", "idle")
    return Section("Ranks (* is the tightest)", headers, rows, right=(2, 3, 4, 5, 6))


def _alike(rank: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in rank.items() if name not in ("rank", "tp_rank"))


def _settings(data: Mapping[str, Any]) -> Section:
    rows = tuple((s["name"], s["value"], s["origin"]) for s in data["settings"])
    return Section("Settings", ("name", "value", "from"), rows) if rows else Section()


def _remarks(data: Mapping[str, Any]) -> list[Section]:
    lines = [f"note: {note}" for note in data["notes"]]
    lines += [f"warning[{warning['code']}]: {warning['text']}" for warning in data["warnings"]]
    return [Section(lines=tuple(lines))] if lines else []


def _bytes(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} bytes)"
