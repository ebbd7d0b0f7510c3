"""Each entry point ends in a recorded state, and a broken one stops nobody but itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Site

BUILT_IN = {"cpu", "replay"}
IN_REPOSITORY = {"cuda", "iluvatar"}


def test_what_is_installed_here_loads() -> None:
    from kvcore.registry import default_registry

    states = {record.name: record.state.value for record in default_registry().records}
    assert states == dict.fromkeys(sorted(BUILT_IN | IN_REPOSITORY), "loaded")


@pytest.mark.parametrize(
    ("source", "state", "said"),
    [
        ("import no_such_library", "failed", "ModuleNotFoundError"),
        ("raise SystemExit(255)", "failed", "SystemExit"),
        ("1/0", "failed", "ZeroDivisionError"),
        ("other = 1", "failed", "AttributeError"),
        ("def plugin(:", "failed", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported(site: Site, source: str, state: str, said: str) -> None:
    site.install("acme", source)
    states = site.states()
    assert states["acme"][0] == state
    assert said in str(states["acme"][1])
    assert states["cpu"][0] == "loaded"
    assert "no_such_library" in site.ask("answer = registry.records[0].traceback") or "import" not in source


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"contract": 2}, "contract 2"),
        ({"drop": "allocate"}, "undeclared capabilities: allocate"),
        ({"extra": "@hookimpl\ndef kvcore_detekt(self): pass"}, "kvcore_detekt"),
        ({"extra": "@hookimpl\ndef kvcore_devices(self, wrong): pass"}, "wrong"),
        ({"extra": "name = 'other'"}, "calls itself other"),
        ({"extra": "@hookimpl\ndef kvcore_platform(self): return {'name': 'acme'}"}, "dict"),
        ({"extra": "@hookimpl\ndef kvcore_platform(self): return None"}, "NoneType"),
    ],
)
def test_a_platform_that_breaks_the_contract_is_refused(site: Site, options: dict[str, object], said: str) -> None:
    site.platform("acme", **options)  # type: ignore[arg-type]
    state, reason = site.states()["acme"]
    assert state == "refused"
    assert said in str(reason)
    assert site.ask("answer = sorted(registry.platforms)") == sorted(BUILT_IN | IN_REPOSITORY)


def test_a_platform_that_raises_when_asked_who_it_is(site: Site) -> None:
    site.platform("acme", extra="@hookimpl\ndef kvcore_platform(self): raise RuntimeError('no driver')")
    state, reason = site.states()["acme"]
    assert (state, reason) == ("failed", "RuntimeError: no driver")


def test_a_plugin_that_is_no_platform_loads(site: Site) -> None:
    site.install("notes", "import kvcore.contract as c\nclass P:\n    pass\nplugin = P()")
    assert site.states()["notes"][0] == "loaded"
    assert "notes" not in site.ask("answer = sorted(registry.platforms)")


def test_one_distribution_found_twice_is_registered_once(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    """B97: the same file reached through a linked folder."""
    site.platform("acme")
    link = tmp_path_factory.mktemp("link") / "site"
    os.symlink(site.folder, link)
    states = site.ask(
        "answer = [[r.name, r.state.value] for r in registry.records if r.name == 'acme']",
        PYTHONPATH=f"{site.folder}{os.pathsep}{link}",
    )
    assert states[0] == ["acme", "loaded"]
    assert [state for _, state in states[1:]] == ["duplicate"] * (len(states) - 1)
    assert "acme" in site.ask("answer = sorted(registry.platforms)")


def test_a_name_that_two_distributions_claim_is_neithers(site: Site) -> None:
    site.platform("acme")
    source = Path(site.folder / "plugin_acme.py").read_text()
    site.install("acme", source, distribution="another-acme")
    states = site.ask(
        "answer = [[r.distribution, r.state.value, r.reason] for r in registry.records if r.name == 'acme']"
    )
    assert [state for _, state, _ in states] == ["refused", "refused"]
    assert all("another-acme" in reason and "kvcore-acme" in reason for _, _, reason in states)


def test_allow_and_disable_lists(site: Site) -> None:
    site.platform("acme")
    site.platform("zenith")
    blocked = ["blocked", "not in KVCORE_PLUGINS"]
    assert site.states(KVCORE_PLUGINS="acme")["zenith"] == blocked
    assert site.states(KVCORE_PLUGINS="acme")["acme"][0] == "loaded"
    none = site.states(KVCORE_PLUGINS="")
    assert {name for name, (state, _) in none.items() if state == "loaded"} == BUILT_IN
    disabled = site.states(KVCORE_DISABLE_PLUGINS="zenith, replay")
    assert {name for name, (state, _) in disabled.items() if state == "blocked"} == {"zenith", "replay"}


@pytest.mark.parametrize("variable", ["KVCORE_PLUGINS", "KVCORE_DISABLE_PLUGINS"])
def test_an_unknown_name_in_a_list_is_an_error(site: Site, variable: str) -> None:
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-m", "kvcore", "plugins", "--json"],
        env={**os.environ, variable: "acmee"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 3
    assert "KV-PLG-020" in ran.stdout
    assert "acmee" in ran.stdout


def test_a_spawned_process_sees_the_same_plugins(site: Site) -> None:
    """B99: what was registered in a parent by hand would be missing in a worker; entry points are not."""
    site.platform("acme")
    (site.folder / "spawned.py").write_text(
        "from kvcore.registry import default_registry\ndef names(_):\n    return sorted(default_registry().platforms)\n"
    )
    both = site.ask(
        """
        import multiprocessing, spawned
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            answer = [sorted(registry.platforms), pool.map(spawned.names, [0])[0]]
        """
    )
    assert both[0] == both[1]
    assert "acme" in both[0]
