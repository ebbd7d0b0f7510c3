"""No constant bounds a number of blocks: the syntax trees of kvcore and its plugins are searched for one.

A block count is recognised by its name, by what it was assigned from (a division by bytes per block), and by the
function that gave it. Zero and one are no bounds: they ask whether there is a block at all.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("kvcore/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
#: Names of numbers of blocks; what is said of one block (its size, bytes, number or words about it) is none.
COUNT = re.compile(r"blocks", re.IGNORECASE)
PER_BLOCK = re.compile(
    r"(bytes|cost|size|elements)_(per|of)_?(a_)?(kv_)?(cache_)?block|block_(bytes|cost)|bpb", re.IGNORECASE
)
NO_COUNT = re.compile(r"block_size|block_multiple|_MODULUS$")
#: Calls that bound their arguments.
BOUNDING = {"min", "max", "clip", "clamp", "minimum", "maximum", "fmin", "fmax"}
HARMLESS = (0, 1, -1)


def constant_bounds(source: str) -> list[tuple[int, str]]:
    """Line and text of each place where a number stands against a number of blocks."""
    tree = ast.parse(source)
    constants = _constants(tree)
    found = set()
    for scope in [
        tree,
        *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))),
    ]:
        counts = _counts(scope)
        numbers = {**constants, **_constants(scope), **_defaults(scope)}
        for node in ast.walk(scope):
            sides = _sides(node)
            bounds = [side for side in sides if _is_bound(side, numbers)]
            if bounds and any(_is_count(side, counts) for side in sides if side not in bounds):
                found.add((node.lineno, ast.unparse(node)))
    return sorted(found)


def _sides(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        # "num_blocks in (1, 2)" and "== None" bound nothing; an equality with a number is as bad as an order.
        return [] if any(isinstance(op, (ast.In, ast.NotIn, ast.Is, ast.IsNot)) for op in node.ops) else sides
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in BOUNDING:
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            arguments += [item for a in node.args if isinstance(a, (ast.List, ast.Tuple)) for item in a.elts]
            return [*arguments, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    return []


def _number(node: ast.expr) -> int | float | None:
    """The value of an expression of numbers alone: 40000, 4 * 10_000, 1 << 15, int(4e4)."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("int", "float")
        and node.args
    ):
        return _number(node.args[0])
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if not all(isinstance(part, allowed) for part in ast.walk(node)):
        return None
    if any(isinstance(p, ast.Constant) and type(p.value) not in (int, float) for p in ast.walk(node)):
        return None
    return eval(compile(ast.Expression(node), "", "eval"), {})  # type: ignore[no-any-return]


def _is_bound(node: ast.expr, numbers: dict[str, int | float]) -> bool:
    number = _number(node)
    if number is None and isinstance(node, (ast.Name, ast.Attribute)):
        number = numbers.get(node.id if isinstance(node, ast.Name) else node.attr)
    if number is None and _environment_default(node) is not None:
        number = _environment_default(node)
    return number is not None and number not in HARMLESS


def _environment_default(node: ast.expr) -> int | float | None:
    """``int(os.environ.get("CAP", "40000"))``: a constant all the same, unless someone knows the variable."""
    for call in (c for c in ast.walk(node) if isinstance(c, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in ("get", "getenv") and len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
            text = str(call.args[1].value)
            if text.isdigit():
                return int(text)
    return None


def _constants(scope: ast.AST) -> dict[str, int | float]:
    """Names of the scope's own body that stand for a number."""
    numbers = {}
    for node in getattr(scope, "body", []):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or value is None:
            continue
        number = _number(value)
        number = _environment_default(value) if number is None else number
        numbers.update({t.id: number for t in targets if isinstance(t, ast.Name) and number is not None})
    return numbers


def _defaults(scope: ast.AST) -> dict[str, int | float]:
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    arguments = scope.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[::-1], arguments.defaults[::-1], strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = {}
    for argument, default in pairs:
        number = None if default is None else _number(default)
        if number is not None:
            found[argument.arg] = number
    return found


def _counts(scope: ast.AST) -> set[str]:
    """Names that hold a number of blocks, because of what they were assigned from."""
    counts: set[str] = set()
    for _ in range(3):  # a count may be passed on through a few names
        for node in ast.walk(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _is_count(node.value, counts):
                    counts.update(t.id for t in targets if isinstance(t, ast.Name))
    return counts


def _is_count(node: ast.expr, counts: set[str]) -> bool:
    if isinstance(node, ast.BinOp):
        divided = isinstance(node.op, (ast.FloorDiv, ast.Div)) and PER_BLOCK.search(ast.unparse(node.right))
        if isinstance(node.op, (ast.Mult, ast.Mod)) or (isinstance(node.op, (ast.FloorDiv, ast.Div)) and not divided):
            return False  # blocks times something are no blocks
        return bool(divided) or _is_count(node.left, counts) or _is_count(node.right, counts)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("int", "round", "abs", "floor", *BOUNDING):
            return any(_is_count(argument, counts) for argument in node.args)
        return name not in ("len", "str") and _names_a_count(name)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and _names_a_count(str(node.slice.value))
    if isinstance(node, ast.Attribute):
        return _names_a_count(node.attr)
    return isinstance(node, ast.Name) and (node.id in counts or _names_a_count(node.id))


def _names_a_count(name: str) -> bool:
    return COUNT.search(name) is not None and NO_COUNT.search(name) is None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_constant_bounds_a_number_of_blocks(path: Path) -> None:
    assert constant_bounds(path.read_text()) == []


def test_the_search_has_something_to_search() -> None:
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {"kvcore/sizing/plan.py", "plugins/cuda/src/kvcore_cuda/platform.py"} <= names
    assert any("iluvatar" in name for name in names)


@pytest.mark.parametrize(
    "source",
    [
        "num_blocks = min(num_blocks, 40000)",
        "n_blocks = min(int(available // cost), 40000)\nif n_blocks > 40000: pass",
        "if total_block_num_blocks > 40_000: pass",
        "MAX = 40000\ndef f(num_gpu_blocks):\n    return min(MAX, num_gpu_blocks)",
        "def f(self):\n    self.num_blocks = min(self.num_blocks, 4 * 10_000)",
        "def f(free, bytes_per_block):\n    n = free // bytes_per_block\n    m = int(n)\n    return m < 1 << 15",
        "def f(blocks, cap=20000):\n    return min(blocks, cap)",
        "import numpy as np\nfound = np.clip(blocks, 0, 40000)",
        "found = blocks.clamp(max=40000)",
        "best = min([num_blocks, 40000])",
        "ok = 0 < plan['num_blocks'] <= 40000",
        "CAP = int(os.environ.get('CAP', '40000'))\ndef f(num_blocks):\n    return min(num_blocks, CAP)",
        "n = min(self.num_blocks(), int(4e4))",
        "class A:\n    def f(self, layout):\n        if layout.max_blocks == 40000:\n            pass",
    ],
)
def test_every_way_to_hide_one_is_found(source: str) -> None:
    assert constant_bounds(source)


@pytest.mark.parametrize(
    "source",
    [
        "ok = num_blocks > 0",
        "few = min(blocks, limit.bound // stride)",
        "n = max(0, num_blocks - 1)",
        "ok = num_blocks * block_size > 4096",
        "ok = block_size == 64",
        "ok = len(blocks) > 2",
        "n = num_blocks % 16 == 0",
    ],
)
def test_what_bounds_nothing_is_left_alone(source: str) -> None:
    assert not constant_bounds(source)
