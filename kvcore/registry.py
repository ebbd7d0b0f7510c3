"""Plugins: find them, load each by itself, say what became of it, and choose one platform without guessing.

kvcore reads the entry points of group ``kvcore`` itself. pluggy's own loader stops at the first import that fails,
and skips a second distribution of the same name without a word; here each entry point ends in a
:class:`PluginRecord`, and a broken one stops nobody but itself.

Environment:

``KVCORE_PLATFORM``
    The platform to use. As with ``--platform``, it is used or the error says why not.
``KVCORE_PLUGINS``
    Comma-separated names of the plugins to load beside the built-in ones; empty means none.
``KVCORE_DISABLE_PLUGINS``
    Comma-separated names of plugins not to load, built-in ones included.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import pluggy

from kvcore.contract.capabilities import PlatformInfo
from kvcore.contract.facts import Detection, DetectionState, Device, Limit, Phase, Reserve
from kvcore.contract.hookspecs import BlockSizer, plugin_manager
from kvcore.contract.layout import CacheLayout
from kvcore.contract.validate import platform_faults
from kvcore.errors import KvcoreError, NoPlatform, PluginError
from kvcore.handle import PlatformHandle

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Choice", "PluginRecord", "PluginState", "Registry", "default_registry"]

GROUP = "kvcore"


class PluginState(str, Enum):
    """What became of an entry point."""

    LOADED = "loaded"
    REFUSED = "refused"  #: it broke the contract, was written for another version of it, or its name is contested
    FAILED = "failed"  #: importing it or asking who it is raised an exception
    DUPLICATE = "duplicate"  #: the same entry point found a second time
    BLOCKED = "blocked"  #: left out by KVCORE_PLUGINS or KVCORE_DISABLE_PLUGINS


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One entry point: where it came from, what became of it and why. ``info`` is set for loaded platforms."""

    name: str
    value: str
    distribution: str
    version: str
    path: str | None
    state: PluginState
    reason: str | None = None
    traceback: str | None = None
    info: PlatformInfo | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen platform and, in a sentence, why. ``fallback`` is true if the CPU stands in for an accelerator."""

    platform: PlatformHandle
    reason: str
    fallback: bool


class Registry:
    """The plugins of one process. :func:`default_registry` is the usual way to get it."""

    def __init__(self, entry_points: Iterable[EntryPoint], environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._manager = plugin_manager()
        self._plugins: dict[str, object] = {}
        self._handles: dict[str, PlatformHandle] = {}
        self._by_hook: dict[str, list[tuple[str, Any]]] = {}
        found = _deduplicated(sorted(entry_points, key=lambda e: (e.name, e.value)))
        self._check_names({entry.name for entry, _ in found})
        self.records = tuple(self._load(entry, record) for entry, record in found)
        self._build_handles()

    @property
    def platforms(self) -> dict[str, PlatformHandle]:
        """The loaded platforms by name."""
        return dict(self._handles)

    def platform(self, name: str) -> PlatformHandle:
        """The loaded platform ``name``; raises :class:`NoPlatform` that says what became of it."""
        handle = self._handles.get(name)
        if handle is not None:
            return handle
        record = next((r for r in self.records if r.name == name), None)
        raise NoPlatform(
            f"platform {name} is not loaded",
            code="KV-PLG-011",
            got=f"{record.state.value}: {record.reason}" if record else "no plugin of that name is installed",
            expected=", ".join(sorted(self._handles)) or "at least one loaded platform",
            hint=f"pip install kvcore-{name}" if record is None else "`kvcore doctor` shows the details",
        )

    def detect(self) -> dict[str, Detection]:
        """What every loaded platform detects, each by itself; a failure counts as found but unusable."""
        return {name: self._detect(handle) for name, handle in self._handles.items()}

    def choose(self, name: str | None = None) -> Choice:
        """The platform to use.

        ``name`` or ``KVCORE_PLATFORM`` decides; else the one accelerator that is available; else ``cpu`` if every
        accelerator's plugin answered that its hardware is not here. Anything else is :class:`NoPlatform`, which
        shows every plugin's evidence: kvcore does not guess between vendors, nor hide one that failed.
        """
        asked, origin = (name, "asked for") if name else (self._environ.get("KVCORE_PLATFORM"), "KVCORE_PLATFORM")
        if asked:
            return self._explicit(asked, origin)
        found = {n: self._detect(h) for n, h in self._handles.items() if h.info.accelerator}
        available = [n for n, detection in found.items() if detection.state is DetectionState.AVAILABLE]
        if len(available) == 1:
            reason = f"the only accelerator available: {found[available[0]].reason}"
            return Choice(self._handles[available[0]], reason, fallback=False)
        doubts = [n for n, detection in found.items() if detection.state is DetectionState.UNUSABLE]
        broken = [r.name for r in self.records if r.state in (PluginState.FAILED, PluginState.REFUSED)]
        if available or doubts or broken or "cpu" not in self._handles:
            raise self._no_choice(available, doubts, broken, found)
        absent = "; ".join(f"{n}: {d.reason}" for n, d in found.items()) or "no accelerator plugin is installed"
        return Choice(self._handles["cpu"], f"no accelerator is here ({absent})", fallback=True)

    def limits(self, device: Device, layout: CacheLayout) -> tuple[Limit, ...]:
        """The limits that all plugins state for this device and layout."""
        return tuple(self._collect("kvcore_limits", Limit, device=device, layout=layout))

    def reserves(self, device: Device, phase: Phase) -> tuple[Reserve, ...]:
        """The reserves that all plugins state for this device after ``phase``."""
        return tuple(self._collect("kvcore_reserves", Reserve, device=device, phase=phase))

    def notify(self, hook: str, **arguments: object) -> list[str]:
        """Call an observers' hook; returns what went wrong, because a watcher must not stop the work."""
        problems = []
        for name, caller in self._callers(hook):
            try:
                caller(**arguments)
            except Exception as error:  # noqa: BLE001 - reported to the caller, which shows it
                problems.append(f"observer {name} failed in {hook}: {type(error).__name__}: {error}")
        return problems

    def _check_names(self, known: set[str]) -> None:
        for variable in ("KVCORE_PLUGINS", "KVCORE_DISABLE_PLUGINS"):
            unknown = _names(self._environ.get(variable, "")) - known
            if unknown:
                raise PluginError(
                    f"{variable} names plugins that are not installed",
                    code="KV-PLG-020",
                    where=variable,
                    got=", ".join(sorted(unknown)),
                    expected=", ".join(sorted(known)),
                )

    def _load(self, entry: EntryPoint, record: PluginRecord) -> PluginRecord:
        blocked = self._blocked(record)
        if blocked is not None:
            return replace(record, state=PluginState.BLOCKED, reason=blocked)
        if record.state is not PluginState.LOADED:
            return record
        try:
            plugin = entry.load()
            info = _examine(plugin, record.name)
        except pluggy.PluginValidationError as error:
            return replace(record, state=PluginState.REFUSED, reason=str(error))
        except KvcoreError as error:
            return replace(record, state=PluginState.REFUSED, reason=f"{error.what}: {error.got}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded, shown, and never silent
            reason = f"{type(error).__name__}: {error}"
            return replace(record, state=PluginState.FAILED, reason=reason, traceback=traceback.format_exc())
        self._manager.register(plugin, record.name)
        self._plugins[record.name] = plugin
        return replace(record, info=info)

    def _blocked(self, record: PluginRecord) -> str | None:
        if record.name in _names(self._environ.get("KVCORE_DISABLE_PLUGINS", "")):
            return "left out by KVCORE_DISABLE_PLUGINS"
        allowed = self._environ.get("KVCORE_PLUGINS")
        if allowed is not None and record.distribution != "kvcore" and record.name not in _names(allowed):
            return "not in KVCORE_PLUGINS"
        return None

    def _build_handles(self) -> None:
        platforms = {r.name: r for r in self.records if r.info is not None}
        for name, record in platforms.items():
            assert record.info is not None
            others = [self._plugins[other] for other in platforms if other != name]
            self._handles[name] = PlatformHandle(self._manager, name, record.info, others, record.version)

    def _detect(self, handle: PlatformHandle) -> Detection:
        try:
            return handle.detect()
        except KvcoreError as error:
            reason = f"detection failed: {error.what}: {error.got}"
            return Detection(DetectionState.UNUSABLE, reason, hint=error.hint)

    def _explicit(self, name: str, origin: str) -> Choice:
        handle = self.platform(name)
        detection = self._detect(handle)
        if detection.state is not DetectionState.AVAILABLE:
            raise NoPlatform(
                f"platform {name} is not available",
                code="KV-PLG-012",
                where=origin,
                got=f"{detection.state.value}: {detection.reason}",
                expected="available",
                hint=detection.hint,
            )
        return Choice(handle, f"{origin}: {detection.reason}", fallback=False)

    def _no_choice(
        self, available: list[str], doubts: list[str], broken: list[str], found: Mapping[str, Detection]
    ) -> NoPlatform:
        if available:
            what = f"several accelerators are available: {', '.join(available)}"
        elif doubts:
            what = f"an accelerator is here but cannot be used: {', '.join(doubts)}"
        elif broken:
            what = f"a plugin could not be loaded: {', '.join(broken)}"
        else:
            what = "no platform is loaded"
        lines = [_evidence(name, detection) for name, detection in found.items()]
        lines += [f"{r.name}: {r.state.value}: {r.reason}" for r in self.records if r.name in broken]
        return NoPlatform(
            what,
            code="KV-PLG-010",
            got="; ".join(lines),
            expected="exactly one available accelerator, or none at all",
            hint=f"choose one with --platform or KVCORE_PLATFORM ({', '.join(sorted(self._handles))})",
        )

    def _collect(self, hook: str, kind: type[Any], **arguments: object) -> list[Any]:
        collected = []
        for name, caller in self._callers(hook):
            try:
                answers = caller(**arguments)
            except KvcoreError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plugin {name} failed in {hook}",
                    code="KV-PLG-002",
                    where=f"plugin {name}, {hook}",
                    got=f"{type(error).__name__}: {error}",
                ) from error
            for item in (item for answer in answers for item in answer):
                if not isinstance(item, kind):
                    raise PluginError(
                        f"plugin {name} broke the contract in {hook}",
                        code="KV-PLG-003",
                        where=f"plugin {name}, {hook}",
                        got=type(item).__name__,
                        expected=f"a list of {kind.__name__}",
                    )
                collected.append(item)
        return collected

    def _callers(self, hook: str) -> list[tuple[str, Any]]:
        """A caller for each plugin that answers ``hook``: that plugin alone, and every wrapper around it.

        Called one by one, so that one failure does not hide the other answers.
        """
        known = self._by_hook.get(hook)
        if known is None:
            implementations = getattr(self._manager.hook, hook).get_hookimpls()
            answering = {i.plugin_name: i.plugin for i in implementations if not (i.wrapper or i.hookwrapper)}
            known = self._by_hook[hook] = [
                (name, self._manager.subset_hook_caller(hook, [p for n, p in answering.items() if n != name]))
                for name in answering
            ]
        return known


