"""Verification through kernels: real ones, compiled here, that index in 32 and 64 bits over pools larger than 2^32."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcore import api
from kvcore.cache.allocate import Cache, allocate_cache
from kvcore.cache.child import run_in_child
from kvcore.cache.kernels import verify_kernels
from kvcore.cache.overflow import HEADS, INDEXES, rehearse
from kvcore.contract import AllocationLimits, Device, DeviceFacts, Mapping, MemoryKind, Reading, Scope
from kvcore.errors import CapabilityMissing, KernelUnsafe, PolicyError, VerificationFailed
from kvcore.platforms.replay import ReplayBlockSizer

from .conftest import card, handle_of, small_layout

BLOCK, WIDTH, ITEMSIZE = 64, 128, 2
#: For 1, 2, 4 and 8 KV heads in blocks of 64 tokens with heads of 128: the first block a signed index cannot reach.
SIGNED_ELEMENTS = {1: 262_144, 2: 131_072, 4: 65_536, 8: 32_768}
#: Kind of index -> its first unreachable block, in terms of the signed one over elements.
REACH = {
    "i32_elements": (1, 1),
    "u32_elements": (2, 1),
    "i32_bytes": (1, ITEMSIZE),
    "u32_bytes": (2, ITEMSIZE),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = Path(__file__).with_name("kernels.c")
    flags = ["-O1", "-shared", "-fPIC", "-fwrapv", "-Wall", "-Wno-unused-function"]
    subprocess.run([compiler, *flags, "-o", str(built), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(built))


@dataclass
class Pair:
    """The compiled kernels over one cache."""

    library: ctypes.CDLL
    cache: Cache
    write_kind: str
    gather_kind: str

    def __post_init__(self) -> None:
        self._tensors: dict[str, Any] = {spec.name: self.cache.tensor(spec.name) for spec in self.cache}

    def write(self, tensor: str, block: int, token: int, data: bytes) -> None:
        self._call(f"write_{self.write_kind}", tensor, block, token, data)

    def gather(self, tensor: str, block: int, token: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self._call(f"gather_{self.gather_kind}", tensor, block, token, out)
        return out.raw

    def close(self) -> None:
        self._tensors.clear()

    def _call(self, name: str, tensor: str, block: int, token: int, data: object) -> None:
        array = self._tensors[tensor]
        _, heads, tokens, width = array.shape
        kernel = getattr(self.library, name)
        pool = ctypes.c_void_p(array.ctypes.data)
        kernel(pool, ctypes.c_int64(block), heads, tokens, width, array.itemsize, token, data)


def address_space(nbytes: int) -> Any:
    device = Device("replay", 0, "pool", "Address space", MemoryKind.HOST, Mapping.SELF)
    reading = Reading("test", Scope.DEVICE, total=nbytes, free=nbytes, own=0)
    return handle_of(ReplayBlockSizer([DeviceFacts(device, (reading,), AllocationLimits())], backing="address_space"))


@pytest.fixture
def pool(library: ctypes.CDLL) -> Iterator[Callable[..., Pair]]:
    """``pool(heads, kind)``: kernels over one layer whose K and V each have more than 2^32 elements."""
    made: list[Pair] = []

    def make(heads: int, write: str, gather: str | None = None, blocks: int | None = None) -> Pair:
        layout = api.layout(
            {
                "model_type": "llama",
                "num_hidden_layers": 1,
                "hidden_size": heads * WIDTH,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "head_dim": WIDTH,
                "torch_dtype": "bfloat16",
                "max_position_embeddings": 1024,
            },
            block_size=BLOCK,
        )
        num_blocks = blocks or (1 << 32) // (heads * BLOCK * WIDTH) + 3
        platform = address_space(layout.bytes(num_blocks))
        cache = allocate_cache(platform, platform.device(), layout, num_blocks)
        made.append(Pair(library, cache, write, gather or write))
        return made[-1]

    yield make
    for pair in made:
        pair.close()
        pair.cache.release()


def unsafe(pair: Pair) -> KernelUnsafe:
    with pytest.raises(KernelUnsafe) as caught:
        api.verify(pair.cache, write=pair.write, gather=pair.gather, isolate=True)
    return caught.value


@pytest.mark.parametrize("kind", REACH)
@pytest.mark.parametrize("heads", SIGNED_ELEMENTS)
def test_the_first_failing_block_is_the_predicted_one(pool: Callable[..., Pair], heads: int, kind: str) -> None:
    times, divided = REACH[kind]
    pair = pool(heads, kind)
    assert all(spec.elements > 2**32 for spec in pair.cache)
    error = unsafe(pair)
    assert error.block == SIGNED_ELEMENTS[heads] * times // divided
    assert str(error.block) in str(error).replace(",", "")
    if error.code == "KV-VER-010":
        sign, unit = ("signed" if kind[0] == "i" else "unsigned"), kind.split("_")[1]
        assert any(text.startswith(f"a {sign} 32-bit index in {unit} over one tensor") for text in error.explanations)


@pytest.mark.parametrize("kind", ["i64_elements", "i64_bytes"])
def test_a_wide_index_reaches_every_block_and_leaves_zeros(pool: Callable[..., Pair], kind: str) -> None:
    pair = pool(8, kind)
    found = api.verify(pair.cache, write=pair.write, gather=pair.gather)
    assert {0, 32767, 32768, 65535, 65536, pair.cache.num_blocks - 1} <= set(found.blocks)
    for spec in pair.cache:
        assert not any(any(pair.cache.read_block(spec.name, block)) for block in found.blocks)


@pytest.mark.parametrize("kind", ["i32_elements", "u32_elements"])
def test_a_pool_within_reach_passes(pool: Callable[..., Pair], kind: str) -> None:
    pair = pool(8, kind, blocks=32768 if kind[0] == "i" else 65536)
    api.verify(pair.cache, write=pair.write, gather=pair.gather)


def test_a_silent_wrap_is_found_without_a_child(pool: Callable[..., Pair]) -> None:
    """An unsigned product lands inside the buffer: no crash, no error, and the wrong bytes."""
    pair = pool(8, "u32_elements")
    with pytest.raises(KernelUnsafe) as caught:
        verify_kernels(pair.cache, pair.write, pair.gather)
    assert caught.value.code == "KV-VER-010"
    assert caught.value.block == 65536
    assert caught.value.got == "what was written to it is in layers.0.k, block 0: the two share memory"
    # Raw access alone, with the platform's own 64-bit offsets, sees nothing wrong: only the kernels show it.
    api.verify(pair.cache)


@pytest.mark.parametrize(
    ("write", "gather"), [("u32_elements", "i64_elements"), ("i64_elements", "u32_elements")], ids=["write", "gather"]
)
def test_one_narrow_kernel_of_the_two_is_enough(pool: Callable[..., Pair], write: str, gather: str) -> None:
    pair = pool(4, write, gather)
    assert unsafe(pair).block == 131_072


def test_it_does_not_fill_the_pool(pool: Callable[..., Pair]) -> None:
    pair = pool(8, "i64_elements")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    verify_kernels(pair.cache, pair.write, pair.gather)
    assert pair.cache.nbytes > 16 * 1024**3
    assert resident() - before < 256 * 1024**2


def test_a_crash_is_an_answer_from_a_child(library: ctypes.CDLL, pool: Callable[..., Pair]) -> None:
    pair = pool(8, "i64_elements")

    def crashing(tensor: str, block: int, token: int, data: bytes) -> None:
        if block < 50_000:
            pair.write(tensor, block, token, data)
        else:
            ctypes.memset(8, 0, 1)

    with pytest.raises(KernelUnsafe) as caught:
        api.verify(pair.cache, write=crashing, gather=pair.gather, isolate=True)
    assert caught.value.code == "KV-VER-011"
    assert (caught.value.got or "").startswith("SIGSEGV")
    assert caught.value.tensor == "layers.0.k"
    assert caught.value.block is not None
    assert caught.value.block >= 50_000


def test_an_error_of_the_engines_is_an_answer_too() -> None:
    platform = handle_of(ReplayBlockSizer([card()]))

    def failing(tensor: str, block: int, token: int, data: bytes) -> None:
        if block == 49:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with allocate_cache(platform, platform.device(), small_layout(), 50) as cache:
        with pytest.raises(KernelUnsafe) as caught:
            verify_kernels(cache, failing, lambda *_: b"")
        assert (caught.value.code, caught.value.block) == ("KV-VER-014", 49)


def test_lost_writes_and_lies_are_found() -> None:
    platform = handle_of(ReplayBlockSizer([card()]))
    with allocate_cache(platform, platform.device(), small_layout(), 50) as cache:
        with pytest.raises(KernelUnsafe) as caught:
            verify_kernels(cache, lambda *_: None, lambda tensor, block, token, nbytes: bytes(nbytes))
        assert caught.value.block == 0
        assert "no 32-bit index" in (caught.value.hint or "")
        # A gather that returns what was written although memory holds nothing: raw access finds it.
        held: dict[tuple[str, int, int], bytes] = {}
        with pytest.raises(KernelUnsafe, match="do not reach"):
            verify_kernels(
                cache,
                lambda tensor, block, token, data: held.__setitem__((tensor, block, token), data),
                lambda tensor, block, token, nbytes: held[tensor, block, token],
            )


@pytest.mark.parametrize("beyond", [1, 1_000, 12_345, 32_768, 65_539])
def test_a_stride_that_is_not_the_layouts_is_narrowed_down(pool: Callable[..., Pair], beyond: int) -> None:
    """Blocks from any number on wrap to the first ones: the number is found to the block."""
    pair = pool(8, "i64_elements", blocks=65_540)

    def write(tensor: str, block: int, token: int, data: bytes) -> None:
        pair.write(tensor, block % beyond, token, data)

    def gather(tensor: str, block: int, token: int, nbytes: int) -> bytes:
        return pair.gather(tensor, block % beyond, token, nbytes)

    with pytest.raises(KernelUnsafe) as caught:
        verify_kernels(pair.cache, write, gather)
    assert caught.value.block == beyond
    implied = re.findall(r"(signed|unsigned) one does if a block adds ([\d,]+) to ([\d,]+)", str(caught.value))
    assert implied or caught.value.explanations or caught.value.block in (1, 65_539)
    for sign, *ends in implied:
        for stride in (int(end.replace(",", "")) for end in ends):
            assert 2 ** (31 if sign == "signed" else 32) // stride == caught.value.block


@pytest.mark.parametrize("kind", ["u32_elements", "u32_bytes"])
def test_kernels_alone_show_blocks_that_take_each_others_place(
    pool: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A platform without raw access: an unsigned wrap is seen by the kernels' own answers."""
    pair = pool(8, kind)
    monkeypatch.setattr(type(pair.cache.platform), "supports", lambda *_: False)
    with pytest.raises(KernelUnsafe) as caught:
        verify_kernels(pair.cache, pair.write, pair.gather)
    assert caught.value.block == SIGNED_ELEMENTS[8] * REACH[kind][0] // REACH[kind][1]


