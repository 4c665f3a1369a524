"""The rows of bench exchange: an exchange, predicted and measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from jaxdl.exchange import (
    ExchangeConfig,
)
from jaxdl.exchange.cost import Cost


@dataclass(frozen=True)
class Row:
    """One exchange: predicted and measured."""

    config: ExchangeConfig
    cost: Cost
    seconds: tuple[float, ...]
    sent_bytes: float
    """Over the slow axis, as the exchange itself counts them."""
    compression: float

    @property
    def measured_sec(self) -> float:
        """The median."""
        return statistics.median(self.seconds)
