"""The shapes of kvcore's answers, as types. The JSON Schemas in ``kvcore/schemas`` are generated from these.

``python -m kvcore.report.schema`` writes them anew; a test fails when they have drifted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from kvcore.documents import PROFILE_SCHEMA
from kvcore.errors import DocumentError

__all__ = [
    "ANSWERS",
    "AllocateData",
    "AllocationData",
    "AuditData",
    "AuditLineData",
    "BoundData",
    "CacheData",
    "CheckData",
    "CheckInfoData",
    "ConformanceData",
    "ConformanceRecordData",
    "ConformingData",
    "DeviceData",
    "DiffData",
    "FactsData",
    "GroupData",
    "KernelData",
    "LiftData",
    "MoveData",
    "PlanData",
    "PluginData",
    "RankData",
    "ReadingData",
    "RefusalData",
    "RehearsalData",
    "SettingData",
    "TermData",
    "checked_plan",
    "checked_refusal",
    "schemas",
]


class TermData(TypedDict):
    """One line of the sum."""

    name: str
    signed_bytes: int
    reason: str
    source: str
    basis: str


class BoundData(TypedDict):
    """One upper bound on blocks."""

    kind: str
    max_blocks: int
    reason: str
    source: str
    idle_bytes: int
    first_unsafe_block: int | None


class LiftData(TypedDict):
    """One way out of an index limit; a null value means that no value of the knob holds more tokens."""

    knob: str
    value: str | None
    num_blocks: int | None
    tokens: int | None
    cache_bytes: int | None
    text: str


class StoreData(TypedDict):
    """One array of one layer."""

    name: str
    heads: int
    width: int
    dtype: str
    nbytes: int


class GroupData(TypedDict):
    """Layers that share a block table."""

    name: str
    kind: str
    growth: str
    window: int | None
    layers: int
    block_size: int
    bytes_per_token: int
    bytes_per_request: int
    stores: list[StoreData]


class RankData(TypedDict):
    """One rank's side of the plan."""

    rank: int
    tp_rank: int
    pp_rank: int
    layers: int
    device: str | None
    bytes_per_block: int
    available_bytes: int
    num_blocks: int
    binding: str
    cache_bytes: int
    idle_bytes: int


class WarningData(TypedDict):
    """Something that the reader should know."""

    code: str
    text: str


class SettingData(TypedDict):
    """One setting and where its value came from."""

    name: str
    value: str
    origin: str


class DeviceData(TypedDict):
    """One device."""

    platform: str
    index: int
    key: str
    name: str
    kind: str
    mapping: str
    visible: str | None
    parent: str | None


class ReadingData(TypedDict):
    """What one source said; null is unknown."""

    source: str
    scope: str
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    reserved_bytes: int | None
    own_bytes: int | None
    basis: str
    note: str | None
    skipped: str | None


class FactsData(DeviceData):
    """One device with its readings."""

    readings: list[ReadingData]
    granularity_bytes: int
    largest_allocation_bytes: int | None
    largest_allocation_elements: int | None


class PlanData(TypedDict):
    """A plan."""

    model: str
    engine: str
    device: DeviceData | None
    num_blocks: int
    usable_blocks: int
    reserved_blocks: int
    block_size: int
    kernel_block_size: int | None
    block_tokens: int
    tokens: int | None
    max_model_len: int | None
    max_concurrency: float | None
    engine_tokens: int | None
    engine_concurrency: float | None
    request_blocks: int | None
    smallest_request_blocks: int
    fixed_bytes_per_request: int
    marginal_bytes_per_token: int
    padding_bytes: int
    bytes_per_token: int
    bytes_per_block: int
    cache_bytes: int
    available_bytes: int
    unused_bytes: int
    binding: BoundData
    blocks_without_binding: int
    lifts: list[LiftData]
    bounds: list[BoundData]
    terms: list[TermData]
    groups: list[GroupData]
    ranks: list[RankData]
    tightest_rank: int
    notes: list[str]
    warnings: list[WarningData]
    settings: list[SettingData]
    flags: str | None


