"""A driver's memory for frameworks, without a copy: DLPack and the CUDA array interface (version 3).

No library in common use exports a bare address of a device, so the two structures of dlpack.h that are needed are here.
A framework holds what it was given until the last tensor over it is gone, so whoever gave it can tell by a weak
reference whether the memory is still in use.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["CPU", "CUDA", "SharedBytes"]

#: DLDeviceType of dlpack.h.
CPU, CUDA = 1, 2
UNSIGNED = 1  #: kDLUInt
NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    """DLTensor, its device and its data type written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor: what a capsule of the name "dltensor" points to."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class SharedBytes:
    """``nbytes`` bytes at ``address`` on a device, (type, ordinal); whoever takes them keeps this object alive."""

    def __init__(self, address: int, nbytes: int, device: tuple[int, int]) -> None:
        self._address = address
        self._nbytes = nbytes
        self._device = device
        if device[0] == CUDA:
            self.__cuda_array_interface__ = {
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
                "strides": None,
            }

    def __dlpack_device__(self) -> tuple[int, int]:
        """The type of the device and its ordinal."""
        return self._device

    def __dlpack__(self, *, stream: object = None, max_version: object = None) -> object:
        """A capsule over the bytes. No stream has to be waited for: every call of the driver has ended."""
        managed = _Managed()
        shape = (ctypes.c_int64 * 1)(self._nbytes)
        managed.tensor = _Tensor(
            self._address, *self._device, 1, UNSIGNED, 8, 1, ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), None, 0
        )
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
        # Held once for the consumer, which gives it back through the deleter.
        held = (managed, shape, self)
        managed.context = id(held)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        return _new_capsule(ctypes.addressof(managed), NAME, ctypes.cast(_destroy, ctypes.c_void_p))


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# By address: a capsule that is being destroyed must not be referenced again.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


_drop = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))


# Both may be called while the interpreter ends and modules lose their names, so they bring what they use with them.
def _given_back(managed: int, at: Any = _Managed.from_address, drop: Any = _drop) -> None:
    """The consumer's tensors are gone."""
    drop(at(managed).context)


def _destroyed(
    capsule: int, name: bytes = NAME, valid: Any = _is_valid, pointer: Any = _pointer, back: Any = _given_back
) -> None:
    """A capsule that nobody took gives back; a consumer renames the one it takes."""
    if valid(capsule, name):
        back(pointer(capsule, name))


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_given_back)
_destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_destroyed)
for _entry in (_delete, _destroy):
    # A tensor may outlive this module when the interpreter ends, and then still calls what it was given.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_entry))
