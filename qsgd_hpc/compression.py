"""Compression settings; independent of frameworks."""

from __future__ import annotations

import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS, Rule, as_rules, first_match

if TYPE_CHECKING:
    from qsgd_hpc._core import Coding

__all__ = [
    "KINDS",
    "Auto",
    "Eden",
    "Elias",
    "Lossy",
    "MinMax",
    "Nuqsgd",
    "Qsgd",
    "Sign",
    "TernGrad",
    "TopK",
    "from_environment",
    "has_choice_of_bits",
]

MAX_BUCKET = env.BUCKET_SIZES[-1]
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
FEEDBACK_BITS = 2
# Bits of the coding passed to the core if the planner chooses; it may choose fewer or float32.
MOST_AUTO_BITS = 8


KINDS: dict[str, type[Lossy]] = {}
"""Every code by its name."""


def _from(name: str) -> Any:
    return field(default_factory=lambda: env.get(name))


@dataclass(frozen=True, kw_only=True)
class Lossy(ABC):
    """Settings of all lossy codes; each subclass is one code.

    Args:
        bucket_size: elements that share one scale; a multiple of 64, up to 65536.
        error_feedback: add the error of coding to the next gradient. None: on at 1 and 2 bits and
            for biased codes, which need it to converge. Needs float32 memory of the gradient's
            size, plus 1/n of it on n ranks.
        min_elements: gradients with fewer elements, and those with one dimension (biases, norms),
            are sent uncompressed, because they are small and sensitive.
        rules: bits for tensors by name or size; they override ``min_elements``. Text such as
            ``"*.bias=32, embed*=8, >1M=2"`` or pairs such as ``[("embed*", 8)]``; the first match
            is used. See :mod:`qsgd_hpc.rules`.
        nmse_budget: limit for the squared error of a code over the squared magnitude of its input.
            A tensor that exceeds it gets more bits from the next step on, finally float32.
    Raises:
        UsageError: a value out of range.
    """

    bucket_size: int = _from("QSGD_BUCKET_SIZE")
    error_feedback: bool | None = _from("QSGD_ERROR_FEEDBACK")
    min_elements: int = _from("QSGD_MIN_ELEMENTS")
    rules: str | Iterable[Rule | tuple[str, int | str]] = _from("QSGD_RULES")
    nmse_budget: float | None = _from("QSGD_NMSE_BUDGET")

    scheme: ClassVar[str]
    """Name of the code in the core, ``hvd.Compression`` and QSGD_SCHEME."""
    biased: ClassVar[bool] = False
    feedback_bits: ClassVar[int] = FEEDBACK_BITS
    """Bits up to which error feedback is on by default: the error exceeds half of the input."""
    varies: ClassVar[bool] = False
    """Whether the length of a code depends on the gradient."""

    def __init_subclass__(cls) -> None:
        if "scheme" in vars(cls):
            KINDS[cls.scheme] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", as_rules(self.rules))
        size = self.bucket_size
        if not isinstance(size, int) or size not in env.BUCKET_SIZES:
            multiple = env.BUCKET_SIZES.step
            raise self._fault("bucket_size", f"a multiple of {multiple} up to {MAX_BUCKET}")
        if self.error_feedback not in (None, True, False):
            raise self._fault("error_feedback", "True, False, or None (on if the code needs it)")
        if self.nmse_budget is not None and not self.nmse_budget > 0:
            raise self._fault("nmse_budget", "a number above 0, such as 0.01, or None")

    def _fault(self, name: str, choices: str) -> UsageError:
        call = type(self).__name__.lower()
        return UsageError(f"{call}({name}={getattr(self, name)!r}): choose {choices}")

    def coding_for_gradient(self, name: str, shape: Sequence[int], dtype: str) -> Coding | None:
        """Return the coding of a gradient, or None if it is sent uncompressed."""
        return _decide(self, name, tuple(shape), dtype)

    def coding(self, *, lasting: bool = True) -> Coding:
        """Return the coding of any tensor.

        Args:
            lasting: whether the name is used again; error feedback requires it.
        """
        from qsgd_hpc._core import CodecSpec, Coding

        feedback = lasting and self.feeds_back
        # With a code whose error can exceed its input, the residual would grow without bound.
        contract = feedback and not self.biased
        spec = CodecSpec(bucket_size=self.bucket_size, contract=contract, **self._codec())
        budget = (self.nmse_budget or 0.0) if lasting else 0.0
        return Coding(
            spec,
            auto_bits=self.auto_bits,
            auto_code=self.auto_code,
            error_feedback=feedback,
            nmse_budget=budget,
        )

    @property
    def auto_bits(self) -> bool:
        """Whether the planner chooses the bits."""
        return False

    @property
    def auto_code(self) -> bool:
        """Whether the planner may also choose another code, which loses less with as many bits."""
        return False

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback is on."""
        if self.error_feedback is None:
            return self.biased or self._bits() <= self.feedback_bits
        return self.error_feedback

    def with_bits(self, bits: int) -> Lossy:
        """Return these settings with other bits; codes with fixed bits become QSGD."""
        if isinstance(self, _WithBits):
            return replace(self, bits=bits)
        return Qsgd(bits, **{f.name: getattr(self, f.name) for f in fields(Lossy)})

    def require_fixed_length(self, caller: str) -> None:
        """Raise for codes that torch.distributed cannot send.

        Raises:
            UsageError: the planner chooses the bits, or the length is variable; the message names
                ``caller``.
        """
        if self.varies:
            raise UsageError(
                f"{caller}: {self.scheme} codes have a variable length, which "
                "torch.distributed's messages do not support; choose another code, or use "
                "hvd.DistributedOptimizer"
            )
        if self.auto_bits:
            raise UsageError(
                f"{caller}(bits='auto'): the planner does not measure torch.distributed; choose "
                "1 to 8, or use hvd.DistributedOptimizer"
            )

    @abstractmethod
    def _bits(self) -> int:
        """Return the bits per sent element."""

    def _codec(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "bits": self._bits()}


@functools.lru_cache(maxsize=4096)
def _decide(settings: Lossy, name: str, shape: tuple[int, ...], dtype: str) -> Coding | None:
    if dtype not in FLOATING:
        return None
    count = math.prod(shape)
    bits = first_match(as_rules(settings.rules), name, count)
    if bits == PLAIN_BITS:
        return None
    if bits is not None:
        return settings.with_bits(bits).coding()
    if len(shape) < 2 or count < settings.min_elements:
        return None
    return settings.coding()


@dataclass(frozen=True)
class _WithBits(Lossy):
    """A code with a choice of 1 to 8 bits.

    Args:
        bits: bits per element on the wire, including the sign; 1 is the sign with a scale, as in
            :class:`Sign`; "auto": 8 bits, 4 bits or uncompressed, whichever the planner finds to be
            the fastest.
    """

    bits: int | Literal["auto"] = 4

    one_bit_is_sign: ClassVar[bool] = True
    """Whether one bit selects :class:`Sign`; else the code has its own one-bit form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto_bits:
            return
        if not isinstance(self.bits, int) or not 1 <= self.bits <= 8:
            raise self._fault("bits", "1 to 8, or 'auto'; Compression.none sends float32")

    @property
    def auto_bits(self) -> bool:
        """Whether the planner chooses the bits."""
        return self.bits == AUTO_BITS

    @property
    def _is_sign(self) -> bool:
        return self.bits == 1 and self.one_bit_is_sign

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Whether the expected decoded value differs from the input."""
        return self._is_sign

    def _bits(self) -> int:
        return MOST_AUTO_BITS if self.bits == "auto" else self.bits

    def _codec(self) -> dict[str, Any]:
        return {"scheme": "sign" if self._is_sign else self.scheme, "bits": self._bits()}


@dataclass(frozen=True)
class Qsgd(_WithBits):
    """QSGD stochastic quantisation (Alistarh et al., NeurIPS 2017); see also :class:`Lossy`.

    Args:
        bits: bits per element on the wire, including the sign, 1 to 8; 1 is the sign with a scale,
            as in :class:`Sign`, where a gradient of zero does not stay zero; "auto" lets the
            planner measure the machine and choose 8 bits, 4 bits or float32 for each tensor.
        norm: ``"max"`` (smallest error) or ``"l2"`` (the paper's).
        rounding: ``"stochastic"`` (unbiased) or ``"nearest"`` (biased; warns).
    """

    norm: str = _from("QSGD_NORM")
    rounding: str = _from("QSGD_ROUNDING")
    scheme = "qsgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in ("max", "l2"):
            raise self._fault("norm", "'max' or 'l2'")
        if self.rounding not in ("stochastic", "nearest"):
            raise self._fault("rounding", "'stochastic' or 'nearest'")
        if self.rounding == "nearest":
            _warn_of_bias()

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Whether the expected decoded value differs from the input."""
        return self._is_sign or self.rounding == "nearest"

    def _codec(self) -> dict[str, Any]:
        choices = {} if self._is_sign else {"norm": self.norm, "rounding": self.rounding}
        return {**super()._codec(), **choices}


@dataclass(frozen=True)
class Auto(Qsgd):
    """The planner chooses the code and its bits for each tensor; see :class:`Lossy`.

    It measures the machine and chooses QSGD with 8 or 4 bits, EDEN with 4 or 3, or float32: a code
    that loses more is used only if it saves another 5% of the time. Settings that EDEN does not
    have leave QSGD and float32: the norm "l2", the rounding "nearest", and buckets that are no
    powers of two.
    """

    bits: int | Literal["auto"] = "auto"

    @property
    def auto_code(self) -> bool:
        """Whether EDEN has these settings."""
        size = self.bucket_size
        return self.norm == "max" and self.rounding == "stochastic" and not size & (size - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != AUTO_BITS:
            raise self._fault("bits", "a code, such as hvd.Compression.qsgd, to set bits")

    def with_bits(self, bits: int) -> Lossy:
        """Return QSGD with these settings and bits."""
        settings = {f.name: getattr(self, f.name) for f in fields(Qsgd) if f.name != "bits"}
        return Qsgd(bits, **settings)


@functools.cache
def _warn_of_bias() -> None:
    warnings.warn(
        "rounding='nearest' is biased: its errors do not average out over ranks and steps. "
        "Turn on error feedback (the default for it), or use rounding='stochastic', which is "
        "unbiased",
        stacklevel=4,
    )


@dataclass(frozen=True)
class MinMax(_WithBits):
    """Levels between a bucket's minimum and maximum (as in QSGD-TF); see :class:`Lossy`.

    Zero is generally not a level: an element with a gradient of zero is sent as one of the two
    levels around it.
    """

    scheme = "minmax"
    one_bit_is_sign = False


@dataclass(frozen=True)
class Nuqsgd(_WithBits):
    """Exponential levels (Ramezani-Kebrya et al., JMLR 2021); see :class:`Lossy`."""

    scheme = "nuqsgd"


@dataclass(frozen=True)
class Eden(_WithBits):
    """Randomly rotated buckets, quantised to levels for a normal distribution; see :class:`Lossy`.

    After the rotation the elements are nearly normally distributed, so that a few large elements do
    not increase the error of the others: at 4 bits the error is a quarter of QSGD's, and at 3 bits
    less than QSGD's at 4. No element is sent as exactly zero, except in a bucket of zeros.

    Args:
        bits: bits per element on the wire, including the sign, 1 to 8; 1 is an unbiased sign.

    Source: Vargaftik et al., EDEN, ICML 2022, and DRIVE, NeurIPS 2021.
    """

    scheme = "eden"
    feedback_bits = 1
    one_bit_is_sign = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_size & (self.bucket_size - 1):
            raise self._fault("bucket_size", f"a power of two from 64 to {MAX_BUCKET}")


@dataclass(frozen=True)
class Elias(_WithBits):
    """QSGD's levels of an L2 norm in the paper's sparse code; see also :class:`Lossy`.

    The code has a variable length: the more levels of a bucket are zero, the fewer bytes are sent.
    Coding is serial and therefore slow.

    Args:
        bits: 2^(bits-1) - 1 levels on each side of zero; 5 gives about sqrt(n) levels for buckets
            of 512 elements, and needs at most 2.8 bits per element on average.
    """

    bits: int | Literal["auto"] = 5
    scheme = "elias"
    feedback_bits = 4
    varies = True


@dataclass(frozen=True)
class TernGrad(Lossy):
    """-1, 0 or 1 times a scale, in 2 bits (Wen et al., NeurIPS 2017); see :class:`Lossy`."""

    scheme = "terngrad"

    def _bits(self) -> int:
        return 2


@dataclass(frozen=True)
class Sign(Lossy):
    """The sign times the bucket's mean magnitude, in 1 bit; biased; see :class:`Lossy`.

    Zero is not a level: an element with a gradient of zero is sent as plus or minus that magnitude.
    Error feedback compensates for it in the next steps; without it, such a weight drifts.
    """

    scheme = "sign"
    biased = True

    def _bits(self) -> int:
        return 1


@dataclass(frozen=True)
class TopK(Lossy):
    """The largest elements of each bucket, sent exactly; biased; see :class:`Lossy`.

    Args:
        ratio: fraction of the elements that are sent; at least one per bucket.
    """

    ratio: float = 0.01
    scheme = "topk"
    biased = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise self._fault("ratio", "a ratio above 0 and up to 1, such as 0.01")

    def _bits(self) -> int:
        return 32  # per sent element

    def _codec(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "k": max(1, round(self.ratio * self.bucket_size))}


def has_choice_of_bits(scheme: str) -> bool:
    """Return whether the code of this name has a choice of 1 to 8 bits."""
    return issubclass(KINDS.get(scheme, Lossy), _WithBits)


def from_environment() -> Lossy | None:
    """Return the code of QSGD_BITS and QSGD_SCHEME; None if both are unset, or with 32 bits.

    Raises:
        UsageError: QSGD_BITS differs from the fixed bits of the scheme.
    """
    bits, scheme = env.get("QSGD_BITS"), env.get("QSGD_SCHEME")
    if bits == PLAIN_BITS or (bits is None and scheme is None):
        return None
    if bits == AUTO_BITS and scheme is None:
        return Auto()
    kind = KINDS[scheme or "qsgd"]
    if issubclass(kind, _WithBits):
        return kind() if bits is None else kind(bits)
    if bits is not None:
        raise UsageError(
            f"QSGD_BITS={bits} with QSGD_SCHEME={scheme}: this scheme has a fixed number of "
            "bits; unset QSGD_BITS, or set it to 32 for no compression"
        )
    return kind()