class CacheData(TypedDict):
    """A cache that was allocated and verified."""

    rank: int
    device: DeviceData
    num_blocks: int
    tensors: int
    allocated_bytes: int
    committed_bytes: int
    verified_tensors: int
    verified_blocks: int
    verified_bytes: int


class AllocationData(CacheData):
    """A cache that was allocated, verified and released."""

    released_bytes: int


class AuditLineData(TypedDict):
    """One term: what the plan promised (null: it did not know of it), and what came of it."""

    name: str
    promised_bytes: int | None
    outcome_bytes: int
    measured: bool


class AuditData(TypedDict):
    """Promise and outcome while the cache is held; null where the platform cannot say."""

    lines: list[AuditLineData]
    held_bytes: int | None
    promised_bytes: int | None
    free_bytes: int | None
    transient_bytes: int
    margin_bytes: int
    headroom_bytes: int | None
    unaccounted_bytes: int | None
    could_grow_blocks: int | None


class AllocateData(PlanData):
    """A plan and what came of it; ``audit`` is null unless it was asked for."""

    allocation: AllocationData
    audit: AuditData | None


class RemedyData(TypedDict):
    """One knob; a null value means that no value of it helps."""

    knob: str
    value: str | None
    text: str


class RefusalData(TypedDict):
    """Why a plan was refused."""

    shortage: str
    rank: int
    bytes_per_block: int
    needed_blocks: int
    needed_bytes: int
    allowed_blocks: int
    available_bytes: int
    gap_bytes: int
    max_model_len: int | None
    largest_model_len: int
    binding: BoundData
    bounds: list[BoundData]
    terms: list[TermData]
    remedies: list[RemedyData]


class DevicesData(TypedDict):
    """The visible devices."""

    devices: list[FactsData]


class RecordData(TypedDict):
    """A recorded device; ``profile`` is the document's text."""

    device: DeviceData
    output: str | None
    profile: str


class SupportData(TypedDict):
    """How far one capability goes."""

    support: str
    reason: str | None


class PluginData(TypedDict):
    """What became of one plugin."""

    name: str
    distribution: str
    version: str
    state: str
    reason: str | None
    vendor: str | None
    contract: int | None
    accelerator: bool | None
    capabilities: dict[str, SupportData] | None


class PluginsData(TypedDict):
    """All plugins."""

    plugins: list[PluginData]


class EvidenceData(TypedDict):
    """One fact behind a detection."""

    name: str
    value: str


class DetectionData(TypedDict):
    """What a platform detected."""

    state: str
    reason: str
    evidence: list[EvidenceData]
    hint: str | None


class ExaminedData(PluginData):
    """One plugin with all that the doctor knows of it."""

    path: str | None
    traceback: str | None
    detection: DetectionData | None


class ChoiceData(TypedDict):
    """What the rule of choice says; a null platform means that there is none."""

    platform: str | None
    reason: str
    fallback: bool | None
    hint: str | None


class DoctorData(TypedDict):
    """The doctor's findings."""

    versions: dict[str, str]
    plugins: list[ExaminedData]
    choice: ChoiceData


class CompletionData(TypedDict):
    """A completion script."""

    shell: str
    script: str


class NewPluginData(TypedDict):
    """A vendor's project that was made; ``files`` are paths within it."""

    name: str
    distribution: str
    module: str
    path: str
    files: list[str]


class KernelData(TypedDict):
    """One kernel whose index is known."""

    name: str
    engine: str
    versions: str
    layout: str
    kind: str
    bits: int
    signed: bool
    unit: str
    stride: str | None
    bound: int
    expression: str
    effect: str
    default: bool
    source: str


class KernelsData(TypedDict):
    """All known kernels."""

    kernels: list[KernelData]


class CheckInfoData(TypedDict):
    """One check of the conformance suite."""

    check: str
    name: str
    level: str
    since: int
    needs: list[str]
    title: str
    why: str
    fix: str


