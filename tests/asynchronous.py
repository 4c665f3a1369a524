"""Learners of a small problem in NumPy, and a syncer for them: in this process, or as `python asynchronous.py`."""

import functools
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

from jaxdl.parallel.asynchrony.learner import Learner, learn
from jaxdl.parallel.asynchrony.outer import Outer, digest
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.service import find_syncer
from jaxdl.parallel.asynchrony.syncer import Syncer

TOKEN = "a token of sixteen or more"
CLASSES, FEATURES = 10, 64
SIZE = FEATURES * CLASSES + CLASSES


@functools.cache
def digits():
    """(train images, train labels, test images, test labels) of scikit-learn's digits."""
    if kept := os.environ.get("DIGITS"):
        found = np.load(kept)
        images, labels = found["images"], found["labels"]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


class Softmax:
    """Softmax regression by SGD with momentum; `delay_sec` is a pause in each step."""

    def __init__(self, learner, resumes="", delay_sec=0.0):
        self.draw = np.random.default_rng([learner, len(resumes)])
        self.momentum = np.zeros(SIZE, np.float32)
        self.delay_sec = delay_sec

    def initial(self):
        return np.zeros(SIZE, np.float32)

    def run(self, anchor, num_steps):
        images, labels, _, _ = digits()
        own = anchor.copy()
        for _ in range(num_steps):
            rows = self.draw.integers(len(images), size=16)
            x, probabilities = images[rows], softmax(own, images[rows])
            probabilities[np.arange(16), labels[rows]] -= 1
            grad = np.concatenate([(x.T @ probabilities).ravel(), probabilities.sum(axis=0)]) / np.float32(16)
            self.momentum = self.momentum * 0.9 + grad
            own = own - self.momentum * 0.05
        time.sleep(self.delay_sec * num_steps)
        return anchor - own, 16.0 * num_steps


def softmax(params, images):
    logits = images @ params[: FEATURES * CLASSES].reshape(FEATURES, CLASSES) + params[FEATURES * CLASSES :]
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def accuracy(params):
    _, _, images, labels = digits()
    return float((softmax(params, images).argmax(axis=1) == labels).mean())


def make_learner(port, number, num_learners=4, **options):
    layout = digest(np.array([FEATURES, CLASSES], np.float32))
    options = {"size": SIZE, "layout": layout, "give_up_sec": 20.0, "token": TOKEN} | options
    return Learner(("127.0.0.1", port), number, num_learners, options.pop("token"), **options)


def vanish(learner):
    """What the syncer sees when the learner's process is killed."""
    learner._closed = True
    if learner._channel is not None:
        learner._channel.close()


class Running:
    """A syncer and its learners in threads; `with` ends them all."""

    def __init__(self, folder, policy, outer, *, port=0, **options):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self.folder, self.said = Path(folder), []
        self.syncer = Syncer(
            policy, outer, self.listener, TOKEN, self.folder, say=self.said.append, **{"silence_sec": 5.0} | options
        )
        self.num_learners = policy.learners
        self.result, self.ended, self.learners = None, {}, {}
        self.threads = [threading.Thread(target=self._serve, daemon=True)]
        self.threads[0].start()

    def _serve(self):
        self.result = self.syncer.run()

    def learner(self, number, worker, **options):
        """Starts a learner; one of the same number must have vanished."""
        learner = make_learner(self.port, number, self.num_learners, **options)
        self.learners[number] = learner

        def work():
            try:
                self.ended[number] = learn(learner, worker)
            except Exception as error:
                if not learner._closed:
                    self.ended[number] = error

        thread = threading.Thread(target=work, daemon=True)
        self.threads.append(thread)
        thread.start()
        return learner

    def wait_for_merges(self, number):
        """Waits until the syncer has merged so many times more."""
        end = self.syncer._centre.standing.version + number
        while self.syncer._centre.standing.version < end:
            time.sleep(0.01)

    def wait(self, timeout_sec=30.0):
        """The syncer's result. Fails when the run hangs."""
        self.threads[0].join(timeout_sec)
        assert not self.threads[0].is_alive(), f"the run hangs: {self.said[-5:]}"
        return self.result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.syncer.stop()
        for learner in self.learners.values():
            vanish(learner)
        self.threads[0].join(10)


if __name__ == "__main__":
    what, folder, port, number, delay = sys.argv[1:]
    if what == "syncer":
        listener = socket.create_server(("127.0.0.1", int(port)))
        policy = Policy(learners=3, every_steps=8, total_steps=int(number), quorum=2, grace_sec=0.05, return_sec=5.0)
        print(Syncer(policy, Outer(), listener, TOKEN, Path(folder), silence_sec=5.0, save_sec=0.1).run().version)
    elif found := find_syncer():  # Started by `python -m jaxdl.launch async`.
        restart = os.environ["JAXDL_RESTART"]
        if number == "0" and restart == "0" and what == "killed":
            threading.Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()
        if what == "lost" and found.learner == 1:
            sys.exit(3)
        resumes = "x" * int(restart)
        learner = make_learner(found.port, found.learner, found.num_learners, token=found.token, resumes=resumes)
        print("accuracy", accuracy(learn(learner, Softmax(found.learner, resumes, float(delay))).anchor))
    else:
        resumes = os.environ.get("RESUMES", "")
        learn(make_learner(int(port), int(number), 3, resumes=resumes), Softmax(int(number), resumes, float(delay)))
