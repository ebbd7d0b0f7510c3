"""Run the benchmarks that are named, or all: ``python -m benchmarks startup plan commit agree fit``."""

from __future__ import annotations

import importlib
import sys

NAMES = ("startup", "plan", "commit", "agree", "fit")


def main() -> None:
    """Each benchmark prints a line a figure, with the target where there is one."""
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            sys.exit(f"no benchmark {name!r}: {', '.join(NAMES)}")
        print(f"== {name}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
