"""A run is charged what this process took, and nothing of its neighbours."""

from __future__ import annotations

from kvcore.contract import AllocationRequest, Buffer, Device, MemoryStats, Reading, ReserveKind, Scope, hookimpl
from kvcore.platforms.replay import ReplayBlockSizer
from kvcore.profiling import profile_run

from .conftest import MIB, card, handle_of

GIB = 1024**3


def test_growth_and_peak_are_this_process_own() -> None:
    platform = handle_of(ReplayBlockSizer([card()]))
    device = platform.device()
    kept: list[Buffer] = []

    def run() -> None:
        kept.append(platform.allocate(device, AllocationRequest("weights", 8 * MIB, 256, 1)))
        platform.release(platform.allocate(device, AllocationRequest("activations", 5 * MIB, 256, 1)))

    found = profile_run(platform, device, run)
    assert found.grown_bytes == 8 * MIB
    assert found.transient_bytes == 5 * MIB
    assert found.moved_bytes == 0
    (reserve,) = found.reserves
    assert (reserve.nbytes, reserve.kind) == (5 * MIB, ReserveKind.TRANSIENT)
    platform.release(kept[0])


def test_a_neighbour_is_never_charged() -> None:
    """B01 and B03: another process takes 2.88 GiB, or gives 6.03 GiB back, while this one loads."""
    for moved in (round(2.88 * GIB), -round(6.03 * GIB)):

        class Neighbour(ReplayBlockSizer):
            shift = 0

            @hookimpl
            def kvcore_read_memory(self, device: Device) -> list[Reading]:
                own = 66 * MIB if self.shift else 0
                return [Reading("nvml", Scope.DEVICE, total=32 * GIB, free=20 * GIB - own - self.shift, own=own)]

        plugin = Neighbour([card()])
        platform = handle_of(plugin)
        found = profile_run(platform, platform.device(), lambda p=plugin, m=moved: setattr(p, "shift", m))  # type: ignore[misc]
        assert found.grown_bytes == 66 * MIB
        assert found.moved_bytes == moved


def test_what_is_unknown_stays_unknown() -> None:
    class Silent(ReplayBlockSizer):
        @hookimpl
        def kvcore_read_memory(self, device: Device) -> list[Reading]:
            return [Reading("nvml", Scope.DEVICE, skipped="no permission")]

        @hookimpl
        def kvcore_memory_stats(self, device: Device) -> MemoryStats:
            return MemoryStats("none")

    platform = handle_of(Silent([card()]))
    found = profile_run(platform, platform.device(), lambda: None)
    assert (found.baseline, found.grown_bytes, found.transient_bytes, found.moved_bytes) == (None, None, None, None)
    assert found.reserves == ()
