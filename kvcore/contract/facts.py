"""What a vendor states: devices, readings, allocation limits, reserves, buffers.

Sizes are ``int`` bytes. A quantity that is not known is ``None``: never 0, never an estimate, never a float.
These are plain records; :mod:`kvcore.contract.validate` says which of them are acceptable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "AllocationLimits",
    "AllocationRequest",
    "Basis",
    "Buffer",
    "Detection",
    "DetectionState",
    "Device",
    "DeviceFacts",
    "Evidence",
    "Limit",
    "LimitKind",
    "LimitUnit",
    "Mapping",
    "MemoryKind",
    "MemoryStats",
    "Phase",
    "Reading",
    "Reserve",
    "ReserveKind",
    "Scope",
    "Stride",
    "TensorView",
]


class DetectionState(str, Enum):
    """What ``kvcore_detect`` found. Only ABSENT lets kvcore fall back to the CPU."""

    AVAILABLE = "available"  #: devices are here and can be used
    ABSENT = "absent"  #: no hardware of this vendor is here; a driver's library alone is no hardware
    UNUSABLE = "unusable"  #: hardware or a driver is here, but it cannot be used; the reason says why


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a detection: ``("library", "/usr/lib/libnvidia-ml.so.1")``, ``("pci 0x10de", "2")``."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Detection:
    """The answer of ``kvcore_detect``: state, one sentence of reason, evidence, and what would make it available.

    ``evidence`` is there if the state is AVAILABLE, ``hint`` if it is not.
    """

    state: DetectionState
    reason: str
    evidence: tuple[Evidence, ...] = ()
    hint: str | None = None


class MemoryKind(str, Enum):
    """What kind of memory a device has; unified memory shares pages with the host."""

    DISCRETE = "discrete"
    UNIFIED = "unified"
    PARTITION = "partition"
    HOST = "host"


class Mapping(str, Enum):
    """How a logical index was tied to the device's key, best first."""

    RUNTIME = "runtime"  #: the runtime itself named the key (PCI address or UUID) of its ordinal
    ENVIRONMENT = "environment"  #: a visibility variable was parsed by the runtime's rules
    ORDER = "order"  #: the library's order was taken for the runtime's
    SELF = "self"  #: there is only one: the host, or a replayed device


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, slice or host as this process sees it.

    ``key`` is its identity (UUID or PCI address; ``host`` for the CPU). ``index`` is the logical ordinal in this
    process and ``visible`` the entry of the visibility variable that named it: neither is an identity.
    """

    platform: str
    index: int
    key: str
    name: str
    kind: MemoryKind
    mapping: Mapping
    visible: str | None = None
    parent: str | None = None


class Scope(str, Enum):
    """Whose memory the figures of a reading are about."""

    DEVICE = "device"  #: the whole device, all processes
    PARTITION = "partition"  #: a slice of a device
    NODE = "node"  #: the NUMA nodes this process is bound to
    CONTAINER = "container"  #: a cgroup or other container limit
    PROCESS = "process"  #: this process alone, e.g. an address space limit
    SOFT = "soft"  #: a limit that a slicer enforces by interception


class Basis(str, Enum):
    """How a figure came about."""

    MEASURED = "measured"
    MODELLED = "modelled"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source measured at one moment, all figures of one pool, in bytes.

    ``source`` is a short name, such as ``nvml_v2``; one device can have several. ``free`` may be total less used where
    both come from one call. ``used`` is without ``reserved``, which is what the driver keeps. ``own`` is what this
    process itself holds there, by a counter of this process, never by a difference of device-wide figures.

    A source that was tried and gave nothing is a reading whose figures are all None and whose ``skipped`` says why.
    """

    source: str
    scope: Scope
    total: int | None = None
    free: int | None = None
    used: int | None = None
    reserved: int | None = None
    own: int | None = None
    basis: Basis = Basis.MEASURED
    note: str | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """What the framework's allocator says of this process, in bytes. Never added to device-wide figures."""

    source: str
    current: int | None = None
    peak: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None