@functools.cache
def default_registry() -> Registry:
    """The registry of the plugins installed beside this process, made once."""
    # Importing importlib.metadata costs more than scanning the entry points, so it waits until someone asks.
    from importlib.metadata import entry_points

    return Registry(entry_points(group=GROUP), os.environ)


def _deduplicated(entries: list[EntryPoint]) -> list[tuple[EntryPoint, PluginRecord]]:
    """Each entry point once; the same one found again, or a name that two distributions claim, is a duplicate."""
    records = []
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    for name, same_name in by_name.items():
        claims = {(_distribution(entry)[0], entry.value) for entry in same_name}
        for position, entry in enumerate(same_name):
            distribution, version, path = _distribution(entry)
            state, reason = PluginState.LOADED, None
            if len(claims) > 1:
                # Taking either would let the order of installation pick the vendor.
                others = ", ".join(sorted(f"{d} ({v})" for d, v in claims))
                state, reason = PluginState.REFUSED, f"the name {name} is claimed by {others}"
            elif position:
                state, reason = PluginState.DUPLICATE, f"found again at {path}"
            records.append((entry, PluginRecord(name, entry.value, distribution, version, path, state, reason)))
    return records


def _distribution(entry: EntryPoint) -> tuple[str, str, str | None]:
    if entry.dist is None:
        return "unknown", "unknown", None
    path = getattr(entry.dist, "_path", None)
    return entry.dist.name, entry.dist.version, os.path.realpath(path) if path is not None else None