class ConformanceRecordData(TypedDict):
    """What came of one check on one platform."""

    check: str
    name: str
    platform: str
    level: str
    since: int
    outcome: str
    seconds: float
    reason: str | None
    device: str | None
    call: str | None
    got: str | None
    expected: str | None
    unit: str | None
    explained: str | None


class ConformingData(TypedDict):
    """One platform: whether it conforms, and whether there was a device to try it on."""

    platform: str
    conforms: bool
    complete: bool
    counts: dict[str, int]
    distribution: str | None
    version: str | None
    contract: int | None
    capabilities: dict[str, str]


class ConformanceData(TypedDict):
    """``kvcore conformance``: the checks, and what came of each; with ``--list`` only the checks."""

    versions: dict[str, str]
    checks: list[CheckInfoData]
    platforms: list[ConformingData]
    records: list[ConformanceRecordData]


class RehearsalData(TypedDict):
    """One pool verified through kernels with one index; null means that every block is within reach."""

    heads: int
    index: str
    stride_elements: int
    num_blocks: int
    pool_bytes: int
    predicted: int | None
    first_failing: int | None
    found: str
    explanations: list[str]


class DemoData(TypedDict):
    """What a demonstration found; ``agree`` says whether every prediction was met."""

    demo: str
    agree: bool
    rehearsals: list[RehearsalData]


class MoveData(TypedDict):
    """One part of a plan that moved: ``before`` and ``after`` in ``unit``, null where the plan lacks it."""

    kind: str
    name: str
    unit: str
    before: int | None
    after: int | None
    blocks: int


class DiffData(TypedDict):
    """What moved between two plans; the moves' blocks add up to ``moved_blocks``."""

    before: str
    after: str
    before_blocks: int
    after_blocks: int
    moved_blocks: int
    before_rank: int
    after_rank: int
    moves: list[MoveData]


class CheckData(TypedDict):
    """A plan against what was expected; ``diff`` is null where that was a number alone."""

    expected_blocks: int
    num_blocks: int
    matches: bool
    baseline: str | None
    updated: bool
    diff: DiffData | None
    plan: PlanData


class ErrorData(TypedDict):
    """An error: unknown members are null."""

    code: str
    what: str
    where: str | None
    got: str | None
    expected: str | None
    hint: str | None


#: Verb -> the shape of its ``data``.
ANSWERS: dict[str, Any] = {
    "plan": PlanData,
    "explain": PlanData,
    "allocate": AllocateData,
    "devices": DevicesData,
    "record": RecordData,
    "plugins": PluginsData,
    "doctor": DoctorData,
    "diff": DiffData,
    "check": CheckData,
    "kernels": KernelsData,
    "new-plugin": NewPluginData,
    "demo": DemoData,
    "conformance": ConformanceData,
    "completion": CompletionData,
}
#: Verbs whose answer can be a refusal.
REFUSED = ("plan", "explain", "allocate", "check")
#: Verbs whose answer is a plan, to be explained and compared later.
SAVED = ("plan", "explain", "allocate")


def schemas() -> dict[str, dict[str, Any]]:
    """Schema name -> JSON Schema of that document."""
    from kvcore.contract.facts import DeviceFacts

    made = {f"kvcore.{verb}": _answer_schema(verb) for verb in ANSWERS}
    made["kvcore.error"] = _answer_schema(None)
    made[PROFILE_SCHEMA] = _profile_schema(DeviceFacts)
    return made


def checked_plan(document: dict[str, Any], *, where: str) -> PlanData:
    """The plan in a saved answer of ``kvcore plan --json``; raises :class:`DocumentError` if it holds none."""
    plan: PlanData = _checked(document, PlanData, "ok", where)
    _refuse_wrong_sums(plan, where)
    return plan


def checked_refusal(document: dict[str, Any], *, where: str) -> RefusalData:
    """The refusal in a saved answer; raises :class:`DocumentError` if it holds none."""
    refusal: RefusalData = _checked(document, RefusalData, "no", where)
    return refusal


