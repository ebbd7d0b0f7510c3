"""The errors of kvcore. Each has a stable code and says what, got, expected and what to do.

::

    KvcoreError                     KV-000
    ├── InputError                  KV-IN-*     a config, profile, policy file or flag is wrong        exit 2
    │   ├── ConfigError             KV-CFG-*    a model's config.json
    │   ├── PolicyError             KV-POL-*    a flag, a KVCORE_* variable or a policy file
    │   └── DocumentError           KV-DOC-*    a kvcore document (device profile, plan)
    ├── PlanError                   KV-PLAN-*   the sum has no answer
    │   └── DoesNotFit              KV-FIT-*    the answer is no: carries a Refusal                    exit 1
    ├── RanksDisagree               KV-RNK-*    ranks failed, differ, or did not answer                exit 1
    ├── PluginError                 KV-PLG-*    a plugin broke the contract                            exit 3
    │   ├── NoPlatform              KV-PLG-*    none, or more than one, can be used                    exit 3
    │   └── CapabilityMissing       KV-CAP-*    the platform declares that it cannot do this
    ├── DeviceError                 KV-DEV-*    a device could not be found, read or used              exit 3
    │   ├── OutOfMemory             KV-OOM-*    the device has no room for an allocation               exit 1
    │   └── BufferMisuse            KV-BUF-*    released twice, used after release, out of range
    └── VerificationFailed          KV-VER-*    the cache is not what was planned                      exit 1
        └── KernelUnsafe            KV-VER-*    the engine's kernels do not reach every block          exit 1

The command line turns ``exit_code`` into the exit status; ``to_dict`` is the ``error`` member of every JSON
answer. Codes never change their meaning; docs/errors.md has a section for each.
"""

from __future__ import annotations

__all__ = [
    "BufferMisuse",
    "CapabilityMissing",
    "ConfigError",
    "DeviceError",
    "DocumentError",
    "DoesNotFit",
    "InputError",
    "KernelUnsafe",
    "KvcoreError",
    "NoPlatform",
    "OutOfMemory",
    "PlanError",
    "PluginError",
    "PolicyError",
    "RanksDisagree",
    "VerificationFailed",
]


class KvcoreError(Exception):
    """Base of all errors of kvcore.

    ``what`` is one sentence. ``got`` and ``expected`` are the two sides of the disagreement, ``where`` the file,
    key, flag or device it is about, ``hint`` what to do next. All but ``what`` may be None.
    """

    exit_code = 1
    default_code = "KV-000"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code or self.default_code
        self.where = where
        self.got = None if got is None else str(got)
        self.expected = None if expected is None else str(expected)
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        for label in ("where", "got", "expected", "hint"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (ranks), and the default would call __init__ with args alone.
        return (_rebuild, (type(self), self.args, self.__dict__))

    def to_dict(self) -> dict[str, object]:
        """The error as JSON-ready members; unknown members are None."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "got": self.got,
            "expected": self.expected,
            "hint": self.hint,
        }


def _rebuild(cls: type[KvcoreError], args: tuple[object, ...], state: dict[str, object]) -> KvcoreError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InputError(KvcoreError):
    """Something that a person or a file gave is wrong; nothing was measured or allocated."""

    exit_code = 2
    default_code = "KV-IN-001"


class ConfigError(InputError):
    """A model's config.json is unreadable, contradictory or of an architecture that kvcore does not know."""

    default_code = "KV-CFG-001"


class PolicyError(InputError):
    """A flag, environment variable or policy file has a wrong name or value."""

    default_code = "KV-POL-001"


class DocumentError(InputError):
    """A kvcore document (device profile, saved plan) does not match its schema."""

    default_code = "KV-DOC-001"


class PlanError(KvcoreError):
    """The sum cannot be computed from the facts given."""

    default_code = "KV-PLAN-001"


class DoesNotFit(PlanError):
    """The plan is refused. ``refusal`` holds the figures (``kvcore.sizing.refusal.Refusal``)."""

    default_code = "KV-FIT-001"

    def __init__(
        self,
        what: str,
        *,
        refusal: object,
        code: str | None = None,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, code=code, where=where, got=got, expected=expected, hint=hint)
        self.refusal = refusal


class RanksDisagree(KvcoreError):
    """Ranks that must hold the same plan cannot: one failed, they plan for different things, or some did not answer.

    Every rank that is left raises the same error.
    """

    default_code = "KV-RNK-001"


class PluginError(KvcoreError):
    """A plugin failed, or answered a hook with something that the contract does not allow."""

    exit_code = 3
    default_code = "KV-PLG-001"


class NoPlatform(PluginError):
    """No platform can be chosen without guessing."""

    default_code = "KV-PLG-010"


class CapabilityMissing(PluginError):
    """The platform declares this capability UNSUPPORTED or NOT_IMPLEMENTED."""

    default_code = "KV-CAP-001"


class DeviceError(KvcoreError):
    """A device could not be found, read or used."""

    exit_code = 3
    default_code = "KV-DEV-001"


class OutOfMemory(DeviceError):
    """The device has no room for an allocation; nothing of the request stays allocated.

    ``obtained_bytes`` is what an allocation of several buffers had before it was refused, and gave back.
    """

    exit_code = 1
    default_code = "KV-OOM-001"
    obtained_bytes: int | None = None


class BufferMisuse(DeviceError):
    """A buffer was released twice, used after release, or addressed outside its bytes."""

    exit_code = 1
    default_code = "KV-BUF-001"


class VerificationFailed(KvcoreError):
    """What was read back is not what was written, or what was allocated is not what was planned."""

    default_code = "KV-VER-001"


class KernelUnsafe(VerificationFailed):
    """The engine's kernels lost, mixed up or crashed on a block: ``block`` of ``tensor``, the first that was found.

    ``explanations`` are the index widths and strides for which exactly this block is the first that is out of reach.
    """

    default_code = "KV-VER-010"

    def __init__(
        self,
        what: str,
        *,
        tensor: str | None = None,
        block: int | None = None,
        explanations: tuple[str, ...] = (),
        code: str | None = None,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, code=code, where=where, got=got, expected=expected, hint=hint)
        self.tensor = tensor
        self.block = block
        self.explanations = explanations
