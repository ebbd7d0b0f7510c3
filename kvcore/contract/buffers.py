"""What platforms share once they have allocated: the rules of a buffer's memory, and the hooks that reach it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvcore.contract.base import not_offered
from kvcore.contract.capabilities import Capability, PlatformInfo, Support
from kvcore.contract.facts import Buffer, TensorView
from kvcore.contract.hookspecs import hookimpl
from kvcore.errors import BufferMisuse

__all__ = ["BufferHooks", "BufferMemory", "check_span"]


class BufferMemory(ABC):
    """The memory of one buffer: what a platform keeps as the buffer's handle."""

    name: str
    nbytes: int

    @abstractmethod
    def release(self) -> int:
        """Give the memory back; returns the bytes freed. Refused while a tensor over it is alive, and twice."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Copy ``data`` to ``offset``."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset``."""

    @abstractmethod
    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` to ``value``."""

    @abstractmethod
    def tensor(self, view: TensorView, framework: str) -> object:
        """A tensor over the memory, without a copy."""


class BufferHooks:
    """The hooks for what is done with a buffer, for platforms whose buffers' handles are a :class:`BufferMemory`.

    A platform that does not offer ALLOCATE here refuses each of them by that.
    """

    def kvcore_platform(self) -> PlatformInfo:
        """The platform's own, which must come with this."""
        raise NotImplementedError(type(self).__name__)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        """Give it back."""
        return self._memory(buffer).release()

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Copy into it."""
        self._memory(buffer).write(offset, data)

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """Copy out of it."""
        return self._memory(buffer).read(offset, nbytes)

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set its bytes where they are."""
        self._memory(buffer).fill(offset, nbytes, value)

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        """Of a framework that can share the memory."""
        return self._memory(buffer).tensor(view, framework)

    def _memory(self, buffer: Buffer) -> BufferMemory:
        if isinstance(buffer.handle, BufferMemory):
            return buffer.handle
        info = self.kvcore_platform()
        if info.capabilities[Capability.ALLOCATE].support is not Support.FULL:
            raise not_offered(info, Capability.ALLOCATE)
        raise BufferMisuse(
            "a buffer that no allocation of this platform gave",
            code="KV-BUF-006",
            where=buffer.name,
            got=type(buffer.handle).__name__,
            expected="a buffer from kvcore_allocate of the same platform",
        )


def check_span(name: str, size: int, offset: int, nbytes: int) -> None:
    """Raises :class:`BufferMisuse` unless ``nbytes`` bytes at ``offset`` are within the ``size`` bytes of ``name``."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise BufferMisuse(
            "an access outside the buffer",
            code="KV-BUF-003",
            where=name,
            got=f"{nbytes} bytes at offset {offset}",
            expected=f"within {size} bytes",
        )
