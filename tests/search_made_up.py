"""What the tests of a search's loop share: a real journal and loop, trials that are made up."""

import json

from jaxdl.platform.search.driver import Request, Search
from jaxdl.platform.search.journal import Journal
from jaxdl.platform.search.samplers import Random
from jaxdl.platform.search.schedulers import Course
from jaxdl.platform.search.space import Choices

RATE = Choices("optimizer.learning_rate", (0.1, 0.2, 0.4, 0.8))


class MadeUp:
    """Workers whose trials end at once.

    `end(number, start)` has the exit code of a trial's start of that number; where it is 0, a value is in its history,
    but for the trial `silent`.
    """

    outlive = False

    def __init__(self, request, end, capacity=1, silent=None):
        self.request, self.end, self.capacity, self.silent = request, end, capacity, silent
        self.started, self.jobs, self.calls = [], [], []

    def start(self, job):
        self.started.append(job.number)
        self.jobs.append(job)

    def poll(self):
        codes = {}
        while self.jobs:
            job = self.jobs.pop()
            codes[job.number] = code = self.end(job.number, self.started.count(job.number))
            if code == 0 and job.number != self.silent:
                words = list(job.command)
                step = int(words[words.index("--max-steps") + 1]) if "--max-steps" in words else 9
                self.write(job.number, {"step": step, "eval/loss": 1.0 + job.number})
        return codes

    def write(self, number, row):
        workdir = self.request.workdir(number)
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def stop(self):
        self.calls.append("stop")

    def close(self):
        self.calls.append("close")


class Said:
    """What a search shows."""

    def __init__(self):
        self.events, self.trials = [], []

    def event(self, text):
        self.events.append(text)

    def refresh(self, trials, running):
        self.trials = list(trials)


def request_in(folder, **changes):
    given = {"command": ("--config", "x"), "settings": (RATE,), "metric": "eval/loss", "direction": "minimize"}
    return Request(**{"folder": folder, **given, "length": lambda settings: 9, **changes})


def course(trials):
    return Course(trials, 9, lambda step: step, "minimize", (RATE,), seed=0)


def searched(request, policy, end=lambda number, start: 0, **workers):
    """One process of a search, to its end: (trials, workers, what it said)."""
    journal = Journal(request.folder / "journal.log", list(request.settings), request.direction)
    made, said = MadeUp(request, end, **workers), Said()
    Search(request, journal, Random(), policy, made, said).run()
    return journal.trials(), made, said
