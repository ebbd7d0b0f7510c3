"""``kvcore kernels``"""

from __future__ import annotations

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.errors import PolicyError
from kvcore.report.schema import KernelData
from kvcore.report.text import Section
from kvcore.sizing.kernels import Kernel, kernels


@click.command("kernels")
@click.option("--engine", metavar="NAME", help="Only those of this engine.")
@output_options
def command(engine: str | None) -> Answer:
    """The kernels whose index into the cache is known, for --kernel, with the public source of each.

    Those with * hold for a plan for their engine that names no other.
    """
    engines = dict.fromkeys(known.engine for known in kernels())
    if engine is not None and engine not in engines:
        raise PolicyError(
            "no kernel of this engine is known",
            code="KV-POL-071",
            where="--engine",
            got=engine[:80],
            expected=", ".join(engines),
        )
    found = [_data(known) for known in kernels() if engine is None or known.engine == engine]
    return Answer({"kernels": found}, lambda: [_table(found), *(_details(entry) for entry in found)])


def _data(known: Kernel) -> KernelData:
    return {
        "name": known.name,
        "engine": known.engine,
        "versions": known.versions,
        "layout": known.layout,
        "kind": known.kind.value,
        "bits": known.bits,
        "signed": known.signed,
        "unit": known.unit.value,
        "stride": None if known.stride is None else known.stride.value,
        "bound": known.bound,
        "expression": known.expression,
        "effect": known.effect,
        "default": known.default,
        "source": known.source,
    }


def _table(found: list[KernelData]) -> Section:
    rows = tuple(
        (
            "*" if k["default"] else "",
            k["name"],
            f"{'int' if k['signed'] else 'uint'}{k['bits']}",
            k["unit"],
            k["stride"] or "-",
            k["versions"],
        )
        for k in found
    )
    if not rows:
        return Section(lines=("no kernel of that engine is known",))
    return Section(None, ("", "kernel", "index", "counts", "stride", "versions"), rows)


def _details(known: KernelData) -> Section:
    rows = tuple((name, known[name]) for name in ("expression", "layout", "effect", "source"))
    return Section(known["name"], rows=rows)
