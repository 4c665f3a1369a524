"""`bench cluster`: a cluster emulated on this machine."""
