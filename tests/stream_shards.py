"""Shards of streams, written by the descriptions of their formats."""

import bz2
import gzip
import io
import json
import tarfile

import numpy as np
import pyarrow as pa

PACK = {"gz": gzip.compress, "bz2": bz2.compress, "zstd": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True)}


def write_mds(folder, columns, samples, per_shard=20, compression=None):
    """Writes MDS shards by the format's description; `columns`: name to (encoding, size, function to bytes)."""
    folder.mkdir()
    shards = []
    for number, start in enumerate(range(0, len(samples), per_shard)):
        encoded = []
        for sample in samples[start : start + per_shard]:
            values = [code(sample[name]) for name, (_, _, code) in columns.items()]
            sizes = [len(v) for v, (_, size, _) in zip(values, columns.values(), strict=True) if size is None]
            encoded.append(np.array(sizes, "<u4").tobytes() + b"".join(values))
        head = b'{"config": "which readers skip"}'
        first = 4 * (len(encoded) + 2) + len(head)
        offsets = first + np.cumsum([0, *map(len, encoded)])
        raw = np.array([len(encoded), *offsets], "<u4").tobytes() + head + b"".join(encoded)
        name = f"shard.{number:05}.mds"
        about = {"format": "mds", "version": 2, "samples": len(encoded), "compression": compression, "hashes": []}
        about["raw_data"] = {"basename": name, "bytes": len(raw), "hashes": {}}
        about["zip_data"] = None
        for key, place in (("names", None), ("encodings", 0), ("sizes", 1)):
            about[f"column_{key}"] = list(columns) if place is None else [kind[place] for kind in columns.values()]
        if compression:
            raw, name = PACK[compression](raw), f"{name}.{compression}"
            about["zip_data"] = {"basename": name, "bytes": len(raw), "hashes": {}}
        (folder / name).write_bytes(raw)
        shards.append(about)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
