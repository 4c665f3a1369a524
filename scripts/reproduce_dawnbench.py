"""Reproduces the DAWNBench ImageNet run: ResNet-50 to 93 % top-5, an entry in DAWNBench's format, and a report.

TFDS_DATA_DIR=... python scripts/reproduce_dawnbench.py --nodes 1 --gpus-per-node 8 --price-per-hour 98.32
python scripts/reproduce_dawnbench.py --rehearse     (all of it in minutes on a CPU)

The program is benchmarks/dawnbench/reproduce.py; this front lets it start from any folder.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    runpy.run_module("benchmarks.dawnbench.reproduce", run_name="__main__")
