"""All checks of kvcore's conformance suite, on the platform of pyproject.toml."""

from kvcore.conformance.test_platforms import test_platform  # noqa: F401
