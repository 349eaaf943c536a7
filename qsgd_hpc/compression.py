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

BUCKET_MULTIPLE = 64
MAX_BUCKET = 1 << 16
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
FEEDBACK_BITS = 2
# What the planner begins with where bits are open; the core knows what else it may take.
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
        error_feedback: add what coding has lost to what is sent next. None: on at 1 and 2 bits
            and for biased codes, which need it to converge. Takes float32 memory of the
            gradient's size, and an n-th of it more on n ranks.
        min_elements: gradients with fewer elements, and those with one dimension (biases, norms),
            travel uncompressed: they are few and sensitive.
        rules: bits for single tensors, which win over ``min_elements``: text such as
            ``"*.bias=32, embed*=8, >1M=2"`` or pairs such as ``[("embed*", 8)]``; the first that
            fits the parameter's name or size decides. See :mod:`qsgd_hpc.rules`.
        nmse_budget: squared error of a code over the squared magnitude of what it codes. A tensor
            that exceeds it gets more bits from the next step on, finally float32.
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
    """At so few bits one code loses more than half of what it carries."""
    varies: ClassVar[bool] = False
    """Whether the length of a code depends on the gradient."""

    def __init_subclass__(cls) -> None:
        if "scheme" in vars(cls):
            KINDS[cls.scheme] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", as_rules(self.rules))
        size = self.bucket_size
        if not isinstance(size, int) or not 0 < size <= MAX_BUCKET or size % BUCKET_MULTIPLE:
            raise self._fault("bucket_size", f"a multiple of {BUCKET_MULTIPLE} up to {MAX_BUCKET}")
        if self.error_feedback not in (None, True, False):
            raise self._fault("error_feedback", "True, False, or None (on if the code needs it)")
        if self.nmse_budget is not None and not self.nmse_budget > 0:
            raise self._fault("nmse_budget", "a number above 0, such as 0.01, or None")

    def _fault(self, name: str, choices: str) -> UsageError:
        call = type(self).__name__.lower()
        return UsageError(f"{call}({name}={getattr(self, name)!r}): choose {choices}")

    def coding_for_gradient(self, name: str, shape: Sequence[int], dtype: str) -> Coding | None:
        """Return how to code a gradient, or None where it travels as it is."""
        return _decide(self, name, tuple(shape), dtype)

    def coding(self, *, lasting: bool = True) -> Coding:
        """Return how to code any tensor.

        Args:
            lasting: whether a tensor of this name comes again: else nothing can be fed back.
        """
        from qsgd_hpc._core import CodecSpec, Coding

        feedback = lasting and self.feeds_back
        # A code whose error can exceed what it carries would let the residual grow without bound.
        contract = feedback and not self.biased
        spec = CodecSpec(bucket_size=self.bucket_size, contract=contract, **self._codec())
        budget = (self.nmse_budget or 0.0) if lasting else 0.0
        return Coding(spec, auto_bits=self.auto_bits, error_feedback=feedback, nmse_budget=budget)

    @property
    def auto_bits(self) -> bool:
        """Whether the planner chooses the bits."""
        return False

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback is on."""
        if self.error_feedback is None:
            return self.biased or self._bits() <= self.feedback_bits
        return self.error_feedback

    def with_bits(self, bits: int) -> Lossy:
        """Return these settings with other bits; a code that has no choice becomes QSGD."""
        if isinstance(self, _WithBits):
            return replace(self, bits=bits)
        return Qsgd(bits, **{f.name: getattr(self, f.name) for f in fields(Lossy)})

    def require_fixed_length(self, caller: str) -> None:
        """Raise for codes that torch.distributed cannot carry.

        Raises:
            UsageError: bits are left to the planner, or lengths vary; the message names ``caller``.
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
        """Return the bits of an element that is sent."""

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
    """A code that exists for 1 to 8 bits.

    Args:
        bits: bits per element on the wire, sign included; 1 is the sign with a scale, as in
            :class:`Sign`; "auto": 8 or 4 or none at all, whichever the planner has found to be the
            fastest here.
    """

    bits: int | Literal["auto"] = 4

    one_bit_is_sign: ClassVar[bool] = True
    """Else it has a code of one bit of its own."""

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
        """Whether the mean of many codes differs from what was coded."""
        return self._is_sign

    def _bits(self) -> int:
        return MOST_AUTO_BITS if self.bits == "auto" else self.bits

    def _codec(self) -> dict[str, Any]:
        return {"scheme": "sign" if self._is_sign else self.scheme, "bits": self._bits()}


