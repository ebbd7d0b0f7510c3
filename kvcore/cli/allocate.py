"""``kvcore allocate MODEL``"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from kvcore import api
from kvcore.audit import Audit
from kvcore.cache.allocate import Progress
from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import made_plan, resolved, setting_options
from kvcore.errors import PolicyError
from kvcore.report.audit import audit_data, audit_sections
from kvcore.report.data import cache_data, plan_data
from kvcore.report.plan_text import allocation_sections, plan_sections
from kvcore.report.schema import AllocateData, AllocationData
from kvcore.settings import Resolved
from kvcore.sizing.plan import Plan


@click.command("allocate")
@click.argument("model")
@click.option("--rank", default=0, show_default=True, help="Which rank's cache to allocate.")
@click.option("--audit", is_flag=True, help="Also compare what each term promised with what came of it.")
@setting_options
@output_options
def command(model: str, rank: int, audit: bool, **options: Any) -> Answer:
    """Plan MODEL's cache, allocate one rank's on this device, verify it, report and release."""
    settings = resolved(options)
    _refuse_profile(settings)
    plan = made_plan(model, settings, device_needed=True)
    if not 0 <= rank < len(plan.ranks):
        raise PolicyError(
            "no such rank", code="KV-POL-036", where="--rank", got=rank, expected=f"0 to {len(plan.ranks) - 1}"
        )
    allocation, found = _allocate(plan, rank, audit)
    data: AllocateData = {
        **plan_data(plan, settings),
        "allocation": allocation,
        "audit": None if found is None else audit_data(found),
    }
    audited = [] if found is None else [found]
    return Answer(
        data,
        lambda: [
            *plan_sections(data),
            *allocation_sections(data["allocation"]),
            *(section for each in audited for section in audit_sections(each)),
        ],
    )


def _allocate(plan: Plan, rank: int, audit: bool) -> tuple[AllocationData, Audit | None]:
    with _progress() as progress:
        cache = api.allocate(plan, rank=rank, progress=progress)
    with cache:
        verification = api.verify(cache)
        # Described before the release empties it.
        described = cache_data(cache, verification, rank)
        found = api.audit(plan, cache.device, rank=rank) if audit else None
        return {**described, "released_bytes": cache.release()}, found


def _refuse_profile(settings: Resolved) -> None:
    if settings.get("device_profile") is not None:
        raise PolicyError(
            "nothing can be allocated on a profile",
            code="KV-POL-045",
            where=settings.origins["device_profile"],
            expected="a device of this machine",
            hint="KVCORE_REPLAY=FILE kvcore allocate --platform replay ... rehearses it",
        )


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on standard error, on a terminal alone."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("allocating"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("allocating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
