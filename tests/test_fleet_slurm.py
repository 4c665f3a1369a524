"""A fleet on Slurm, with stand-ins for Slurm's programs: what is asked of Slurm, and what is made of its answers."""

import itertools
import json
import os
import shlex
import subprocess
import time

import pytest
from fake_slurm import FakeSlurm
from fleet_engine import states

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.lease import IN_USE
from jaxdl.platform.fleet import slurm_engine
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.engines import make_engine
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.platform.fleet.slurm_calls import _num_gpus
from jaxdl.platform.fleet.store import Store
from jaxdl.platform.launch.jobs import slurm

NODES = [f"n{number}|idle|8|16000|main*|(null)" for number in range(1, 5)]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = FakeSlurm(tmp_path / "slurm", NODES)
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_engine, "_LOOK_SEC", 0.0)
    return made


@pytest.fixture
def fleet(tmp_path, cluster):
    """The store of a fleet, and a function that makes a server for it."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    store, clock = Store(folder), itertools.count(1000.0, 100.0)

    def make(between_sec=0.0, num_nodes=4, **options):
        settings = Settings(Rules(1.0, 1.0), between_sec=between_sec, failures=2, grace_sec=3000.0)
        return Server(store, make_engine("slurm", store, num_nodes, **options), settings, now=lambda: next(clock))

    return store, make


def turns(server, count=2):
    for _ in range(count):
        server.turn()


def end(cluster, store, number, name, attempt, code, *, state="FAILED", why=""):
    """The job of an attempt ends with a code."""
    folder = store.path_of(name) / "attempts" / str(attempt)
    if code is not None:
        (folder / "exit.json").write_text(json.dumps({"code": code, "at": 1, "why": why}))
    cluster.set(number, state=state)


def submit(store, sizes=(1, 2, 4)):
    return store.submit(["python", "-m", "train", "--mesh.replica", "{nodes}"], sizes).name


def test_a_run_is_a_job_that_waits_and_then_has_its_nodes(cluster, fleet, capsys):
    store, make = fleet
    server, name = make(partition="main", account="lab", time="1:00:00", sbatch="--constraint='a b'"), submit(store)
    turns(server)
    assert states(server) == {name: "running"}
    (job,) = cluster.jobs()
    asked = job["options"]
    assert {"--partition=main", "--account=lab", "--time=1:00:00", "--constraint=a b"} < set(asked)
    assert {"--nodes=4-4", "--signal=B:USR1@3000", "--dependency=singleton", "--no-requeue", "--exclusive"} < set(asked)
    assert not any(word.startswith("--gpus") for word in asked)
    (run,) = store.view()["runs"]
    assert (run["state"], run["nodes"]) == ("queued", [])
    assert run["reason"].endswith("waits in Slurm's queue for 4 nodes (job 1, Priority)")
    main(["explain", "--state", str(store.folder)])
    assert "(job 1, Priority)" in capsys.readouterr().out
    cluster.set(1, state="RUNNING", nodes="n[1-4]")
    turns(server)
    (run,) = store.view()["runs"]
    assert (run["state"], run["nodes"]) == ("running", ["n1", "n2", "n3", "n4"])
    assert set(store.view()["nodes"].values()) == {name}
    end(cluster, store, 1, name, 1, 0, state="COMPLETED")
    turns(server)
    assert states(server) == {name: "completed"}
    assert len(cluster.jobs()) == 1


def test_a_job_that_waits_gets_another_size_and_one_that_runs_is_stopped_for_it(cluster, fleet):
    store, make = fleet
    server, first = make(), submit(store)
    turns(server)
    second = submit(store)
    turns(server)
    assert [(job["num"], job["state"]) for job in cluster.jobs()] == [(2, "PENDING"), (2, "PENDING")]
    assert "update JobId=1 NumNodes=2-2 NumCPUs=2 NumTasks=2" in cluster.calls("scontrol")
    assert not cluster.calls("scancel")
    cluster.set(1, state="RUNNING", nodes="n[1-2]")
    cluster.set(2, state="RUNNING", nodes="n[3-4]")
    turns(server)
    assert server.members[first].resized == 1
    end(cluster, store, 2, second, 1, 0, state="COMPLETED")
    turns(server, 3)
    told = cluster.calls("scancel")
    assert told[0] == "--state=RUNNING --batch --signal=USR2 1"
    assert set(told[1:]) <= {"1"}, "it is told once, and cancelled when its grace is over"
    end(cluster, store, 1, first, 1, 143)
    turns(server)
    assert [job["num"] for job in cluster.jobs()] == [2, 2, 4]
    assert server.members[first].failures == 0


def test_slurm_may_choose_other_nodes_than_were_counted(cluster, fleet):
    store, make = fleet
    server, names = make(), [submit(store, (2,)), submit(store, (1,))]
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n[3-4]")
    cluster.set(2, state="RUNNING", nodes="n2")
    turns(server)
    assert [server.members[name].nodes for name in names] == [("n3", "n4"), ("n2",)]
    cluster.set(1, state="COMPLETING", nodes="n3")  # All that is left of it, while Slurm clears up.
    turns(server)
    assert server.members[names[0]].nodes == ("n3", "n4")
    cluster.set(1, nodes="n[3-4]")
    # A node of the first run goes down: it ends there; the other one stays.
    cluster.set_nodes([line.replace("idle", "down*") if line.startswith("n4") else line for line in NODES])
    end(cluster, store, 1, names[0], 1, None, state="NODE_FAIL")
    turns(server)
    assert server.members[names[0]].failures == 0
    assert [job["num"] for job in cluster.jobs()] == [2, 1, 2]
    assert server.members[names[1]].attempt == 1
    reasons = [event["reason"] for event in Journal(store.folder).events() if event["what"] == "left"]
    assert len(reasons) == 1
    assert reasons[0] == "Slurm: a node failed (n[3-4]): starts again"


def test_a_run_leaves_a_node_that_is_drained(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (2,))
    cluster.submit_elsewhere()
    turns(server)
    cluster.set(2, state="RUNNING", nodes="n[1-2]")
    turns(server)
    cluster.set_nodes([line.replace("idle", "draining") if line.startswith("n2") else line for line in NODES])
    turns(server)
    assert states(server) == {name: "stopping"}
    assert server.members[name].reason == "n2 is out of service"
    assert cluster.calls("scancel") == ["--state=RUNNING --batch --signal=USR2 2"]


def test_a_killed_server_submits_nothing_twice(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (2,))
    turns(server)
    again = make()
    turns(again, 3)
    assert len(cluster.jobs()) == 1
    assert again.engine.start(again.members[name].submission, 2, ["n1"]) is False
    assert cluster.jobs()[0]["state"] == "CANCELLED", "a job of an attempt that counts as over does not begin later"
    cluster.set(1, state="PENDING", reason="BeginTime")  # An administrator has queued it again: it is the same job.
    turns(again)
    assert len(cluster.jobs()) == 1


def test_what_waits_is_cancelled_by_hold_and_runs_again(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (2,))
    turns(server)
    store.ask(name, "hold")
    turns(server, 3)
    assert states(server) == {name: "held"}
    assert cluster.calls("scancel")[0] == "--state=PENDING 1"
    assert server.members[name].failures == 0
    store.ask(name, "run")
    turns(server, 3)
    assert [job["state"] for job in cluster.jobs()] == ["CANCELLED", "PENDING"]


@pytest.mark.parametrize(
    ("state", "why", "code", "begun", "failures", "said"),
    [
        ("FAILED", "limit", 143, True, 0, "its time limit was reached"),
        ("FAILED", "limit", 143, False, 2, "its time limit was reached"),
        ("FAILED", "preempted", 143, True, 0, "its nodes were taken for another job"),
        ("FAILED", "preempted", 143, False, 1, "its nodes were taken for another job"),
        ("PREEMPTED", "", None, True, 1, "its nodes were taken for another job"),
        ("NODE_FAIL", "", 143, True, 0, "a node failed (n1)"),
        ("TIMEOUT", "", None, True, 2, "killed at its time limit, before it had saved"),
        ("OUT_OF_MEMORY", "", 137, True, 2, "killed for its use of memory"),
        ("CANCELLED", "", None, True, 2, "cancelled by scancel"),
        ("CANCELLED", "", 143, True, 2, "cancelled by scancel"),
        ("FAILED", "", 75, True, 2, "exit code 75"),
    ],
)
def test_how_a_job_ends_says_whether_its_run_has_failed(cluster, fleet, state, why, code, begun, failures, said):
    store, make = fleet
    server, name = make(), submit(store, (1,))
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n1")
    turns(server)
    member = server.members[name]
    member.begun, member.failures, member.changed = 1.0 if begun else 0.0, 1, 1e12
    if member.submission.workdir is None and not begun:
        server._look = lambda _: None  # Such a run counts as begun at once.
    end(cluster, store, 1, name, 1, code, state=state, why=why)
    turns(server, 1)
    event = next(event for event in Journal(store.folder).events() if event["what"] == "left")
    assert said in event["reason"]
    assert event["failures"] == failures


def test_a_run_that_still_lives_on_a_lost_node_keeps_its_workdir_and_the_next_attempt_waits(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (1,))
    turns(server)
    end(cluster, store, 1, name, 1, None, state="NODE_FAIL")
    turns(server)
    output = store.path_of(name) / "attempts" / "2" / "output.txt"
    output.write_text(f"0: error: --workdir x{IN_USE}a process of n1\n")
    end(cluster, store, 2, name, 2, 2)
    turns(server)
    assert states(server) == {name: "running"}
    assert [event["code"] for event in Journal(store.folder).events() if event["what"] == "left"][-1] == 75
    end(cluster, store, 3, name, 3, 2)
    turns(server)
    assert states(server) == {name: "failed"}, "any other mistake"


def test_the_accounts_say_what_the_queue_has_forgotten(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (1,))
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n1")
    turns(server)
    (store.path_of(name) / "attempts" / "1" / "job").write_text("1\n")
    cluster.set(1, state="OUT_OF_MEMORY", accounts="OUT_OF_MEMORY", forgotten=True)
    turns(server)
    assert "killed for its use of memory" in [e["reason"] for e in Journal(store.folder).events()][-2]


def test_nothing_is_decided_while_slurm_does_not_answer(cluster, fleet):
    store, make = fleet
    server, name = make(), submit(store, (2,))
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n[1-2]")
    turns(server)
    cluster.fail("all", "Unable to contact slurm controller")
    submit(store, (1,))
    turns(server, 5)
    assert states(server) == {name: "running"}
    [problem] = server.engine.problems()
    assert "Unable to contact slurm controller" in problem
    cluster.heal()
    turns(server)
    assert server.engine.problems() == []
    assert len(cluster.jobs()) == 2
    cluster.fail("all", "Unable to contact slurm controller")
    with pytest.raises(ConfigError, match="Unable to contact slurm controller"):
        make()


def test_what_slurm_refuses_is_in_the_output_and_fails(cluster, fleet):
    store, make = fleet
    server, name = make(between_sec=1e9), submit(store, (1,))
    cluster.fail("sbatch", "Batch job submission failed: Invalid account")
    turns(server, 12)
    assert states(server) == {name: "failed"}
    assert "Invalid account" in server.members[name].reason
    assert "Invalid account" in (store.path_of(name) / "attempts" / "1" / "output.txt").read_text()


def test_a_run_with_needs_is_refused(cluster, fleet):
    store, make = fleet
    name = store.submit(["true"], [1], needs={"cpus": 2.0}).name
    server = make()
    turns(server, 3)
    assert states(server) == {name: "failed"}
    assert not cluster.jobs()


def test_nodes_are_those_of_the_partition_that_are_up(cluster, fleet):
    store, make = fleet
    cluster.set_nodes([
        "n1|allocated|8|16000|main*|gpu:a100:4(S:0-1)", "n2|drained|8|16000|main*|gpu:4",
        "n3|mixed*|8|9|main*|gpu:a100:4",
        "n4|draining|8|1|main*|gpu:4", "n5|idle~|8|16000|main*|gpu:4,nic:2", "x1|idle|8|1|other|(null)",
    ])  # fmt: skip
    engine = make().engine
    assert engine.nodes() == ["n1", "n3", "n5"]
    assert engine.resources()["n1"] == {"cpus": 8.0, "gpus": 4.0, "memory-gb": pytest.approx(16.777216)}
    store.set_lost_nodes(["n3"])
    name = submit(store, (2,))
    turns(make())
    (job,) = cluster.jobs()
    assert {"--gpus-per-node=4", "--exclude=n3"} < set(job["options"])
    script = (store.path_of(name) / "attempts" / "1" / "job.sh").read_text()
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3\n" in script
    assert "JAX_PLATFORMS" not in script
    assert _num_gpus("gpu:a100:2(S:0),gpu:h100:1") == 3
    cluster.set_nodes([])
    with pytest.raises(ConfigError, match="partition none: Slurm knows no node"):
        make(partition="none")


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
echo $BASHPID > "$RECORD/task"
SLURM_PROCID=0 SLURMD_NODENAME=n1 exec "$@"
"""
STUBS = {
    "srun": SRUN,
    "scontrol": '#!/bin/bash\n[[ $2 == hostnames ]] && printf "n1\\nn2\\n"\n'
    '[[ $2 == node ]] && echo " NodeAddr=10.0.0.1 X=2"\n[[ $2 == job ]] && echo "PreemptTime=$PREEMPT"\n',
    "squeue": "#!/bin/bash\necho 7.0\n",
    "scancel": '#!/bin/bash\necho "$@" >> "$RECORD/scancel"\nkill -TERM "$(cat "$RECORD/task")"\n',
}