def _checked(document: dict[str, Any], kind: Any, status: str, where: str) -> Any:
    import msgspec

    schema, version, data = (document.get(name) for name in ("schema", "schema_version", "data"))
    planned = schema in [f"kvcore.{verb}" for verb in SAVED]
    if not planned or type(version) is not int or version != 1 or document.get("status") != status:
        raise DocumentError(
            "not a saved plan that this kvcore reads",
            code="KV-DOC-010",
            where=where,
            got=f"{schema}, version {version!r}, status {document.get('status')!r}",
            expected="an answer of kvcore plan, version 1, with status 'ok' or 'no'",
        )
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise DocumentError(
            "the saved plan does not match its schema", code="KV-DOC-006", where=where, got=error
        ) from error


def _refuse_wrong_sums(plan: PlanData, where: str) -> None:
    """What is shown to be added up by hand must add up, whoever edited the file."""
    identities = {
        "terms add up to available_bytes": sum(t["signed_bytes"] for t in plan["terms"]) == plan["available_bytes"],
        "cache_bytes + unused_bytes = available_bytes": plan["cache_bytes"] + plan["unused_bytes"]
        == plan["available_bytes"],
        "usable_blocks + reserved_blocks = num_blocks": plan["usable_blocks"] + plan["reserved_blocks"]
        == plan["num_blocks"],
        "tokens = usable_blocks * block_size": plan["tokens"] == plan["usable_blocks"] * plan["block_size"],
    }
    for identity, holds in identities.items():
        if not holds:
            raise DocumentError(
                "the saved plan does not add up", code="KV-DOC-011", where=f"{where}: data", expected=identity
            )


def _answer_schema(verb: str | None) -> dict[str, Any]:
    """The schema of a verb's answers, or of a failure before any verb was known."""
    import msgspec

    name = verb or "error"
    if verb is None:
        data: dict[str, Any] = {"type": "null"}
        definitions: dict[str, Any] = {}
    elif verb in REFUSED:
        # One "data" or the other: which, the status says.
        answered_schema, refusal = msgspec.json.schema(ANSWERS[verb]), msgspec.json.schema(RefusalData)
        definitions = {**answered_schema.pop("$defs", {}), **refusal.pop("$defs", {})}
        data = {"anyOf": [answered_schema, refusal, {"type": "null"}]}
    else:
        data = msgspec.json.schema(ANSWERS[verb] | None)
        definitions = data.pop("$defs", {})
    error = msgspec.json.schema(ErrorData | None)
    definitions |= error.pop("$defs", {})
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvcore.{name}",
        "type": "object",
        "properties": {
            "schema": {"const": f"kvcore.{name}"},
            "schema_version": {"const": 1},
            "kvcore": {"type": "string"},
            "command": {"const": verb},
            "status": {"enum": ["ok", "no", "error"]},
            "data": data,
            "error": error,
            "diagnostics": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["schema", "schema_version", "kvcore", "command", "status", "data", "error", "diagnostics"],
        "$defs": definitions,
    }
    return _closed(schema)


def _profile_schema(kind: Any) -> dict[str, Any]:
    import msgspec

    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs")
    body = definitions.pop(kind.__name__)
    body["properties"] = {
        "schema": {"const": PROFILE_SCHEMA},
        "schema_version": {"const": 1},
        **body["properties"],
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    body["required"] = ["schema", "schema_version", *body["required"]]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": PROFILE_SCHEMA}
    return _closed({**head, **{k: v for k, v in body.items() if k != "title"}, "$defs": definitions})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Every object refuses keys that it does not name: an answer with an undocumented key is a fault."""
    closed = {name: _closed_part(value) for name, value in schema.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_part(value: Any) -> Any:
    if isinstance(value, dict):
        return _closed(value)
    return [_closed_part(item) for item in value] if isinstance(value, list) else value


def _write() -> None:
    import json

    folder = Path(__file__).parents[1] / "schemas"
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.json").write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