def test_half_a_pair_is_refused(pool: Callable[..., Pair]) -> None:
    pair = pool(1, "i64_elements", blocks=8)
    with pytest.raises(PolicyError) as caught:
        api.verify(pair.cache, write=pair.write)
    assert caught.value.code == "KV-POL-054"


def test_an_accelerator_is_not_forked(pool: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    pair = pool(1, "i64_elements", blocks=8)
    monkeypatch.setattr(pair.cache.platform, "info", replace(pair.cache.platform.info, accelerator=True))
    with pytest.raises(CapabilityMissing) as caught:
        api.verify(pair.cache, write=pair.write, gather=pair.gather, isolate=True)
    assert caught.value.code == "KV-CAP-004"


def test_a_child_answers_for_every_way_to_end() -> None:
    assert run_in_child(lambda _: {"a": 1}) == {"a": 1}

    def refuse(_: object) -> None:
        raise VerificationFailed("no", code="KV-VER-001", got="x")

    with pytest.raises(VerificationFailed) as caught:
        run_in_child(refuse)
    assert (caught.value.code, caught.value.got) == ("KV-VER-001", "x")

    def fail(_: object) -> None:
        raise ZeroDivisionError("nothing")

    with pytest.raises(VerificationFailed, match="ZeroDivisionError: nothing"):
        run_in_child(fail)

    def leave(_: object) -> None:
        os._exit(3)

    with pytest.raises(VerificationFailed, match="exit status 3"):
        run_in_child(leave)

    def hang(_: object) -> None:
        signal.pause()

    with pytest.raises(VerificationFailed) as caught:
        run_in_child(hang, timeout_s=0.2)
    assert caught.value.code == "KV-VER-012"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_demonstration_needs_no_compiler(heads: int, index: str) -> None:
    found = rehearse(heads, index)
    times = {"int32": 1, "uint32": 2, "int64": None}[index]
    expected = None if times is None else SIGNED_ELEMENTS[heads] * times
    assert (found.predicted, found.first_failing) == (expected, expected)
