"""THR: threads and forks, as declared."""

from __future__ import annotations

import os
import threading

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import CheckFailed, check
from kvcore.contract.capabilities import Capability
from kvcore.errors import KvcoreError

ALLOCATE, RAW, READ = Capability.ALLOCATE, Capability.RAW_ACCESS, Capability.READ_MEMORY
THREADS, ROUNDS = 4, 25


@check("THR-001", ALLOCATE, RAW, Capability.THREADS)
def threads_do_not_disturb_each_other(bench: Bench) -> None:
    """Four threads that allocate, write, read and release get what is theirs, and leave nothing.

    Why: an engine's loader, its cache manager and its health check are threads of one process.
    Fix: a lock around what is counted; no state between two calls.
    """
    device = bench.device()
    nbytes = max(bench.limits(device).granularity, bench.chunk(device) // 16)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(ROUNDS):
                buffer = bench.allocate(nbytes, device)
                bench.fill(buffer, 0, nbytes, number)
                seen = {bench.read(buffer, offset, 1)[0] for offset in (0, nbytes // 2, nbytes - 1)}
                bench.expect(seen == {number}, f"kvcore_read in thread {number}", got=seen, expected={number})
                bench.release(buffer)
        except BaseException as error:  # noqa: BLE001 - raised below, on the check's own thread
            errors.append(error)

    def together() -> None:
        threads = [threading.Thread(target=work, args=(number + 1,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    together()  # the first threads bring their heaps and contexts with them
    if bench.supports(READ):
        before = bench.free(device)
        together()
        lost = before - bench.free(device)
        bench.expect(
            abs(lost) < nbytes,
            "free memory after four threads",
            got=f"{lost} less",
            expected="no less",
            unit="bytes",
            device=device,
        )


@check("THR-002", Capability.DEVICES, READ, fresh=True)
def a_fork_is_as_declared(bench: Bench) -> None:
    """After a fork the child's readings work if FORK is FULL, and else are refused with an error of kvcore's.

    Why: engines fork workers after the parent looked at its devices; a driver's context does not survive that.
    Fix: remember the process id; in another process start anew, or raise DeviceError.
    """
    bench.free(bench.device())
    if bench.supports(ALLOCATE):
        bench.release(bench.allocate(bench.limits(bench.device()).granularity))
    said = _in_child(bench)
    if bench.supports(Capability.FORK):
        bench.expect(said == "read", "kvcore_read_memory in a forked child", got=said, expected="read")
    else:
        bench.expect(
            said in ("read", "refused"), "kvcore_read_memory in a forked child", got=said, expected="refused, or read"
        )


def _in_child(bench: Bench) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                bench.free(bench.device())
                answer = "read"
            except KvcoreError:
                answer = "refused"
            except BaseException as error:  # noqa: BLE001 - told to the parent
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    if not said:
        raise CheckFailed(
            "kvcore_read_memory in a forked child", got="its death", expected="an answer or a DeviceError"
        )
    return said
