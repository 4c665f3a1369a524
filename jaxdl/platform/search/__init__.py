"""Search over settings: many runs of one experiment, their settings proposed by Optuna, the good ones trained longer.

`space` has what may vary, `samplers` who proposes, `schedulers` which trial trains on (ASHA with promotion, population
based training), `engines` where trials run, `journal` what is on disk, `driver` the loop that joins them. Each trial is
an ordinary workdir and `python -m jaxdl.train` in a process of its own.
"""
