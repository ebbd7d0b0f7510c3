"""Sphinx configuration: MyST pages, furo, and the docstrings of the package."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "kvcore"
author = "The kvcore authors"
copyright = "The kvcore authors"
version = release = installed_version("kvcore")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated"]
html_theme = "furo"
html_title = "kvcore"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
# Annotations name the standard library and third parties, whose inventories a build cannot fetch, and type variables.
nitpick_ignore_regex = [
    ("py:.*", r"(abc|collections\.abc|typing|fractions|pathlib|os|enum|types|pluggy|_pluggy)\..*"),
    (
        "py:.*",
        r"(T|Enum|Fraction|Callable|Sequence|Mapping|Iterable|Iterator|TracebackType|EntryPoint|PathLike|Any|Path)",
    ),
    ("py:.*", r"(str|int|bool|bytes|float|object|tuple|list|dict|None|optional)"),
    ("py:.*", r"tuple\[.*"),
    ("py:.*", r"kvcore\..*\.(T|Progress|Released|ModelSource|Parser)"),
    ("py:.*", r"(Progress|Released|ModelSource|Parser)"),
    # Short names in docstrings are for those who read the source; the pages link by module.
    ("py:.*", r"[A-Z][A-Za-z]+"),
    ("py:.*", r"(policy|plan|layouts|default_registry|make_plan|release|memory_stats)"),
]
