"""Data sets that are read while a run trains, shard by shard: from disks, web servers, clouds, the hub."""
