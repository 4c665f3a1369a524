"""Photographs: folders, tar files and Parquet, decoded in worker processes, with the tiers of the cache."""
