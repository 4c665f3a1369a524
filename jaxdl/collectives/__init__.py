"""Custom primitives: selections, and collectives that send fewer bytes than a sum of whole arrays.

Pure functions with shapes known at trace time; no state. The collectives are *lossy sums with a known error*: asked
for it, each also returns what it left out, so that the exchange can hand it in again later (error feedback).
"""

from jaxdl.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.collectives.quantized import quantized_all_reduce, quantized_sent_bytes
from jaxdl.collectives.select import select_top_k
from jaxdl.collectives.sparse import sparse_all_reduce, sparse_sent_bytes

__all__ = [
    "all_reduce_sent_bytes",
    "half_all_reduce",
    "quantized_all_reduce",
    "quantized_sent_bytes",
    "select_top_k",
    "sparse_all_reduce",
    "sparse_sent_bytes",
]
