"""Job files for clusters: what all have in common, and Slurm's, read by bash and by JAX's detection of clusters."""

import os
import re
import subprocess
import sys

import pytest
from jax._src.clusters.slurm_cluster import SlurmCluster
from job_files import (
    CLUSTER_VARIABLES,
    NEEDED,
    PYTHON,
    ROOT,
    SIZE,
    TRAIN,
    detected,
    job_file,
    no_cluster,
    printed,
    words,
)

from jaxdl.core.config import ConfigError
from jaxdl.core.startup import VALUED, split_options
from jaxdl.platform.launch.jobs import COMMANDS
from jaxdl.training.command import Command

__all__ = ["no_cluster"]

# ---- What all have in common


@pytest.mark.parametrize("cluster", COMMANDS)
def test_the_file_says_what_the_mesh_will_be(cluster):
    text, said = printed(cluster)
    assert "# The mesh: replica 4 x fsdp 8 x tensor 1, on 4 nodes with 8 GPUs each." in text
    assert said == ""


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        ([], [], "nothing to run: end with the command"),
        ([], TRAIN[:3], "no --config"),
        ([], [*TRAIN[:4], "no/such.py"], "no/such.py: no such file"),
        ([], [*TRAIN, "--mesh.fsdp", "4"], "4 nodes with 8 GPUs each: mesh replica 4 x fsdp 4 x tensor 1 = 16 devices"),
        ([], [*TRAIN, "--batchsize", "4"], "--batchsize"),
        ([], [*TRAIN, "--optimizer", "none"], "there is no such kind"),
        ([], [*TRAIN, "--devices", "8"], "8 virtual CPU devices and --gpus-per-node 8: the GPUs would be idle"),
        ([], [*TRAIN, "--devices", "many"], "--devices many: give a whole number"),
        ([], [*TRAIN, "--max-steps", "0"], "--max-steps 0: give a whole number"),
        ([], [*TRAIN, "--workdir="], "--workdir '': empty"),
        ([], ["jaxdl", "train", *TRAIN[3:], "--batchsize", "4"], "--batchsize"),
        ([], [*TRAIN[:2], "jaxdl", "train", *TRAIN[3:], "--batchsize", "4"], "--batchsize"),
        ([], [*TRAIN, "--seed", "1\n2"], "a character that cannot be written"),
        (["--restarts", "2"], [*TRAIN[:5], "--mesh.replica", "4"], "--restarts 2 without a --workdir"),
        (["--name", "My Job"], TRAIN, "--name My Job: 'My Job' does not have the form of a job's name"),
        (["--restarts", "-1"], TRAIN, "restarts"),
        (["--interface", "eth0; rm"], TRAIN, "'eth0; rm' does not have the form of network interfaces"),
    ],
)
@pytest.mark.parametrize("cluster", COMMANDS)
def test_mistakes(cluster, options, command, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as error:
        COMMANDS[cluster]([*SIZE, *NEEDED[cluster], *options, "--", *command])
    if isinstance(error.value, SystemExit):
        assert error.value.code == 2
    assert message in words(str(error.value) + capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--nodes", "0", "--gpus-per-node", "8"], "nodes"), (["--nodes", "4"], "--gpus-per-node"), ([], "--nodes")],
)
def test_sizes_are_needed(options, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as error:
        COMMANDS["slurm"]([*options, "--", *TRAIN])
    assert message in str(error.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "warning"),
    [
        ([], "a replica of 32 devices is larger than a node with 8, gradients are not exchanged"),
        (["--mesh.replica", "2"], "a replica of 16 devices is larger than a node with 8, so more than the exchange"),
        (["--mesh.replica", "8"], None),
        (["--mesh.replica", "4", "--mesh.tensor", "2"], None),
    ],
)
def test_a_mesh_that_crosses_nodes_with_more_than_the_exchange_is_warned_of(mesh, warning):
    text, said = printed("slurm", command=[*TRAIN[:7], *mesh])
    assert (warning is None) == (said == "")
    if warning is not None:
        assert f"warning: {warning}" in said
        assert f"# {warning}" in text


def test_a_run_that_keeps_nothing_is_warned_of():
    _, said = printed("slurm", command=[*TRAIN[:5], "--mesh.replica", "4"])
    assert said.startswith("warning: the command has no --workdir")


def test_another_command_is_taken_as_it_is():
    text, said = printed("slurm", command=["./mine.sh", "a b"])
    assert "./mine.sh 'a b'" in text
    assert "not jaxdl.train" in said


def test_the_config_is_read_as_the_nodes_will_read_it():
    """Of the two meshes of configs/digits.py, whatever this machine has; the command line changes the chosen one."""
    text = job_file("slurm", size=["--nodes", "2", "--gpus-per-node", "4"], command=TRAIN[:5])
    assert "# The mesh: replica 1 x fsdp 8 x tensor 1, on 2 nodes with 4 GPUs each." in text
    text = job_file("slurm", size=["--nodes", "2", "--gpus-per-node", "0"], command=TRAIN[:7])
    assert "# The mesh: replica 2 x fsdp 8 x tensor 1, on 2 nodes with 8 CPU devices each." in text
    assert "export JAX_PLATFORMS=cpu" in text
    assert "gpus-per-node" not in text


def test_the_options_of_a_run_are_known():
    """The others belong to the experiment; a new one with one value must be added to `VALUED`."""
    own = {name.replace("_", "-") for name in Command.__dataclass_fields__}
    assert own - {"experiment", "explain", "print-config", "init-names", "may-change"} == set(VALUED)
    found, left = split_options(["--config", "c", "--workdir=w", "--devices", "2", "--mesh.fsdp", "2"])
    assert found == {"config": "c", "workdir": "w", "devices": "2"}
    assert left == ["--mesh.fsdp", "2"]


def settings_in(text):
    return set(re.findall(r"\b(NCCL_[A-Z_]+)\b", text)), set(re.findall(r"--(xla_\w+)=?([\w.]*)", text))


def test_every_setting_is_explained_and_every_xla_flag_exists():
    """Flags that XLA does not know end the process at its start."""
    page = (ROOT / "docs" / "howto" / "clusters.md").read_text()
    explained, flags = settings_in(page)
    for cluster in COMMANDS:
        named, in_file = settings_in(job_file(cluster))
        assert named
        assert named <= explained
        assert {name for name, _ in in_file} <= {name for name, _ in flags}
        flags |= in_file
    assert len(flags) > 3
    written = " ".join(f"--{name}={value or 'true'}" for name, value in sorted(flags))
    environment = {**os.environ, "XLA_FLAGS": written, "JAX_PLATFORMS": "cpu"}
    code = "import jax; print(len(jax.devices()))"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("cluster", COMMANDS)
def test_the_token_is_in_no_file(cluster, monkeypatch):
    """It is made, or found, where the job runs; two files are alike."""
    monkeypatch.setenv("JAXDL_RUN_TOKEN", "of-this-environment")
    text = job_file(cluster)
    assert "JAXDL_RUN_TOKEN" in text
    assert "of-this-environment" not in text
    assert text == job_file(cluster)


# ---- Slurm

SRUN = """#!/bin/bash
# Stands for srun: runs the command once for each node, as Slurm would, and ends with the highest exit code.
echo "$@" >> "$RECORD/srun"
while [[ $1 == --* ]]; do shift; done
echo start >> "$RECORD/starts"
start=$(wc -l < "$RECORD/starts")
highest=0
for index in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_PROCID=$index SLURM_LOCALID=0 \
    SLURMD_NODENAME="gpu$((7 + index))" START=$start INDEX=$index "$@"
    code=$?
    ((code > highest)) && highest=$code
done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show hostnames" ]]; then
    [[ $3 == "gpu[7-10]" ]] && printf 'gpu%s\\n' 7 8 9 10
elif [[ "$1 $2" == "show node" ]]; then
    [[ $ADDRESS ]] && echo "   NodeAddr=$ADDRESS NodeHostName=$3"
elif [[ "$1 $2" == "show job" ]]; then
    echo "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=${PREEMPTED:-None}"
else
    echo "$@" >> "$RECORD/scontrol"
fi
"""


def run_slurm(text, folder, codes="0", signal="", **environment):
    """Runs the script with stubs in place of Slurm; returns (exit code, stderr, environments of the last start)."""
    for name, program in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        stub = folder / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(program)
        stub.chmod(0o755)
    if signal:  # While the processes run, as Slurm does before the time limit; they end at SIGTERM.
        waits = f'kill -{signal} "$PARENT"; for _ in $(seq 200); do [[ -e $RECORD/term ]] && break; sleep 0.05; done\n'
        (folder / "bin" / "python").write_text(PYTHON.replace("codes=", f"[[ $INDEX == 0 ]] && {{ {waits}}}\ncodes="))
    for name, program in {"squeue": "echo 5000.0", "scancel": 'echo "$@" >> "$RECORD/term"'}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{program}\n")
        (folder / "bin" / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_text(f"export PARENT=$$\n{text}")
    slurm = {"SLURM_JOB_ID": "5000", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[7-10]"}
    clean = {name: value for name, value in os.environ.items() if not CLUSTER_VARIABLES.match(name)}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    given = {**clean, **slurm, "PATH": path, "RECORD": str(folder), "CODES": codes, **environment}
    ended = subprocess.run(["bash", script], env=given, capture_output=True, text=True, timeout=60)
    starts = len((folder / "starts").read_text().splitlines())
    read = [(folder / f"env.{starts}.{index}").read_text().rstrip("\0").split("\0") for index in range(4)]
    return ended.returncode, ended.stderr, [dict(line.split("=", 1) for line in lines) for lines in read]


def test_the_slurm_script_is_bash():
    text = job_file("slurm", "--setup", "module load cuda", "--venv", "~/my venv", "--image", "r/x:1", "--requeue")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert 'source "$HOME"/' in text


def test_the_slurm_header():
    text = job_file("slurm", "--partition", "gpu", "--account", "lab", "--time", "1-00:00:00", "--save-sec", "90")
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    header = dict(re.match(r"#SBATCH --([\w-]+)=?(.*)", line).groups() for line in lines if line.startswith("#SBATCH"))
    assert header == {
        "job-name": "jaxdl", "nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "1-00:00:00",
        "signal": "B:USR1@90", "output": "jaxdl-%j.out", "open-mode": "append", "partition": "gpu", "account": "lab",
        "requeue": "", "exclusive": "", "mem": "0",
    }  # fmt: skip
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), "Slurm would not read them"
    with_cpus = job_file("slurm", "--cpus-per-node", "32")
    assert "#SBATCH --cpus-per-task=32" in with_cpus
    assert "--exclusive" not in with_cpus
    assert "--cpus-per-task=32" in with_cpus.split("srun ", 1)[1]


def test_slurm_may_start_on_fewer_nodes(tmp_path, no_cluster):
    """The processes are as many as Slurm gives nodes; the mesh is checked for each number."""
    elastic = [*TRAIN[:-1], "-1", "--mesh.fsdp", "8"]
    text = job_file("slurm", "--fewest-nodes", "2", command=elastic)
    assert "#SBATCH --nodes=2-4\n" in text
    assert [nodes for nodes in (1, 2, 3, 4) if f"on {nodes} nodes with 8 GPUs" in text] == [2, 3, 4]
    _, _, environments = run_slurm(text, tmp_path)
    assert {environment["JAX_NUM_PROCESSES"] for environment in environments} == {"4"}  # As the stub says.
    with pytest.raises(ConfigError, match="3 nodes with 8 GPUs each"):
        job_file("slurm", "--fewest-nodes", "2", command=[*TRAIN[:-1], "4", "--mesh.fsdp", "8"])
    with pytest.raises(ConfigError, match="it is more than nodes = 4"):
        job_file("slurm", "--fewest-nodes", "5")


def test_slurm_gives_each_process_its_place(tmp_path, no_cluster):
    code, _, environments = run_slurm(job_file("slurm"), tmp_path)
    assert code == 0
    assert (tmp_path / "args").read_text().splitlines() == TRAIN[1:], "also the space in the workdir"
    assert "--ntasks-per-node=1" in (tmp_path / "srun").read_text()
    tokens = {environment["JAXDL_RUN_TOKEN"] for environment in environments}
    assert len(tokens) == 1, "the same for all tasks"
    assert re.fullmatch("[0-9a-f]{32}", tokens.pop())
    for index, environment in enumerate(environments):
        for name, value in environment.items():
            if CLUSTER_VARIABLES.match(name):
                no_cluster.setenv(name, value)
        assert detected() == ("gpu7:62344", 4, index, list(range(8)))
        assert environment["JAXDL_HOST"] == f"gpu{7 + index}"
        assert (environment["JAXDL_RESTART"], environment["JAXDL_RESTART_REASON"]) == ("0", "")
        # JAX's own reading of Slurm agrees, but for the devices: it would take one GPU of each node.
        for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
            no_cluster.delenv(name)
        assert SlurmCluster.is_env_present()
        assert detected() == ("gpu7:62344", 4, index, list(range(8)))
        no_cluster.delenv("JAX_LOCAL_DEVICE_IDS")
        assert detected() == ("gpu7:62344", 4, index, [0])


@pytest.mark.parametrize(
    ("codes", "starts", "end"),
    [("75 137 0", 3, 0), ("75 1 75 0", 3, 75), ("2", 1, 2), ("75 3", 2, 3), ("143", 1, 143), ("130", 1, 130)],
)
def test_slurm_restarts(tmp_path, codes, starts, end):
    code, said, environments = run_slurm(job_file("slurm", "--restarts", "2"), tmp_path, codes)
    assert code == end
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert environments[0]["JAXDL_RESTART"] == str(starts - 1)
    if starts > 1:
        assert environments[3]["JAXDL_RESTART_REASON"] == f"srun ended with {codes.split()[starts - 2]}"
        assert f"restart {starts - 1} of 2" in said
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize(
    ("signal", "codes", "requeued"),
    [("USR1", "143", True), ("USR2", "143", False), ("", "143", False), ("USR1", "75", True), ("USR1", "0", False)],
)
def test_slurm_queues_the_job_again_when_its_time_is_up(tmp_path, no_cluster, signal, codes, requeued):
    """SIGTERM without Slurm's signal to the script is from somebody who wants it to stop."""
    text = job_file("slurm", "--requeue", "--restarts", "2")
    code, _, environments = run_slurm(text, tmp_path, codes, signal, SLURM_RESTART_COUNT="2")
    assert code == int(codes)
    assert len((tmp_path / "starts").read_text().splitlines()) == 1
    assert (tmp_path / "scontrol").exists() == requeued
    assert (tmp_path / "term").exists() == bool(signal)
    if signal:
        assert (tmp_path / "term").read_text() == "--signal=TERM 5000\n"
    assert environments[0]["JAXDL_RESTART"] == "2"
    assert environments[0]["JAXDL_RESTART_REASON"] == "requeued by Slurm"


def test_slurm_queues_a_job_again_whose_nodes_it_takes(tmp_path, no_cluster):
    """It ends in the time that Slurm gives it to save, and would count as failed."""
    given = {"PREEMPTED": "2026-01-01T01:00:00", "ADDRESS": "10.0.0.7"}
    code, _, environments = run_slurm(job_file("slurm"), tmp_path, "143", **given)
    assert code == 143
    assert (tmp_path / "scontrol").read_text() == "requeue 5000\n"
    assert environments[0]["JAX_COORDINATOR_ADDRESS"] == "10.0.0.7:62344"


# ---- Learners that do not wait for each other

LEARNER = [
    *TRAIN[:5],
    "--agreement",
    "async",
    "--mesh.replica",
    "1",
    "--seed",
    "{learner}",
    "--workdir",
    "/shared/{learner}",
]
WITH_SYNCER = ["python", "-m", "jaxdl.launch", "learner", "--quorum", "3", "--folder", "/shared/syncer", "--"]


@pytest.mark.parametrize("cluster", COMMANDS)
def test_each_node_is_a_learner(cluster):
    text, said = printed(cluster, "--restarts", "2", command=[*WITH_SYNCER, *LEARNER])
    assert "# 4 learners, one on each node; the first node has the syncer too. Each of them:" in text
    assert "# The mesh: replica 1 x fsdp 8 x tensor 1, on 1 nodes with 8 GPUs each." in text
    assert said == ""
    one_run = job_file(cluster, "--restarts", "2")
    own = {"slurm": "--wait=0 ", "kubernetes": "backoffLimitPerIndex: 2 ", "ray": "ALONE = True", "skypilot": "learner"}
    assert own[cluster] in text, "who fails, or has finished, ends no other"
    assert own[cluster] not in one_run


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (LEARNER, "{learner} in the command is for learners. Put `python -m jaxdl.launch learner"),
        (LEARNER[:9], "on 4 nodes the command would be one run of 4 processes. Put `python -m jaxdl.launch learner"),
        ([*WITH_SYNCER, *TRAIN], "its command is no learner. Give it --agreement async"),
        ([*WITH_SYNCER, *LEARNER[:9]], "all 4 learners would have the same command. Give each a seed and a workdir"),
        ([*WITH_SYNCER[:4], "--quorum", "5", "--", *LEARNER], "quorum 5: there are only 4 learners"),
        ([*WITH_SYNCER, *LEARNER, "--mesh.fsdp", "16"], "1 nodes with 8 GPUs each: mesh replica 1 x fsdp 16"),
    ],
)
def test_mistakes_with_learners(command, message, capsys):
    with pytest.raises((SystemExit, ConfigError)) as raised:
        job_file("slurm", command=command)
    assert message in words(f"{capsys.readouterr().err} {raised.value}")


