"""`bench balance`: compute and communication of a machine, weighed and compared with earlier measurements."""
