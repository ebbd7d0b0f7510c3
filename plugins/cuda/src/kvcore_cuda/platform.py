"""The ``cuda`` platform: what can be said of NVIDIA devices without a driver.

Detection looks at PCI functions and library files alone.
"""

from __future__ import annotations

from kvcore.contract import (
    FULL,
    BlockSizer,
    Capability,
    Detection,
    DetectionState,
    Evidence,
    PlatformInfo,
    hookimpl,
    not_implemented,
)
from kvcore.contract.base import PlatformBase
from kvcore.contract.probes import find_library, pci_devices

__all__ = ["CudaBlockSizer", "plugin"]

__version__ = "0.1.0"
CONTRACT = 1
PCI_VENDOR = "0x10de"
LIBRARY = "libnvidia-ml.so.1"


class CudaBlockSizer(PlatformBase):
    """Knows whether NVIDIA hardware is here; reading and allocating come with a later version."""

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """Detection alone is offered."""
        later = not_implemented("this version of kvcore-cuda detects devices, and does no more")
        capabilities = {**dict.fromkeys(Capability, later), Capability.DETECT: FULL}
        return PlatformInfo("cuda", "NVIDIA", __version__, CONTRACT, capabilities)

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """By PCI vendor; a library without hardware does not make a device."""
        cards = pci_devices(PCI_VENDOR)
        library = find_library(LIBRARY, ("/usr/lib/wsl/lib",))
        evidence = tuple(Evidence(f"pci {PCI_VENDOR}", address) for address in cards)
        if library is not None:
            evidence += (Evidence("library", library),)
        if cards:
            reason = "this version of kvcore-cuda cannot read or allocate yet"
            return Detection(DetectionState.UNUSABLE, reason, evidence, "choose another platform with --platform")
        if library is not None:
            reason = f"{LIBRARY} is here, but no PCI function of vendor {PCI_VENDOR}"
            return Detection(DetectionState.ABSENT, reason, evidence, "start the container with access to the devices")
        reason = f"no PCI function of vendor {PCI_VENDOR} and no {LIBRARY}"
        return Detection(
            DetectionState.ABSENT,
            reason,
            (),
            "install the NVIDIA driver; in a container, NVIDIA_DRIVER_CAPABILITIES must include utility",
        )


plugin: BlockSizer = CudaBlockSizer()