@dataclass(frozen=True)
class Qsgd(_WithBits):
    """QSGD stochastic quantisation (Alistarh et al., NeurIPS 2017); see :class:`Lossy`, too.

    Args:
        bits: bits per element on the wire, sign included, 1 to 8; 1 is the sign with a scale, as
            in :class:`Sign`, where a gradient of zero does not stay zero; "auto" leaves them to the
            planner, which measures the machine and takes 8 or 4 bits, or float32, for each tensor.
        norm: ``"max"`` (least error) or ``"l2"`` (the paper's).
        rounding: ``"stochastic"`` (unbiased) or ``"nearest"`` (biased, and warns of it).
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
        """Whether the mean of many codes differs from what was coded."""
        return self._is_sign or self.rounding == "nearest"

    def _codec(self) -> dict[str, Any]:
        choices = {} if self._is_sign else {"norm": self.norm, "rounding": self.rounding}
        return {**super()._codec(), **choices}


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
    """Levels between a bucket's least and largest element (QSGD-TF's); see :class:`Lossy`.

    Zero need not be a level: an element whose gradient is zero is sent as one of the two around it.
    """

    scheme = "minmax"
    one_bit_is_sign = False


@dataclass(frozen=True)
class Nuqsgd(_WithBits):
    """Exponential levels (Ramezani-Kebrya et al., JMLR 2021); see :class:`Lossy`."""

    scheme = "nuqsgd"


@dataclass(frozen=True)
class Eden(_WithBits):
    """Buckets rotated at random, on the levels that suit a normal distribution; see :class:`Lossy`.

    However a gradient's elements are distributed, they are nearly normal after the rotation, so a
    few large ones cost the others nothing: at 4 bits it loses a quarter of what QSGD does, and at 3
    bits less than QSGD at 4. No element is sent as exactly zero, but in a bucket of zeros.

    Args:
        bits: bits per element on the wire, sign included, 1 to 8; 1 is a sign, but an unbiased one.

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
    """QSGD's levels of an L2 norm in the paper's sparse code; see :class:`Lossy`, too.

    As many bits as the levels need: the fewer of a bucket's levels are not zero, the fewer bytes
    travel. Coding is serial, and so it is slow.

    Args:
        bits: give 2^(bits-1) - 1 levels on each side of zero; 5, which is about sqrt(n) levels for
            buckets of 512 elements, takes at most 2.8 bits per element in the mean.
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

    There is no zero: an element whose gradient is zero is sent as plus or minus that magnitude.
    Error feedback takes it back in the next steps; without it, such a weight drifts.
    """

    scheme = "sign"
    biased = True

    def _bits(self) -> int:
        return 1


@dataclass(frozen=True)
class TopK(Lossy):
    """The largest elements of each bucket, exactly, and no others; biased; see :class:`Lossy`.

    Args:
        ratio: share of the elements that is sent; at least one of each bucket is.
    """

    ratio: float = 0.01
    scheme = "topk"
    biased = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise self._fault("ratio", "a ratio above 0 and up to 1, such as 0.01")

    def _bits(self) -> int:
        return 32  # of an element that is sent

    def _codec(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "k": max(1, round(self.ratio * self.bucket_size))}


def has_choice_of_bits(scheme: str) -> bool:
    """Tell whether a code of this name exists for 1 to 8 bits."""
    return issubclass(KINDS.get(scheme, Lossy), _WithBits)


def from_environment() -> Lossy | None:
    """Return what QSGD_BITS and QSGD_SCHEME ask for, or None: both unset, or 32 bits.

    Raises:
        UsageError: a scheme that has no choice of bits, with other bits than its own.
    """
    bits, scheme = env.get("QSGD_BITS"), env.get("QSGD_SCHEME")
    if bits == PLAIN_BITS or (bits is None and scheme is None):
        return None
    kind = KINDS[scheme or "qsgd"]
    if issubclass(kind, _WithBits):
        return kind() if bits is None else kind(bits)
    if bits is not None:
        raise UsageError(
            f"QSGD_BITS={bits} with QSGD_SCHEME={scheme}: this scheme has a fixed number of "
            "bits; unset QSGD_BITS, or set it to 32 for no compression"
        )
    return kind()