@dataclass(frozen=True, slots=True)
class AllocationLimits:
    """What one allocation on the device can be.

    ``granularity``: sizes are rounded up to a multiple of it. ``alignment``: addresses are multiples of it.
    ``max_bytes`` and ``max_elements`` bound one tensor; None means that no bound is known to apply.
    """

    granularity: int = 1
    alignment: int = 1
    max_bytes: int | None = None
    max_elements: int | None = None
    reason: str | None = None


class LimitKind(str, Enum):
    """Which kind of upper bound on blocks this is."""

    MEMORY = "memory"
    ALLOCATION = "allocation"
    BLOCK_ID = "block_id"
    INDEX = "index"
    SLOTS = "slots"
    DEMAND = "demand"
    CAP = "cap"
    OVERRIDE = "override"


class LimitUnit(str, Enum):
    """What ``Limit.bound`` counts."""

    BLOCKS = "blocks"
    TOKENS = "tokens"
    ELEMENTS = "elements"
    BYTES = "bytes"


class Stride(str, Enum):
    """What a kernel multiplies a block's number by, for limits in elements or bytes."""

    LAYER = "layer"  #: one block of the largest single tensor: K and V apart, layers apart
    LAYER_KV = "layer_kv"  #: one block of one layer, its tensors interleaved
    ALL_LAYERS = "all_layers"  #: one block of all layers, packed block-outermost


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound on blocks, as data with a reason.

    ``bound`` counts ``unit``. For elements and bytes, ``stride`` says what one block adds (or ``stride_size``
    gives it outright, in ``unit``), and the largest number of blocks is ``bound // stride``: a signed 32-bit
    element index has ``bound = 2**31``, since the last element of the last block has number ``bound - 1``.
    """

    kind: LimitKind
    unit: LimitUnit
    bound: int
    reason: str
    source: str
    stride: Stride | None = None
    stride_size: int | None = None


class ReserveKind(str, Enum):
    """Persistent reserves add up; of the transient ones only the largest counts."""

    PERSISTENT = "persistent"
    TRANSIENT = "transient"


class Phase(str, Enum):
    """When in an engine's start a reserve comes into being, in order."""

    CONTEXT = "context"
    COMMUNICATORS = "communicators"
    WEIGHTS = "weights"
    PROFILE = "profile"
    GRAPHS = "graphs"
    FIRST_REQUEST = "first_request"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory named and kept from the cache, in bytes. A name enters a plan once; a measured value wins."""

    name: str
    nbytes: int
    kind: ReserveKind
    basis: Basis
    source: str
    reason: str
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """One allocation: all of ``nbytes``, zeroed and committed, or an :class:`~kvcore.errors.OutOfMemory`.

    ``elements`` is how many elements the engine's tensor has, so that ``nbytes // elements`` is the size of one;
    ``alignment`` is what the platform's own :class:`AllocationLimits` state.
    """

    name: str
    nbytes: int
    alignment: int
    elements: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a platform handed out. ``handle`` is the platform's own; nobody else looks into it.

    ``name`` and ``device`` are those of the request, and ``nbytes`` is the request's, rounded up to the granularity:
    the plan has rounded by the same rule, and more or less than that is refused.
    ``committed_bytes`` is how much of it is backed by real memory now: equal to ``nbytes`` unless the platform
    declares COMMIT unsupported.
    """

    name: str
    device: Device
    nbytes: int
    committed_bytes: int
    handle: object = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TensorView:
    """How an engine wants to see a buffer: a C-contiguous array of ``shape`` and ``dtype`` at ``offset`` bytes.

    ``dtype`` is the stored element type by its common name: ``float32``, ``float16``, ``bfloat16``,
    ``float8_e4m3fn``, ``float8_e5m2``, ``int8``, ``uint8``.
    """

    shape: tuple[int, ...]
    dtype: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """All that a plan needs to know of one device at one moment: what ``kvcore record`` writes down."""

    device: Device
    readings: tuple[Reading, ...]
    allocation: AllocationLimits
    limits: tuple[Limit, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
