"""Custom primitives: selections, and collectives that send fewer bytes than a sum of whole arrays.

Pure functions with shapes known at trace time; no state. The collectives are *lossy sums with a known error*: each can
return the error, too, which the exchange adds to the next gradient (error feedback).
"""

from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.parallel.collectives.quantized import quantized_all_reduce, quantized_sent_bytes
from jaxdl.parallel.collectives.select import select_top_k
from jaxdl.parallel.collectives.sparse import sparse_all_reduce, sparse_sent_bytes

__all__ = [
    "all_reduce_sent_bytes",
    "half_all_reduce",
    "quantized_all_reduce",
    "quantized_sent_bytes",
    "select_top_k",
    "sparse_all_reduce",
    "sparse_sent_bytes",
]
