"""Committing and zeroing host memory, beside a parallel memset of fresh pages and what frameworks do.

A cache of 96 tensors, as Qwen3-30B-A3B has on each of four ranks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable

from kvcore.contract import AllocationRequest
from kvcore.registry import default_registry

TENSORS = 96
SIZE = 22_364_160
ROUNDS = 7
MADV_HUGEPAGE = 14


def kvcore_buffers() -> Callable[[], object]:
    """The cpu platform's buffers."""
    platform = default_registry().platform("cpu")
    device = platform.device()
    buffers = [platform.allocate(device, AllocationRequest(str(n), SIZE, 4096, SIZE)) for n in range(TENSORS)]
    return lambda: [platform.release(buffer) for buffer in buffers]


def parallel_memset() -> Callable[[], object]:
    """Fresh mappings, advised to be huge, set to zero by as many threads as there are cores."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    maps = [mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(TENSORS)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in maps]
    cores = len(os.sched_getaffinity(0))

    def work(first: int) -> None:
        for address in addresses[first::cores]:
            libc.madvise(address, SIZE, MADV_HUGEPAGE)
            libc.memset(address, 0, SIZE)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lambda: [m.close() for m in maps]


def numpy_zero_and_touch() -> Callable[[], object]:
    """What numpy offers: zeros are lazy, so each page is touched."""
    import numpy as np

    arrays = [np.zeros(SIZE, np.uint8) for _ in range(TENSORS)]
    for array in arrays:
        array[::4096] = 0
    return arrays.clear


def paddle_zeros() -> Callable[[], object]:
    """What Paddle offers: zeros are written."""
    import paddle

    tensors = [paddle.zeros([SIZE], dtype="uint8") for _ in range(TENSORS)]
    return tensors.clear


def main() -> None:
    """Interleaved rounds; the median time of each over that of the parallel memset."""
    ways = {"parallel memset": parallel_memset, "kvcore": kvcore_buffers, "numpy zeros, touched": numpy_zero_and_touch}
    if importlib.util.find_spec("paddle") is not None:
        ways["paddle zeros"] = paddle_zeros
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            release = way()
            took = time.perf_counter() - start
            release()
            if number:
                times[name].append(took)
    base = statistics.median(times["parallel memset"])
    for name, measured in times.items():
        median = statistics.median(measured)
        speed = TENSORS * SIZE / median / 1024**3
        target = "  target at least 0.80" if name == "kvcore" else ""
        print(f"{name:22} {speed:6.2f} GiB/s  {base / median:5.2f} x the speed of a parallel memset{target}")
