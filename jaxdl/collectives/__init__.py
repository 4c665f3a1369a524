"""Custom primitives: selections, and collectives that send fewer bytes than a sum of whole arrays.

Pure functions with shapes known at trace time; no state. The collectives are *lossy sums with a known error*: asked
for it, each also returns what it left out, so that the exchange can hand it in again later (error feedback).
"""
