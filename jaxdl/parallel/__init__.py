"""Devices and processes: the mesh, sharding rules, precision, collectives, the compiler, the cluster, tables of
embeddings."""
