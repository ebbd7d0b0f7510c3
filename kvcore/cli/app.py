"""Find the verb, run it, and turn its answer or its error into output and an exit status."""

from __future__ import annotations

import errno
import importlib
import signal
from collections.abc import Sequence

import click

from kvcore import __version__
from kvcore.cli.answer import Answer, CannotWrite, emit, emit_error, silence
from kvcore.errors import InputError, KvcoreError

__all__ = ["VERBS", "cli", "run"]

#: Verb -> one line of help; the module of the same name has the command.
VERBS = {
    "plan": "How many blocks fit, and why.",
    "allocate": "Plan, allocate, verify, report and release.",
    "explain": "Every term and bound of a plan, to add up by hand.",
    "devices": "The devices that this process can see, and their memory.",
    "record": "Write down a device, to plan for it elsewhere.",
    "plugins": "The plugins that were found, and what became of each.",
    "doctor": "Why each platform can or cannot be used here.",
    "diff": "What moved between two plans, in blocks.",
    "check": "Whether a plan has exactly the blocks expected.",
    "kernels": "The kernels whose index into the cache is known.",
    "demo": "Rehearse a narrow index's overflow on the host.",
    "new-plugin": "Make a vendor's plugin to fill in.",
    "conformance": "Prove a platform's plugin by the suite of checks.",
    "completion": "The shell's completion script.",
}
EXIT_FAULT = 70


class Verbs(click.Group):
    """A group whose commands are imported one by one: the start of a verb must not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of verb ``cmd_name``."""
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"kvcore.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, so that --help imports no verb."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvcore")
def cli() -> None:
    """How many KV-cache blocks fit on each device, by one rule on every vendor's hardware."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments``; returns the exit status and raises nothing."""
    as_json, debug = "--json" in arguments, "--debug" in arguments
    verb = next((argument for argument in arguments if argument in VERBS), None)
    notes: list[str] = []

    def failed(error: KvcoreError) -> int:
        return _failed(error, verb, as_json=as_json, debug=debug, notes=notes)

    try:
        answer = cli.main(list(arguments), prog_name="kvcore", standalone_mode=False, obj=notes)
        if isinstance(answer, Answer):
            emit(answer, verb, as_json=as_json, notes=notes)
            return answer.exit_code
        return answer if isinstance(answer, int) else 0
    except click.exceptions.Abort:
        return _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # Whoever read the output has gone, and nothing is left to say.
        silence()
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        hint = f"kvcore {verb} --help" if verb else "kvcore --help"
        return failed(InputError(error.format_message(), code="KV-IN-002", hint=hint))
    except KvcoreError as error:
        return failed(error)
    except Exception as error:  # noqa: BLE001 - the last line of defence: shown as what it is, a fault of kvcore
        if _output_is_full(error):
            silence()
            return failed(CannotWrite("the help cannot be written", where="standard output", got=error))
        fault = KvcoreError(
            f"a fault of kvcore: {type(error).__name__}: {error}",
            code="KV-BUG-001",
            hint="please report it, with the output of the same command and --debug",
        )
        fault.__cause__ = error
        failed(fault)
        return EXIT_FAULT


def _failed(error: KvcoreError, verb: str | None, *, as_json: bool, debug: bool, notes: Sequence[str]) -> int:
    # What cannot be written to standard output cannot be answered there.
    as_json = as_json and not isinstance(error, CannotWrite)
    try:
        emit_error(error, verb, as_json=as_json, notes=notes)
    except CannotWrite as lost:
        emit_error(lost, verb, as_json=False)
        return lost.exit_code
    if debug:
        import traceback

        traceback.print_exception(error)
    return error.exit_code


def _output_is_full(error: Exception) -> bool:
    """Whether click could not write a help text, which it does itself. Files' own errors have a name or a code."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _interrupted() -> int:
    click.echo("interrupted", err=True)
    return 128 + signal.SIGINT
