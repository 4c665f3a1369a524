"""The lease of a workdir: at most one run at a time trains in it, on any host that shares the folder.

The owner keeps `lease.json` there and adds one to the count in it every `BEAT_SEC`. Clocks of hosts are never compared:
another run that wants the workdir watches, on its own monotonic clock, whether the count changes. A change means that
the owner is alive; after no change for `LEASE_SEC`, the lease is taken over. An owner of the same boot and process
namespace is found by its process id and start time, so the lease of a killed process is taken over at once.

A lease is created with link(2) of a complete file, which is atomic on NFS too (without links, with O_EXCL). It ends
exactly once: the run that takes it over, or the owner that releases it, first creates the file `.lease.TOKEN.next`,
named by the token of the ending lease. So only one of several takers wins, and an owner cannot release a lease that was
taken over. The holder is the last of the chain lease.json -> its successor -> ...
"""

from jaxdl.parallel.lease.holder import Holder, is_alive, this_process
from jaxdl.parallel.lease.lease import BEAT_SEC, FULL, IN_USE, LEASE_SEC, Lease

__all__ = ["BEAT_SEC", "FULL", "IN_USE", "LEASE_SEC", "Holder", "Lease", "is_alive", "this_process"]
