"""Stands for sinfo, squeue, sbatch, scancel, scontrol and sacct: jobs are in a file, and a test says what they become.

Run under one of these names, in a folder with `jobs.json` and `nodes`; what was called is in `calls`. `said` there
makes the command of its first word fail with the rest; "late" makes sbatch fail when it has submitted the job.
"""

import json
import re
import sys
from pathlib import Path

PROGRAMS = ("sinfo", "squeue", "sbatch", "scancel", "scontrol", "sacct")
HERE = Path(__file__).absolute().parent if __name__ == "__main__" else Path()


class FakeSlurm:
    """A folder for PATH, and the jobs there."""

    def __init__(self, folder, nodes):
        self.folder = folder
        folder.mkdir()
        for name in PROGRAMS:
            program = folder / name
            program.write_text(f"#!{sys.executable} -SE\n{Path(__file__).read_text()}")
            program.chmod(0o755)
        self.set_nodes(nodes)

    def set_nodes(self, nodes):
        """Lines as of sinfo -N: name|state|cpus|MiB|partition|generic resources."""
        (self.folder / "nodes").write_text("".join(f"{line}\n" for line in nodes))

    def jobs(self):
        return json.loads((self.folder / "jobs.json").read_text()) if (self.folder / "jobs.json").exists() else []

    def submit_elsewhere(self):
        """A job of the same user that is none of the fleet's, though its script lies in the fleet's folder."""
        job = {"state": "RUNNING", "reason": "None", "num": 1, "nodes": "n4", "script": f"{self.folder.parent}/fleet/x"}
        (self.folder / "jobs.json").write_text(json.dumps([job]))

    def set(self, number, **values):
        """Changes a job: its state, reason or nodes."""
        jobs = self.jobs()
        jobs[number - 1] |= values
        (self.folder / "jobs.json").write_text(json.dumps(jobs))

    def calls(self, program):
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [line.split(" ", 1)[1] for line in lines if line.split(" ", 1)[0] == program]

    def fail(self, program, text):
        (self.folder / "said").write_text(f"{program} {text}")

    def heal(self):
        (self.folder / "said").unlink()


def main(program, args):
    """What the program of this name does."""
    file = HERE / "jobs.json"
    jobs = json.loads(file.read_text()) if file.exists() else []
    with (HERE / "calls").open("a") as calls:
        calls.write(f"{program} {' '.join(args)}\n")
    said = (HERE / "said").read_text().split(" ", 1) if (HERE / "said").exists() else ["", ""]
    if said[0] in (program, "all"):
        sys.exit(f"{program}: error: {said[1]}")
    if program == "sinfo":
        print((HERE / "nodes").read_text(), end="")
    elif program == "squeue":
        for number, job in enumerate(jobs, 1):
            if not job.get("forgotten"):
                print(
                    "|".join([str(number), *(str(job[key]) for key in ("state", "reason", "num", "nodes", "script"))])
                )
    elif program == "sbatch":
        given = dict(word.removeprefix("--").split("=", 1) for word in args if "=" in word)
        made = {"state": "PENDING", "reason": "Priority", "num": int(given["nodes"].split("-")[0]), "nodes": ""}
        jobs.append({**made, "script": args[-1], "options": args[:-1]})
        if said[0] == "late":
            file.write_text(json.dumps(jobs))
            sys.exit(f"sbatch: error: {said[1]}")
        print(len(jobs))
    elif program == "scancel" and "--batch" not in args:
        job = jobs[int(args[-1]) - 1]
        if "--state=PENDING" not in args or job["state"] == "PENDING":
            job["state"] = "CANCELLED"
    elif program == "scontrol" and args[0] == "update":
        given = dict(word.split("=", 1) for word in args[1:])
        job = jobs[int(given["JobId"]) - 1]
        if job["state"] != "PENDING":
            sys.exit("slurm_update error: Job is no longer pending execution")
        job["num"] = int(given["NumNodes"].split("-")[0])
    elif program == "scontrol" and args[:2] == ["show", "hostnames"]:
        name, first, last = re.findall(r"(\w+)\[(\d+)-(\d+)\]", args[2])[0]
        print("\n".join(f"{name}{number}" for number in range(int(first), int(last) + 1)))
    elif program == "sacct":
        print(next((job.get("accounts", "") for number, job in enumerate(jobs, 1) if f"{number}" in args), ""))
    file.write_text(json.dumps(jobs))


if __name__ == "__main__":
    main(Path(__file__).name, sys.argv[1:])