def _examine(plugin: object, name: str) -> PlatformInfo | None:
    """Check a plugin's hooks by themselves, and its declaration if it is a platform.

    Raises :class:`pluggy.PluginValidationError` for a misspelt hook or argument and :class:`PluginError` for a
    declaration that the contract does not allow.
    """
    alone = plugin_manager()
    alone.register(plugin, name)
    alone.check_pending()
    if not any(caller.name == "kvcore_platform" for caller in alone.get_hookcallers(plugin) or ()):
        return None
    missing = sorted(set(_platform_hooks()) - {caller.name for caller in alone.get_hookcallers(plugin) or ()})
    if missing:
        raise PluginError("a platform implements every hook", got=f"missing {', '.join(missing)}")
    answers = alone.hook.kvcore_platform()
    info = answers[0] if answers else None
    if not isinstance(info, PlatformInfo):
        raise PluginError("kvcore_platform answers a PlatformInfo", got=type(info).__name__)
    faults = platform_faults(info)
    if info.name != name:
        faults.append(f"calls itself {info.name}, and its entry point {name}")
    if faults:
        raise PluginError("its declaration is not acceptable", got="; ".join(faults))
    return info


def _platform_hooks() -> list[str]:
    return [name for name in vars(BlockSizer) if name.startswith("kvcore_")]


def _names(text: str) -> set[str]:
    return {name.strip() for name in text.split(",") if name.strip()}


def _evidence(name: str, detection: Detection) -> str:
    shown = ", ".join(f"{e.name}={e.value}" for e in detection.evidence)
    return f"{name}: {detection.state.value}: {detection.reason}{f' [{shown}]' if shown else ''}"
