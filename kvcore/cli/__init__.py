"""The command line: ``kvcore VERB``. Each verb is a module of this package, imported when it is called.

Standard output is the answer, standard error the rest. Exit status: 0 yes; 1 it ran, and the answer is no; 2 wrong
usage or input; 3 no usable platform or device; 70 a fault of kvcore itself; 74 the answer could not be written.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The console script."""
    import sys

    from kvcore.cli.app import run

    sys.exit(run(sys.argv[1:]))
