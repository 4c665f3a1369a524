"""Exchanges of few bits an entry: quantized gradients, and signs alone."""

from __future__ import annotations

import abc
from typing import Literal

import pydantic

from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import ADD_RESIDUAL, JOIN, NORM, SPLIT, Cost, Figures, Gradients, Machine, known_speed
from jaxdl.exchange.message import Context, Message, Sent
from jaxdl.parallel.collectives.quantized import quantized_all_reduce, quantized_sent_bytes


class _FewBits(Compressed, kind=None):
    """What is common to the exchanges of few bits an entry."""

    block_size: int

    @property
    @abc.abstractmethod
    def num_bits(self) -> int:
        """Bits an entry."""

    @property
    def figures(self) -> Figures:
        """The quantized sum, and its all-to-all."""
        return Figures(bits=(self.num_bits,), collectives=("all_to_all",))

    def sent_bytes(self, num_elements: int, num_replicas: int) -> float:
        """Bytes that one device sends over the slow axis for a bucket."""
        return quantized_sent_bytes(num_elements, num_replicas, bits=self.num_bits, block_size=self.block_size)

    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""
        m, n = gradients.num_replicas, bucket.num_own
        sent = self.sent_bytes(n + -n % self._multiple(n, m), m)
        latency, wire = machine.two_shots_sec(sent, m)
        accesses = JOIN + SPLIT + NORM + (ADD_RESIDUAL + SPLIT + NORM if self.error_feedback else 0)
        speed = known_speed(machine.speeds.quantized_elements_per_sec, self.num_bits, "quantization")
        return Cost(
            latency_sec=latency,
            wire_sec=wire,
            compute_sec=n / speed + machine.passes_sec(n, accesses),
            inner_sec=machine.gathers_sec(bucket, gradients.layout, 1 + self.error_feedback),
            sent_bytes=sent,
        )

    def _multiple(self, num_elements: int, num_replicas: int) -> int:
        """Of what a bucket is filled up with zeros to a multiple: ranges of whole blocks, where it is much longer.

        Padding by the collective would cost copies of everything.
        """
        whole = num_replicas * self.block_size
        return whole if num_elements >= 16 * whole else 1

    def send(self, message: Message, context: Context) -> Sent:
        """The mean of the quantized buckets of all replicas."""
        bucket, axis, key = message.bucket, context.axis, context.device_key(message)
        summand = bucket.join(message.summand, multiple=self._multiple(bucket.num_own, context.num_replicas))
        summand, bits, block = held_back(summand, message.last), self.num_bits, self.block_size
        total, error = quantized_all_reduce(summand, axis, key, bits=bits, block_size=block, return_error=True)
        inner = bucket.split_bytes(context.layout, 1 + self.error_feedback)
        sent = {axis: self.sent_bytes(summand.size, context.num_replicas)} | inner
        residual = bucket.split(error) if self.error_feedback else None
        return Sent(
            bucket,
            total=bucket.split(total),
            residual=residual,
            sent_bytes=sent,
            num_entries=bucket.num_own,
            last=total[0],
        )


class Quantized(_FewBits, kind="quantized"):
    """Sends every entry in a few bits, rounded at random so that the mean is right on average (QSGD, Alistarh et al.
    2017), once on the way to the owner of its range and once, summed, on the way back."""

    bits: Literal[8, 4, 2] = 8
    """Bits an entry."""
    block_size: int = pydantic.Field(default=256, ge=8, le=2**16, multiple_of=8)
    """Entries that share one scale."""
    error_feedback: bool = False
    """Keep the rounding errors and add them to the next gradient. The mean is right on average without."""

    @pydantic.model_validator(mode="after")
    def _contracts(self) -> Quantized:
        if self.error_feedback and self.bits == 2:
            raise ValueError(
                "error_feedback with bits = 2: rounding at random to three levels leaves more than there was, so the "
                "residual would grow without end. Use 4 or 8 bits, the exchange sign, or no error feedback."
            )
        return self

    @property
    def num_bits(self) -> int:
        """Bits an entry."""
        return self.bits

    @property
    def label(self) -> str:
        """`quantized 8 bits`."""
        return f"quantized {self.bits} bits" + (" feedback" if self.error_feedback else "")

    @property
    def distortion(self) -> tuple[float, float]:
        """Unbiased: little; more with fewer bits."""
        return 1, -self.bits

    @classmethod
    def variants(cls) -> list[ExchangeConfig]:
        """One for each number of bits."""
        return [cls(bits=8), cls(bits=4), cls(bits=2)]


class Sign(_FewBits, kind="sign"):
    """Sends the sign of every entry and one mean magnitude a block, both ways, and keeps what that leaves out.

    1-bit SGD (Seide et al. 2014) with the compression on both ways of 1-bit Adam (Tang et al. 2021).
    """

    block_size: int = pydantic.Field(default=1024, ge=8, le=2**16, multiple_of=8)
    """Entries that share one magnitude."""

    @pydantic.model_validator(mode="after")
    def _needs_feedback(self) -> Sign:
        if not self.error_feedback:
            raise ValueError("error_feedback = False: signs alone are biased and do not converge. Leave it on.")
        return self

    @property
    def num_bits(self) -> int:
        """Bits an entry."""
        return 1

    @property
    def label(self) -> str:
        """`sign`."""
        return "sign"

    @property
    def distortion(self) -> tuple[float, float]:
        """The most."""
        return 4, 0
