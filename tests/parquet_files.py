"""Parquet files of tests, and images as their columns hold them."""

import io

import pyarrow
import pyarrow.parquet as parquet
from PIL import Image


def write(path, columns, group=10):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return str(path)


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, "PNG")
    return stream.getvalue()


def spark_row(pixels):
    """As Spark's data source `image` has it: blue first."""
    mode = {1: 0, 3: 16}[pixels.shape[2]]
    height, width, channels = pixels.shape
    data = pixels[..., ::-1].tobytes()
    return {"origin": "", "height": height, "width": width, "nChannels": channels, "mode": mode, "data": data}
