"""``kvcore demo NAME``"""

from __future__ import annotations

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.report.schema import RehearsalData
from kvcore.report.text import Section
from kvcore.units import format_bytes, format_count


@click.command("demo")
@click.argument("name", type=click.Choice(["overflow"]))
@output_options
def command(name: str) -> Answer:
    """Rehearse a danger on this machine, in seconds and with little memory.

    overflow: kernels that index the cache in 32 bits, over pools that are larger than they can reach. The first block
    at which they fail is predicted from the layout, and found by verifying through them.
    """
    from kvcore.cache.overflow import HEADS, INDEXES, rehearse

    found = [_data(rehearse(heads, index)) for heads in HEADS for index in INDEXES]
    agree = all(r["predicted"] == r["first_failing"] for r in found)
    data = {"demo": name, "agree": agree, "rehearsals": found}
    return Answer(data, lambda: [_table(found), _verdict(agree=agree)], exit_code=0 if agree else 1)


def _data(rehearsal: object) -> RehearsalData:
    from kvcore.cache.overflow import Rehearsal

    assert isinstance(rehearsal, Rehearsal)
    return {
        "heads": rehearsal.heads,
        "index": rehearsal.index,
        "stride_elements": rehearsal.stride,
        "num_blocks": rehearsal.num_blocks,
        "pool_bytes": rehearsal.pool_bytes,
        "predicted": rehearsal.predicted,
        "first_failing": rehearsal.first_failing,
        "found": rehearsal.found,
        "explanations": list(rehearsal.explanations),
    }


def _table(found: list[RehearsalData]) -> Section:
    rows = tuple(
        (
            str(r["heads"]),
            r["index"],
            format_count(r["num_blocks"]),
            format_bytes(r["pool_bytes"]),
            "none" if r["predicted"] is None else format_count(r["predicted"]),
            "none" if r["first_failing"] is None else format_count(r["first_failing"]),
            r["found"],
        )
        for r in found
    )
    title = "Blocks of 64 tokens, heads of 128 values of 2 bytes, K and V of one layer"
    headers = ("KV heads", "index", "blocks", "pool", "predicted", "first failing", "what was found there")
    return Section(title, headers, rows, right=(0, 2, 3, 4, 5))


def _verdict(*, agree: bool) -> Section:
    verdict = "Every prediction was met." if agree else "A prediction was not met: please report it."
    return Section(lines=(verdict,))
