"""The syncer: one process that holds the anchor, merges what the learners send it, and hands the anchor back.

One thread decides; for each learner one thread receives and one sends, so that a slow learner delays nobody.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxdl.parallel.asynchrony.centre import Centre, Saved
from jaxdl.parallel.asynchrony.codec import Bits, Codec
from jaxdl.parallel.asynchrony.events import SECOND_US, Arrive, Event, Join, Leave, Release, Tick
from jaxdl.parallel.asynchrony.guests import Doorkeeper, Guest, Guests, News
from jaxdl.parallel.asynchrony.messages import Anchor, Hello
from jaxdl.parallel.asynchrony.outer import Outer, Vector
from jaxdl.parallel.asynchrony.policy import RULES, Policy, is_finished
from jaxdl.parallel.asynchrony.storage import FORMAT, TAPE_FILE, StateWriter, Tape, make_folder, newest_state

SILENCE_SEC = 20.0
"""A learner that sends nothing for so long is lost, even while it computes: then it sends beats."""
SAVE_SEC = 60.0
"""Seconds between two saved states."""
MAX_BYTES = 2**36
"""Largest anchor that the first learner may bring."""
_POLL_SEC = 0.5


@dataclass(frozen=True)
class Result:
    """How a run of learners ended."""

    version: int
    """Merges."""
    steps: int
    """Steps of all learners that were merged."""
    deserted: bool
    """Whether learners went away and did not come back."""
    anchor: Vector | None


class Syncer:
    """Serves learners until all have finished. Makes `folder`, and goes on from what an earlier one left there.

    `token` is the secret that learners must know (`cluster.token`); `say` gets a line for people now and then.
    """

    def __init__(
        self,
        policy: Policy,
        outer: Outer,
        listener: socket.socket,
        token: str,
        folder: Path,
        *,
        bits: Bits = 32,
        silence_sec: float = SILENCE_SEC,
        save_sec: float = SAVE_SEC,
        max_bytes: int = MAX_BYTES,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        make_folder(folder)
        self._policy, self._folder, self._say = policy, folder, say
        self._bits: Bits = bits
        self._max_bytes, self._silence_sec, self._save_sec = max_bytes, silence_sec, save_sec
        self._tape = Tape(folder / TAPE_FILE)
        self._tape_told = False
        self._centre = Centre(policy, outer, self._tape.write)
        self._news: queue.Queue[News] = queue.Queue(maxsize=8 * policy.learners + 8)
        self._guests = Guests()
        self._layout: tuple[int, str] | None = None
        """Number of values and hash of the layout, as the first learner had them."""
        self._stopped = False
        self._saver = StateWriter(folder, say)
        self._saved_sec = time.monotonic()
        self._zero_us = 0
        self._begin_sec = time.monotonic()
        self._last_us = 0
        self._begin(outer)
        self._door = Doorkeeper(listener, policy.learners, token, self._news, silence_sec=silence_sec, say=say)

    @property
    def is_finished(self) -> bool:
        """Whether every learner has finished, or has been gone for too long."""
        return is_finished(self._policy, self._centre.standing, self._now_us())

    def stop(self) -> None:
        """Ends `run` soon; from any thread. What has been merged is saved."""
        self._stopped = True

    def run(self) -> Result:
        """Returns when every learner has finished, or has been gone for too long, or after `stop`."""
        try:
            while not self._stopped:
                self._tick()
                if self.is_finished:
                    break
                with contextlib.suppress(queue.Empty):
                    self._hear(self._news.get(timeout=self._patience_sec()))
                self._note_saved()
        finally:
            self._close()
        standing = self._centre.standing
        deserted = not standing.over and not all(member.done for member in standing.members.values())
        return Result(standing.version, standing.steps, deserted and not self._stopped, self._centre.anchor)

    def _begin(self, outer: Outer) -> None:
        """Takes over the state that an earlier syncer left in the folder."""
        settings = {
            "policy": self._policy.model_dump(),
            "outer": outer.model_dump(),
            "bits": self._bits,
            "rules": RULES,
        }
        saved, position, problems = newest_state(self._folder)
        for problem in problems:
            self._say(problem)
        if saved is None:
            self._tape.begin({"kind": "begin", "format": FORMAT, **settings})
            return
        self._centre.go_on_from(saved)
        self._layout = saved.anchor.size, str(saved.fields["layout"])
        self._zero_us = max(self._tape.last_us, self._centre.standing.at_us) + 1
        now_us, standing = self._now_us(), self._centre.standing
        self._tape.write({"kind": "restart", "at_us": now_us, "position": position, **settings})
        self._say(f"goes on from merge {standing.version} ({standing.steps} steps)")
        for learner, member in standing.members.items():
            if not member.done:  # They have from now on to come back.
                self._tell(Leave(self._now_us(), learner, finished=False, why="the syncer was restarted"))

    def _now_us(self) -> int:
        """The time of the next event; each is later than the one before, also after a restart."""
        now_us = self._zero_us + int((time.monotonic() - self._begin_sec) * SECOND_US)
        return max(now_us, self._last_us + 1)

    def _patience_sec(self) -> float:
        wake_us = self._centre.wake_us
        return _POLL_SEC if wake_us is None else min(_POLL_SEC, max(0.0, (wake_us - self._now_us()) / SECOND_US))

    def _tick(self) -> int:
        """The time of the next event, after the policy was told that time has passed: each time that it named until
        then, however late this is noticed. The clock is read once: no named time may lie between two readings."""
        now_us = self._now_us()
        while (wake_us := self._centre.wake_us) is not None and wake_us <= now_us:
            self._tell(Tick(wake_us))
            now_us = max(now_us, self._last_us + 1)
        return now_us

    def _hear(self, news: News) -> None:
        guest = news.guest
        match news.what:
            case "hello":
                assert news.hello is not None
                self._welcome(guest, news.hello)
            case "begin":
                self._join(guest, news.vector)
            case "delta" if self._guests.has(guest):
                delta = news.delta
                assert delta is not None
                arrive = Arrive(
                    self._tick(),
                    guest.learner,
                    delta.round,
                    delta.version,
                    delta.anchor,
                    delta.weight,
                    delta.steps,
                    news.digest,
                    delta.finite and news.finite,
                )
                self._tell(arrive, news.vector)
            case "gone" if self._guests.has(guest):
                self._leave(guest, news.why, finished=news.finished)
            case _:
                pass  # Of a connection that is over already.

    def _welcome(self, guest: Guest, hello: Hello) -> None:
        """Answers a hello; the guest becomes a learner with its first frame."""
        refused = self._refusal(hello)
        if refused is not None:
            self._say(f"a learner from {hello.host} was refused: {refused}")
        expected = 4 * hello.size if self._centre.anchor is None else 0
        guest.welcome(refused, initial_bytes=expected, codec=Codec(hello.size, self._bits))

    def _refusal(self, hello: Hello) -> str | None:
        """Why a learner may not take part, or None."""
        if hello.process >= self._policy.learners:
            return f"learner {hello.process}: there are {self._policy.learners} learners, numbered from 0."
        if hello.num_processes != self._policy.learners:
            return (
                f"learner {hello.process} was started as one of {hello.num_processes}, the syncer for "
                f"{self._policy.learners}. Give both the same number."
            )
        for other in self._guests.all():
            if hello.stream and hello.stream == other.hello.stream and other.learner != hello.process:
                return (
                    f"learner {hello.process} has the same examples in the same order as learner {other.learner} "
                    f"({hello.stream}). Give each its own, as in --seed {{learner}}."
                )
        if 4 * hello.size > self._max_bytes:
            return f"parameters of {4 * hello.size} bytes: the syncer takes at most {self._max_bytes}."
        if self._layout is not None and self._layout != (hello.size, hello.layout):
            return (
                f"the learner has another model ({hello.size} parameters) than the first learner ({self._layout[0]}), "
                "or the syncer's folder is of another run. Give all learners the same experiment, or the syncer a new "
                "folder."
            )
        return None

    def _join(self, guest: Guest, initial: Vector | None) -> None:
        """Takes a guest that has sent its first frame; one of the same number before it is let go."""
        hello = guest.hello
        refused = self._refusal(hello)
        if refused is not None or (self._centre.anchor is None and initial is None):
            guest.close()
            return
        if self._layout is None:
            self._layout = hello.size, hello.layout
        if self._centre.anchor is None:
            assert initial is not None
            self._centre.begin(initial)
        before = self._guests.of(hello.process)
        if before is not None:
            if before.hello.life != hello.life:
                before.replaced(f"another process has joined as learner {hello.process}")
            self._leave(before, "its process connected again", finished=False)
        if self._centre.standing.version == 0 and not self._saver.busy and not self._saver.any:
            self._save(wait=True)
        self._guests.add(guest)
        self._say(f"learner {hello.process} joined from {hello.host}{' again' if hello.round else ''}")
        self._tell(Join(self._tick(), hello.process, hello.life, hello.round, hello.working, hello.resumes))

    def _leave(self, guest: Guest, why: str, *, finished: bool) -> None:
        self._guests.forget(guest)
        guest.close()
        self._say(f"learner {guest.learner} {'has finished' if finished else f'is lost: {why}'}")
        self._tell(Leave(self._tick(), guest.learner, finished, why))

    def _tell(self, event: Event, delta: Vector | None = None) -> None:
        """Lets the centre handle an event, and sends what follows once that is on the tape."""
        before, was_over = self._centre.standing.version, self._centre.standing.over
        decisions = self._centre.handle(event, delta)
        self._last_us = event.at_us
        self._tape.flush()
        if self._tape.problem is not None and not self._tape_told:
            self._tape_told = True
            self._say(self._tape.problem)
        for decision in decisions:
            if isinstance(decision, Release) and (guest := self._guests.of(decision.learner)) is not None:
                header = Anchor(
                    round=decision.round, version=decision.version, steps=decision.steps, over=decision.over
                )
                assert self._centre.anchor is not None
                guest.send(header, self._centre.anchor)
        if self._centre.standing.over and not was_over:
            self._say(f"the run is over after {self._centre.standing.version} merges")
        late = time.monotonic() >= self._saved_sec + self._save_sec
        if self._centre.standing.version != before and late and not self._saver.busy:
            self._save(wait=False)

    def _save(self, *, wait: bool) -> None:
        self._tape.flush()
        saved = self._centre.saved()
        assert self._layout is not None
        saved = Saved({**saved.fields, "layout": self._layout[1]}, saved.anchor, saved.slow)
        self._saved_sec = time.monotonic()
        self._saver.start(saved, self._tape.count)
        if wait:
            self._saver.wait()
        self._note_saved()

    def _note_saved(self) -> None:
        for position in self._saver.written():
            self._tape.write({"kind": "saved", "position": position})
            self._tape.flush()

    def _close(self) -> None:
        """Ends all connections, and saves what has been merged."""
        self._door.close()
        self._guests.close()
        if self._centre.anchor is not None:
            self._saver.wait()
            self._note_saved()
            self._save(wait=True)
        self._tape.close()
