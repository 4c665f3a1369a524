"""A process of a run that counts steps, for tests of engines: `python step_worker.py FILE STEPS STEP_SEC`.

The first process writes a line for each step (step, number of processes, its process id, its host), and goes on where
the file ends; the others wait until it has made all. SIGTERM ends a process with code 143, as a run that has saved.
"""

import os
import signal
import sys
import time

path, steps, step_sec = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
rank, processes = os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]
going = True


def stop(*_):
    global going
    going = False


def made():
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return len(file.read().splitlines())


signal.signal(signal.SIGTERM, stop)
while rank != "0" and going and made() < steps:
    time.sleep(step_sec / 2)
step = made()
while rank == "0" and going and step < steps:
    with open(path, "a") as file:
        file.write(f"{step} {processes} {os.getpid()} {os.environ.get('JAXDL_HOST', '-')}\n")
    step += 1
    time.sleep(step_sec)
print("made", step, "steps")
sys.exit(0 if going else 143)
