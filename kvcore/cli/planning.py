"""What ``plan``, ``allocate`` and ``explain`` share: options from the table of settings, and a plan from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from kvcore import api
from kvcore.catalogue import device_profile
from kvcore.cli.answer import note
from kvcore.contract.facts import Basis, Device, DeviceFacts, Phase, Reserve, ReserveKind
from kvcore.conventions import GENERIC
from kvcore.errors import KvcoreError, PolicyError
from kvcore.geometry import ModelConfig, read_config
from kvcore.geometry.weights import INDEX, checkpoint_bytes
from kvcore.registry import default_registry
from kvcore.settings import FILE_VARIABLE, SETTINGS, Resolved, misspelled_variables, policy_of, resolve
from kvcore.sizing.plan import Alternative, Plan
from kvcore.units import format_bytes

__all__ = ["chosen_device", "made_plan", "resolved", "setting_options"]

#: Tensor-parallel sizes that a refusal tries, as far as the heads allow.
TP_TRIED = (1, 2, 4, 8, 16, 32, 64)


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each setting, and ``--policy``."""
    text = f"TOML file with settings. [{FILE_VARIABLE}]"
    command = click.option("--policy", "policy_file", metavar="FILE", help=text)(command)
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
    for line in misspelled_variables():
        note(line)
    return resolve(options, file=file)


def chosen_device(settings: Resolved) -> Device:
    """The device that the settings name, or that the rule of choice gives; says so if the CPU stands in."""
    choice = default_registry().choose(settings.get("platform"))
    if choice.fallback:
        note(f"using cpu: {choice.reason}")
    return choice.platform.device(settings.get("device"))


def _chosen_facts(settings: Resolved, *, needed: bool) -> tuple[DeviceFacts, ...]:
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
        return tuple(device_profile(name) for name in profiles)
    named = settings.get("platform") is not None or settings.get("device") is not None
    if not named and not needed and settings.get("kv_cache_memory") is not None:
        return ()
    return (api.device_facts(chosen_device(settings)),)


def made_plan(model: str, settings: Resolved, *, device_needed: bool = False) -> Plan:
    """The plan that the settings ask for, for every rank. Nothing is measured before all input is found right."""
    policy = policy_of(settings)
    model = _located(model)
    config = read_config(model)
    estimate = _weights(model, config, settings)
    ranks = _layouts(config, settings)
    facts = _chosen_facts(settings, needed=device_needed)
    plan = api.plan(
        ranks,
        facts=None if not facts else (facts[0] if len(facts) == 1 else facts),
        policy=policy,
        reserves=() if estimate is None else (estimate,),
        engine=settings.get("engine", GENERIC),
        alternatives=lambda: _alternatives(config, settings),
    )
    if estimate is None and not {"weights", "kv_cache_memory"} & set(settings.values):
        note("the model's weights are not in the sum: the config does not say how large they are (--weights)")
    return plan


def _located(model: str) -> str:
    """``model``, or where the hub's local cache has it, if it is no path but the name of a repository there."""
    if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/")):
        return model
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return model  # then it can only be a path, and reading it says that there is none
    found = try_to_load_from_cache(model, "config.json")
    return found if isinstance(found, str) else model


def _weights(path: str, model: ModelConfig, settings: Resolved) -> Reserve | None:
    """The checkpoint's bytes on one rank, where no size was given: from its index, else counted from the config.

    Divided evenly: embeddings that a stage holds whole, and what ranks replicate, make it an estimate.
    """
    if "weights" in settings.values or "kv_cache_memory" in settings.values:
        return None
    indexed = checkpoint_bytes(path)
    total, source = (indexed, INDEX) if indexed is not None else (model.weight_bytes, "counted from the config")
    if total is None:
        return None
    ranks = settings.get("tp", 1) * settings.get("pp", 1)
    reason = f"the checkpoint's {format_bytes(total)}, divided among {ranks} rank{'s' if ranks > 1 else ''}"
    share = -(-total // ranks)
    return Reserve("weights", share, ReserveKind.PERSISTENT, Basis.MODELLED, source, reason, Phase.WEIGHTS)


def _layouts(config: ModelConfig, settings: Resolved, **changed: Any) -> Any:
    names = (
        "tp",
        "pp",
        "pp_layers",
        "dcp",
        "block_size",
        "dtype",
        "kv_cache_dtype",
        "state_dtype",
        "draft_layers",
        "draft",
        "max_num_batched_tokens",
        "engine",
    )
    options = {name: settings.values[name] for name in names if name in settings.values}
    try:
        return api.layouts(config, **{**options, **changed})
    except PolicyError as error:
        # The geometry knows the name of an argument; the user needs the flag, variable or file that gave it.
        error.where = settings.origins.get(error.where or "", error.where)
        raise


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
