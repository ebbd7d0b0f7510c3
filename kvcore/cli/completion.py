"""``kvcore completion SHELL``"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvcore.cli.answer import Answer, output_options
from kvcore.report.text import Section


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@output_options
def command(shell: str) -> Answer:
    """The completion script of SHELL: `eval "$(kvcore completion bash)"`."""
    from kvcore.cli.app import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "kvcore", "_KVCORE_COMPLETE").source()
    return Answer({"shell": shell, "script": script}, lambda: [Section(lines=tuple(script.splitlines()))])
