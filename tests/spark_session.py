"""A Spark session of tests on two cores, and rows for it. Needs pyspark and Java."""

import contextlib
import os
import sys

import numpy as np
from pyspark.sql import SparkSession
from runs import ROOT


@contextlib.contextmanager
def session(folder):
    """A session whose files are in a folder."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", 2).config("spark.local.dir", str(folder))
    found = builder.config("spark.sql.warehouse.dir", str(folder)).config("spark.driver.memory", "1g").getOrCreate()
    found.sparkContext.setLogLevel("OFF")
    try:
        yield found
    finally:
        found.stop()


def points_of(spark):
    """300 rows of 3 numbers; the class says whether their sum is positive."""
    x = np.random.default_rng(0).normal(size=(300, 3))
    rows = [(*map(float, row), int(row.sum() > 0)) for row in x]
    return spark.createDataFrame(rows, "a double, b double, c double, kind int").coalesce(1).cache()
