"""The ``cuda`` platform: NVIDIA devices, by NVML and by the CUDA runtime."""

from __future__ import annotations

from pathlib import Path

from kvcore.contract import BlockSizer, Detection, PlatformInfo, hookimpl
from kvcore.contract.probes import find_library
from kvcore.contract.runtimes.binding import PythonBinding
from kvcore.contract.runtimes.choose import Runtimes
from kvcore.contract.runtimes.driver import DriverRuntime
from kvcore.contract.runtimes.management import Management
from kvcore.contract.runtimes.on_paddle import PaddleRuntime
from kvcore.contract.runtimes.on_torch import TorchRuntime
from kvcore.contract.runtimes.platform import AcceleratorPlatform, Surroundings

__all__ = ["CudaBlockSizer", "plugin"]

__version__ = "0.1.0"
CONTRACT = 1
PCI_VENDOR = 0x10DE
#: Where WSL and Jetson keep the driver's libraries, beside the loader's own folders.
FOLDERS = ("/usr/lib/wsl/lib", "/usr/lib/aarch64-linux-gnu/tegra", "/usr/lib/aarch64-linux-gnu/nvidia")


class CudaBlockSizer(AcceleratorPlatform):
    """NVIDIA's names and numbers; what it does is shared with other CUDA-compatible vendors."""

    def __init__(self, root: Path = Path("/")) -> None:
        surroundings = Surroundings(
            "cuda",
            "kvcore-cuda",
            PCI_VENDOR,
            "libnvidia-ml.so.1",
            "install the NVIDIA driver; in a container, NVIDIA_DRIVER_CAPABILITIES must include utility",
            nodes="dev/nvidia[0-9]*",
            root=root,
        )
        paddle = PaddleRuntime("gpu", ("paddlepaddle-gpu",))
        super().__init__(surroundings, Runtimes("kvcore-cuda", (DriverRuntime(), paddle, TorchRuntime())))

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """By what is installed beside the plugin."""
        return PlatformInfo("cuda", "NVIDIA", __version__, CONTRACT, self.capabilities())

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """By NVML, and only where it is not here by the runtime; a card counts by its PCI vendor."""
        return self.detection()

    def managements(self) -> list[Management]:
        """NVML alone, through NVIDIA's own binding."""
        return [PythonBinding("nvml", "pynvml", (2, 1), "nvidia-ml-py")]

    def hardware_without_pci(self) -> str | None:
        """Jetson's integrated devices, and Windows' devices seen from WSL, are no PCI functions.

        WSL has /dev/dxg for every vendor's device; NVIDIA's libraries beside it make it NVIDIA's.
        """
        root = self.surroundings.root
        try:
            if b"nvidia,tegra" in (root / "proc/device-tree/compatible").read_bytes():
                return "an integrated device (Tegra)"
        except OSError:
            pass  # not a machine with a device tree
        libraries = (self.surroundings.library, "libcuda.so.1")
        if (root / "dev/dxg").exists() and any(find_library(name, FOLDERS) for name in libraries):
            return "a device of Windows (/dev/dxg)"
        return None

    def library_folders(self) -> tuple[str, ...]:
        """Beside the loader's own."""
        return FOLDERS


plugin: BlockSizer = CudaBlockSizer()
