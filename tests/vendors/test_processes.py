"""Threads and forks: what both platforms declare, and what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
PARTS = {"cuda": ("nvml", "cuda"), "iluvatar": ("ixml", "cuda")}
START = """
import threading
from kvcore_{platform}.platform import plugin
MIB = 1 << 20
def allocate(device, nbytes=2 * MIB):
    return plugin.kvcore_allocate(device, AllocationRequest("t", nbytes, 256, nbytes))
def tried(call):
    try:
        return call()
    except KvcoreError as error:
        return [error.code, error.hint]
def in_child(call):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = tried(call)
        except BaseException as error:
            answer = repr(error)
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        said = json.load(stream)
    os.waitpid(child, 0)
    return said
"""


def on(host: Machine, platform: str, code: str) -> Any:
    return host.ask(START.replace("{platform}", platform) + code)


@pytest.fixture(params=PARTS)
def host(request: pytest.FixtureRequest, machine: Make) -> tuple[Machine, str]:
    platform = request.param
    return machine(*PARTS[platform]).card(0, free=GIB, pids="self:0"), platform


def test_declared(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
capabilities = plugin.kvcore_platform().capabilities
answer = [[capabilities[c].support.value, capabilities[c].reason] for c in (Capability.THREADS, Capability.FORK)]
""",
    )
    assert answer == [["full", None], ["unsupported", "a driver's context does not survive a fork"]]


def test_a_child_that_is_forked_after_detection_alone_reads_and_allocates(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
plugin.kvcore_detect()
def work():
    device = plugin.kvcore_devices()[0]
    return [device.key, plugin.kvcore_read_memory(device)[0].free, plugin.kvcore_release(allocate(device))]
answer = in_child(work)
""",
    )
    assert answer == [UUIDS[0], GIB, 2 << 20]


def test_a_child_that_is_forked_later_is_refused_with_what_to_do(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
device = plugin.kvcore_devices()[0]
buffer = allocate(device)
plugin.kvcore_write(buffer, 0, b"kvcore")
calls = {
    "devices": plugin.kvcore_devices,
    "read_memory": lambda: plugin.kvcore_read_memory(device),
    "stats": lambda: plugin.kvcore_memory_stats(device),
    "allocate": lambda: allocate(device),
    "read": lambda: plugin.kvcore_read(buffer, 0, 1),
    "write": lambda: plugin.kvcore_write(buffer, 0, b"lost"),
    "fill": lambda: plugin.kvcore_fill(buffer, 0, 1, 1),
    "tensor": lambda: plugin.kvcore_tensor(buffer, TensorView((1,), "uint8"), "torch"),
    "release": lambda: plugin.kvcore_release(buffer),
}
refused = {name: in_child(call) for name, call in calls.items()}
detected = in_child(lambda: plugin.kvcore_detect().state.value)
# What the children did, and that they ended, changed nothing here.
answer = [refused, detected, plugin.kvcore_read(buffer, 0, 6).decode(), plugin.kvcore_release(buffer)]
""",
    )
    refused, detected, read, freed = answer
    assert {code for code, _ in refused.values()} == {"KV-DEV-030"}, refused
    assert all("spawn" in hint for _, hint in refused.values())
    assert (detected, read, freed) == ("available", "kvcore", 2 << 20)
    assert sum(host[0].held()) == 0


def test_a_buffer_is_used_and_released_by_another_thread(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
device = plugin.kvcore_devices()[0]
buffer = allocate(device)
said = []
def work():
    plugin.kvcore_write(buffer, 7, b"kvcore")
    said.append(plugin.kvcore_read(buffer, 6, 8).hex())
    said.append(plugin.kvcore_read_memory(device)[0].own)
    said.append(plugin.kvcore_release(buffer))
thread = threading.Thread(target=work)
thread.start()
thread.join()
answer = [*said, plugin.kvcore_memory_stats(device).current]
""",
    )
    assert answer == [b"\0kvcore\0".hex(), 2 << 20, 2 << 20, 0]


def test_threads_that_allocate_at_once_are_counted_exactly(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
import sys
sys.setswitchinterval(1e-6)
device = plugin.kvcore_devices()[0]
def work(number):
    for _ in range(40):
        buffer = allocate(device)
        plugin.kvcore_fill(buffer, 0, 64, number)
        assert plugin.kvcore_read(buffer, 0, 64) == bytes([number]) * 64
        plugin.kvcore_release(buffer)
threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
answer = plugin.kvcore_memory_stats(device).current
""",
    )
    assert answer == 0
    assert sum(host[0].held()) == 0


def test_two_threads_release_one_buffer_once(host: tuple[Machine, str]) -> None:
    answer = on(
        *host,
        """
device = plugin.kvcore_devices()[0]
answer = []
for _ in range(20):
    buffer, said, barrier = allocate(device), [], threading.Barrier(2)
    def work():
        barrier.wait()
        said.append(tried(lambda: plugin.kvcore_release(buffer)))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    answer.append(sorted(map(str, said)))
""",
    )
    assert {tuple(said) for said in answer} == {(str(2 << 20), "['KV-BUF-001', None]")}
