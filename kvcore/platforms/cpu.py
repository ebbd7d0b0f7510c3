"""The ``cpu`` platform: this host's memory as one device, within the limits that hold for this process."""

from __future__ import annotations

from kvcore.contract import (
    FULL,
    AllocationLimits,
    AllocationRequest,
    Basis,
    BlockSizer,
    Buffer,
    Capability,
    Detection,
    DetectionState,
    Device,
    Evidence,
    Mapping,
    MemoryKind,
    MemoryStats,
    Phase,
    PlatformInfo,
    Reading,
    Reserve,
    ReserveKind,
    hookimpl,
)
from kvcore.contract.buffers import BufferHooks
from kvcore.contract.capabilities import CONTRACT_VERSION
from kvcore.contract.hostmem import committable_room, host_readings, host_room, peak_memory
from kvcore.errors import DeviceError
from kvcore.platforms.hostbuf import HostBlock, Room

__all__ = ["CpuBlockSizer", "plugin"]

HOST = Device("cpu", 0, "host", "host memory", MemoryKind.HOST, Mapping.SELF)
PAGE = 4096
#: One entry of 8 bytes in the page table for each page of 4096 bytes.
PAGE_TABLE_SHARE = PAGE // 8
#: What this process itself takes between a plan and the end of its allocation: threads' stacks, modules, the kernel's
#: bookkeeping of mappings. Seen: 0.3 to 1 MiB; beyond a control group's last page is a killed process.
PROCESS_GROWTH = 3 * 1024**2 // 2


class CpuBlockSizer(BufferHooks):
    """Readings of the host, buffers from anonymous mappings."""

    def __init__(self) -> None:
        self._room = Room(host_room, committable_room)

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """Everything is offered: paddle and torch tensors need those packages at the call."""
        from kvcore import __version__

        return PlatformInfo("cpu", "host", __version__, CONTRACT_VERSION, dict.fromkeys(Capability, FULL), False)

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """There is always a host; that its memory cannot be read would be news."""
        total = host_readings()[0].total
        if total is None:
            return Detection(DetectionState.UNUSABLE, "/proc/meminfo cannot be read", hint="mount /proc")
        return Detection(DetectionState.AVAILABLE, "the host's own memory", (Evidence("meminfo", f"{total} bytes"),))

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """One: the host."""
        return [HOST]

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """Meminfo, control groups, NUMA nodes and process limits."""
        _check_host(device)
        return host_readings()

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """Resident memory of this process, and its peak (VmHWM)."""
        _check_host(device)
        current, peak = peak_memory()
        return MemoryStats("proc_status", current=current, peak=peak)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """Resets VmHWM (proc(5), clear_refs)."""
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
                stream.write("5")
        except OSError as error:
            raise DeviceError(
                "the peak of resident memory cannot be reset",
                code="KV-DEV-010",
                where="/proc/self/clear_refs",
                got=error.strerror,
            ) from error

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Whole pages; the size of one mapping is bounded by memory alone."""
        _check_host(device)
        return AllocationLimits(granularity=PAGE, alignment=PAGE)

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """A mapping whose pages are there when this returns."""
        _check_host(device)
        nbytes = -(-request.nbytes // PAGE) * PAGE
        block = HostBlock(request.name, nbytes, commit=True, room=self._room)
        return Buffer(request.name, device, nbytes, block.committed, block)

    @hookimpl
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """Page tables, and the process that allocates, count against the same limits as the cache's pages."""
        if device.platform != "cpu":
            return []
        room = host_room()
        if room is None:
            return []
        tables = f"8 bytes for each page of {PAGE}, for all that can be had"
        process = "what this process takes while it allocates: stacks, modules, bookkeeping"
        return [
            _reserve("page_tables", -(-room // PAGE_TABLE_SHARE), Basis.MODELLED, tables),
            _reserve("process", PROCESS_GROWTH, Basis.DECLARED, process),
        ]


def _check_host(device: Device) -> None:
    if device.key != HOST.key:
        raise DeviceError(
            "no such device", code="KV-DEV-002", where="platform cpu", got=device.key, expected=f"0 ({HOST.key})"
        )


def _reserve(name: str, nbytes: int, basis: Basis, reason: str) -> Reserve:
    return Reserve(name, nbytes, ReserveKind.PERSISTENT, basis, "cpu", reason)


plugin: BlockSizer = CpuBlockSizer()
