"""Which runtime allocates: the one asked for, else the one that this process uses, else the first that works."""

from __future__ import annotations

import collections.abc
import os

from kvcore.contract.runtimes.interface import Runtime, RuntimeUnavailable
from kvcore.errors import CapabilityMissing, PolicyError

__all__ = ["CONTEXT_VARIABLE", "RUNTIME_VARIABLE", "Runtimes"]

#: Names the runtime: ``driver``, ``paddle`` or ``torch``.
RUNTIME_VARIABLE = "KVCORE_RUNTIME"
#: ``1`` lets a reading create a context, which takes memory of its own, where nothing else says what is free.
CONTEXT_VARIABLE = "KVCORE_ALLOW_CONTEXT"


class Runtimes:
    """The runtimes of one platform, in the order in which they are tried; chosen once a process."""

    def __init__(
        self, distribution: str, runtimes: collections.abc.Sequence[Runtime], *, hint: str | None = None
    ) -> None:
        self._distribution = distribution
        self._hint = hint or f"pip install '{distribution}[driver]'"
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._chosen: Runtime | None = None

    def installed(self) -> list[str]:
        """The names of those whose packages are here; imports none."""
        return [name for name, runtime in self._runtimes.items() if runtime.installed()]

    def named(self, name: str) -> Runtime | None:
        """The runtime ``name``, if its packages are here."""
        runtime = self._runtimes.get(name)
        return runtime if runtime is not None and runtime.installed() else None

    def asked(self) -> str | None:
        """The runtime that KVCORE_RUNTIME names; raises :class:`PolicyError` for one that does not exist."""
        name = os.environ.get(RUNTIME_VARIABLE)
        if name is not None and name not in self._runtimes:
            raise PolicyError(
                "no such runtime",
                code="KV-POL-060",
                where=RUNTIME_VARIABLE,
                got=ascii(name),
                expected=", ".join(sorted(self._runtimes)),
            )
        return name

    def chosen(self) -> Runtime:
        """The runtime to allocate with; raises :class:`CapabilityMissing` that says why each one is not it."""
        if self._chosen is None:
            self._chosen = self._choose()
        self._chosen.check_process()
        return self._chosen

    def to_plan_for(self) -> Runtime:
        """The runtime whose limits a plan keeps to: the one asked for, started or not, else the one chosen."""
        asked = self.asked()
        return self._runtimes[asked] if asked else self.chosen()

    def candidates(self) -> list[Runtime]:
        """Those that are tried, in order; none is started."""
        asked = self.asked()
        return [self._runtimes[asked]] if asked else self._in_order()

    def _choose(self) -> Runtime:
        asked = self.asked()
        candidates = self.candidates()
        reasons = []
        for runtime in candidates:
            try:
                runtime.start()
            except RuntimeUnavailable as unavailable:
                reasons.append(f"{runtime.name}: {unavailable}")
                continue
            return runtime
        absent = [name for name in self._runtimes if name not in {runtime.name for runtime in candidates}]
        reasons += [f"{name}: no build for this platform is installed" for name in absent if not asked]
        raise CapabilityMissing(
            "no runtime here can allocate on this platform's devices",
            code="KV-CAP-010",
            where=self._distribution,
            got="; ".join(reasons),
            expected=f"one of {', '.join(self._runtimes)}",
            hint=self._hint,
        )

    def _in_order(self) -> list[Runtime]:
        """An engine's framework before the driver, so that the cache comes from the allocator that it counts with."""
        usable = [runtime for runtime in self._runtimes.values() if runtime.installed()]
        frameworks = [runtime for runtime in usable if runtime.name != "driver" and runtime.imported()]
        return [*frameworks, *(runtime for runtime in usable if runtime not in frameworks)]