SEEN = (
    "JAXDL_SYNCER", "JAXDL_LEARNER", "JAXDL_NUM_LEARNERS", "JAXDL_RUN_TOKEN", "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
)  # fmt: skip


def test_a_node_of_a_job_finds_the_syncer_of_the_first_one(tmp_path):
    """And is no process of a larger run. It fails once, and is started again by itself."""
    program = f"""if 1:
        import os, pathlib, sys
        print(sys.argv[1:], *(os.environ.get(name) for name in {SEEN!r}), sep="|")
        mark = pathlib.Path({str(tmp_path / "mark")!r})
        if not mark.exists():
            mark.touch()
            sys.exit(1)
    """
    variables = {"JAX_COORDINATOR_ADDRESS": "gpu7:6234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    variables |= {"JAXDL_RUN_TOKEN": "0123456789abcdef", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu[7-8]"}
    clean = {name: value for name, value in os.environ.items() if not CLUSTER_VARIABLES.match(name)}
    command = [sys.executable, "-m", "jaxdl.launch", "learner", "--restarts", "1", "--"]
    command += [sys.executable, "-c", program, "{learner}"]
    ended = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split("| ", 1)[1].split("|") for line in ended.stdout.splitlines()]
    assert lines == [["['1']", "gpu7:6234", "1", "2", "0123456789abcdef", "None", "None"]] * 2
    assert "restart 1 of 1: learner1 ended with exit code 1" in ended.stderr
    without = {name: value for name, value in (clean | variables).items() if name != "JAXDL_RUN_TOKEN"}
    ended = subprocess.run(command, env=without, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "JAXDL_RUN_TOKEN is not set" in ended.stderr
