"""The lease of a workdir: one run at a time trains in it, on whichever host that shares the folder.

The owner keeps `lease.json` there and adds one to the count in it every `BEAT_SEC`. Clocks of hosts are never compared:
whoever else wants the workdir watches, on its own monotonic clock, whether the count changes. A change is a live owner;
no change for `LEASE_SEC` is a lost one, which is taken over. An owner of the same boot and process namespace is looked
up by its process id and start time, so one that was killed is taken over at once.

A lease is made with link(2) of a complete file, which is atomic on NFS too (where there are no links, with O_EXCL).
It ends exactly once: whoever takes it over, and also the owner that releases it, first makes the file
`.lease.TOKEN.next`, named by the token of the lease that ends. So of several takers one wins, and an owner cannot
release what was taken from it. The holder is the last of the chain lease.json -> its successor -> ...
"""

from jaxdl.lease.holder import Holder, is_alive, this_process
from jaxdl.lease.lease import BEAT_SEC, FULL, LEASE_SEC, Lease

__all__ = ["BEAT_SEC", "FULL", "LEASE_SEC", "Holder", "Lease", "is_alive", "this_process"]
