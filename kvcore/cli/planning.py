"""What ``plan``, ``allocate`` and ``explain`` share: options from the table of settings, and a plan from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from kvcore import api
from kvcore.contract.facts import DeviceFacts
from kvcore.documents import load_device_profile
from kvcore.errors import KvcoreError, PolicyError
from kvcore.geometry import ModelConfig, read_config
from kvcore.registry import Choice, default_registry
from kvcore.settings import SETTINGS, Resolved, policy_of, resolve
from kvcore.sizing.plan import Alternative, Plan

__all__ = ["chosen_facts", "made_plan", "resolved", "setting_options"]

#: Tensor-parallel sizes that a refusal tries, as far as the heads allow.
TP_TRIED = (1, 2, 4, 8, 16, 32, 64)


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each setting, and ``--policy``."""
    command = click.option("--policy", "policy_file", metavar="FILE", help="TOML file with settings.")(command)
    for setting in reversed(SETTINGS):
        text = f"{setting.help} [{setting.variable}; default: {setting.default}]"
        if setting.switch:
            option = click.option(*setting.flags, setting.name, is_flag=True, help=text)
        else:
            option = click.option(
                *setting.flags, setting.name, metavar=setting.metavar, multiple=setting.many, help=text
            )
        command = option(command)
    return command


def resolved(options: dict[str, Any]) -> Resolved:
    """The settings from a command's options, the environment and the policy file."""
    file = options.pop("policy_file")
    return resolve(options, file=file)


def chosen_facts(settings: Resolved, *, needed: bool) -> tuple[tuple[DeviceFacts, ...], Choice | None]:
    """What is known of the devices to plan for: recorded, or read here by the rule of choice.

    Without a name for a device and with an absolute size there is nothing to measure, unless it is ``needed``.
    """
    profiles = settings.get("device_profile")
    if profiles is not None:
        if settings.get("platform") is not None or settings.get("device") is not None:
            raise PolicyError(
                "a device profile takes the place of a device",
                code="KV-POL-044",
                where=settings.origins["device_profile"],
                expected="either a profile, or a platform and device",
            )
        return tuple(load_device_profile(path) for path in profiles), None
    named = settings.get("platform") is not None or settings.get("device") is not None
    if not named and not needed and settings.get("kv_cache_memory") is not None:
        return (), None
    choice = default_registry().choose(settings.get("platform"))
    device = choice.platform.device(settings.get("device"))
    return (api.device_facts(device),), choice


def made_plan(model: str, settings: Resolved, facts: tuple[DeviceFacts, ...]) -> Plan:
    """The plan that the settings ask for, for every rank."""
    config = read_config(model)
    ranks = _layouts(config, settings)
    return api.plan(
        ranks,
        facts=None if not facts else (facts[0] if len(facts) == 1 else facts),
        policy=policy_of(settings),
        alternatives=lambda: _alternatives(config, settings),
    )


def fallback_note(choice: Choice | None) -> tuple[str, ...]:
    """Said on standard error when the CPU stands in for an accelerator."""
    return (f"using cpu: {choice.reason}",) if choice is not None and choice.fallback else ()


def _layouts(config: ModelConfig, settings: Resolved, **changed: Any) -> Any:
    names = ("tp", "pp", "pp_layers", "block_size", "dtype", "kv_cache_dtype", "draft_layers")
    options = {name: settings.values[name] for name in names if name in settings.values}
    return api.layouts(config, **{**options, **changed})


def _alternatives(config: ModelConfig, settings: Resolved) -> Iterable[Alternative]:
    """Other divisions and a smaller cache dtype, as far as the model allows them."""
    tried: list[tuple[str, str, dict[str, Any]]] = [
        ("tp", str(tp), {"tp": tp}) for tp in TP_TRIED if tp > settings.get("tp", 1)
    ]
    if settings.get("kv_cache_dtype", "auto") == "auto":
        tried.append(("kv_cache_dtype", "fp8", {"kv_cache_dtype": "fp8"}))
    for knob, value, changed in tried:
        try:
            layouts = _layouts(config, settings, **changed)
        except KvcoreError:
            continue  # the heads cannot be divided that way: it is no alternative
        yield Alternative(knob, value, layouts)