def begin_script(folder, script, **environment):
    """Starts the script of a job, with stubs of Slurm's programs."""
    for name, program in STUBS.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(program)
        (folder / "bin" / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "PREEMPT": "None"}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", script], env={**os.environ, **given, "PATH": path, "RECORD": str(folder), **environment}
    )


def script_of(cluster, fleet, command):
    """The script of a run's first attempt, and its folder."""
    store, make = fleet
    name = store.submit(command, (2,)).name
    turns(make(), 1)
    folder = store.path_of(name) / "attempts" / "1"
    checked = subprocess.run(["bash", "-n", folder / "job.sh"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    return folder / "job.sh", folder


def test_the_script_fills_in_the_nodes_that_it_has(tmp_path, cluster, fleet):
    program = 'echo "$@" "$JAX_PROCESS_ID/$JAX_NUM_PROCESSES" "$JAXDL_HOST" "$JAX_COORDINATOR_ADDRESS" > $0; exit 3'
    script, folder = script_of(cluster, fleet, ["bash", "-c", program, str(tmp_path / "said"), "n={nodes}", "a 'b' $c"])
    assert begin_script(tmp_path, script).wait(timeout=30) == 3
    assert (tmp_path / "said").read_text() == "n=2 a 'b' $c 0/2 n1 10.0.0.1:61447\n"
    assert json.loads((folder / "exit.json").read_text())["code"] == 3
    assert (folder / "job").read_text() == "7\n"


WAITS = ["bash", "-c", 'trap "sleep 0.2; exit 143" TERM; touch $0; while true; do sleep 0.05; done']


def wait_for(path):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("signal", "why", "preempt"), [("USR1", "limit", "None"), ("USR2", "asked", "None"),
                                                        ("", "preempted", "2026-11-29T14:00:00")])  # fmt: skip
def test_the_script_says_why_its_processes_were_stopped(tmp_path, cluster, fleet, signal, why, preempt):
    script, folder = script_of(cluster, fleet, [*WAITS, str(tmp_path / "begun")])
    job = begin_script(tmp_path, script, PREEMPT=preempt)
    wait_for(tmp_path / "begun")
    if signal:
        for _ in range(3):  # The processes would take a second SIGTERM for the wish to end at once.
            subprocess.run(["kill", f"-{signal}", str(job.pid)], check=True)
    else:
        subprocess.run(["kill", "-TERM", (tmp_path / "task").read_text().strip()], check=True)
    assert job.wait(timeout=30) == 143
    found = json.loads((folder / "exit.json").read_text())
    assert (found["code"], found["why"]) == (143, why)
    sent = (tmp_path / "scancel").read_text().splitlines() if signal else []
    assert sent == (["--signal=TERM 7"] if signal else [])


def test_a_script_that_was_asked_to_end_before_its_step_starts_nothing(tmp_path):
    program = shlex.quote(f'{slurm.SIGNALS}kill -USR2 $$; echo "ends: $ending"')
    said = subprocess.run(["bash", "-c", f"bash -c {program}"], capture_output=True, text=True, timeout=30)
    assert said.stdout == "ends: asked\n"


def test_options_of_slurm_are_for_slurm(tmp_path):
    with pytest.raises(ConfigError, match=r"partition gpu: the engine local has no such option\. It is for slurm"):
        make_engine("local", Store(tmp_path), 1, partition="gpu")


def test_without_slurm_it_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no program sinfo here"):
        make_engine("slurm", Store(tmp_path), 1)
