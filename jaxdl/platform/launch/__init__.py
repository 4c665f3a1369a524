"""Many processes from one command: `python -m jaxdl.launch`, or `run_hosts`, `start_hosts` and `Network` in Python."""

from jaxdl.platform.launch.netns import Network, clean_up_stale
from jaxdl.platform.launch.processes import Host, Launch, local_hosts, run_hosts, start_hosts

__all__ = ["Host", "Launch", "Network", "clean_up_stale", "local_hosts", "run_hosts", "start_hosts"]
