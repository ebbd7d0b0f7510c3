"""A handle calls one platform, checks what it answers, and lets wrappers run."""

from __future__ import annotations

import pytest

from .conftest import Site

DEVICE = """
@hookimpl
def kvcore_devices(self):
    return [Device(self.name, 0, self.name + "-0", "test", MemoryKind.DISCRETE, Mapping.RUNTIME)]
"""


def test_only_the_asked_platform_answers(site: Site) -> None:
    site.platform("acme", extra=DEVICE)
    site.platform("zenith", extra=DEVICE)
    keys = site.ask("answer = {n: [d.key for d in registry.platform(n).devices()] for n in ('acme', 'zenith')}")
    assert keys == {"acme": ["acme-0"], "zenith": ["zenith-0"]}


def test_wrappers_of_other_plugins_still_run(site: Site) -> None:
    site.platform("acme", extra=DEVICE)
    site.install(
        "tracing",
        "from kvcore.contract import hookimpl\n"
        "class Tracing:\n"
        "    calls = []\n"
        "    @hookimpl(wrapper=True)\n"
        "    def kvcore_devices(self):\n"
        "        answers = yield\n"
        "        self.calls.append(len(answers))\n"
        "        return answers\n"
        "plugin = Tracing()\n",
    )
    calls = site.ask("registry.platform('acme').devices(); import plugin_tracing; answer = plugin_tracing.plugin.calls")
    assert calls == [1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'acme-0'", "str"),
        ("return [1]", "a list with int"),
        ("return None", "0 answers"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("d = Device('acme', 0, 'k', 'n', MemoryKind.DISCRETE, Mapping.ORDER); return [d, d]", "unique"),
    ],
)
def test_a_broken_answer_is_an_error_that_names_platform_and_hook(site: Site, body: str, said: str) -> None:
    site.platform("acme", extra=f"@hookimpl\ndef kvcore_devices(self):\n    {body}")
    error = site.ask(
        """
        try:
            registry.platform("acme").devices()
        except PluginError as e:
            answer = [e.code, e.where, e.got, e.expected, e.exit_code]
        """
    )
    assert error[0] in ("KV-PLG-002", "KV-PLG-003")
    assert error[1] == "platform acme, kvcore_devices"
    assert said in error[2] or said == "unique"
    assert error[4] == 3


@pytest.mark.parametrize("freed", ["True", "numpy.int64(4)", "4.0", "None"])
def test_a_size_is_a_plain_int(site: Site, freed: str) -> None:
    """A bool and a numpy integer pass for an int in most places; a size that wraps at 2**63 must not."""
    site.platform(
        "acme",
        extra=f"""
        def __init__(self):
            pass
        @hookimpl
        def kvcore_platform(self):
            return PlatformInfo("acme", "Test", "1", 1, dict.fromkeys(Capability, FULL))
        @hookimpl
        def kvcore_release(self, buffer):
            import numpy
            return {freed}
        """,
    )
    code = site.ask(
        """
        try:
            answer = registry.platform("acme").release(None)
        except PluginError as e:
            answer = e.code
        """
    )
    assert code == "KV-PLG-003"


def test_a_capability_that_is_not_offered_is_said_before_the_call(site: Site) -> None:
    site.platform("acme", extra="@hookimpl\ndef kvcore_read_memory(self, device): raise AssertionError('called')")
    error = site.ask(
        """
        try:
            registry.platform("acme").read_memory(None)
        except CapabilityMissing as e:
            answer = [e.code, e.what, e.got]
        """
    )
    assert error == ["KV-CAP-001", "platform acme does not offer read_memory", "not_implemented: a test"]


def test_the_plugins_here_say_what_they_cannot_do() -> None:
    from kvcore.contract import Capability, Support
    from kvcore.errors import CapabilityMissing
    from kvcore.registry import default_registry

    for name in ("cuda", "iluvatar"):
        handle = default_registry().platform(name)
        for supported in handle.info.capabilities.values():
            assert supported.support is Support.FULL or supported.reason
        if not handle.supports(Capability.DEVICES):
            with pytest.raises(CapabilityMissing, match=name):
                handle.devices()


def test_wrappers_run_around_contributors_and_one_failure_hides_nobody(site: Site) -> None:
    for name, body in (("one", "return []"), ("two", "raise ValueError('two')")):
        site.install(
            name,
            "from kvcore.contract import hookimpl\n"
            "class P:\n"
            "    @hookimpl\n"
            f"    def kvcore_planned(self, plan): {body}\n"
            "plugin = P()\n",
        )
    site.install(
        "tracing",
        "from kvcore.contract import hookimpl\n"
        "class Tracing:\n"
        "    calls = []\n"
        "    @hookimpl(wrapper=True)\n"
        "    def kvcore_planned(self, plan):\n"
        "        self.calls.append(plan)\n"
        "        return (yield)\n"
        "plugin = Tracing()\n",
    )
    answer = site.ask(
        """
        problems = registry.notify("kvcore_planned", plan="a plan")
        import plugin_tracing
        answer = [problems, plugin_tracing.plugin.calls]
        """
    )
    assert answer == [["observer two failed in kvcore_planned: ValueError: two"], ["a plan", "a plan"]]
