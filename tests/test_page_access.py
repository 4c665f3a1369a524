"""Who may see the page of runs and act on it, and what hostile names, files and requests cannot do."""

import asyncio
import json
import os
import stat
import threading
import time
from urllib.parse import quote

import httpx
import pytest
from mistakes import refusal
from page_runs import TOKEN, address, client, make_folder, make_run, rows

from jaxdl.core.files import HALT_FILE, RESULT_FILE, SEARCH_FILE
from jaxdl.parallel.lease import this_process
from jaxdl.platform.fleet.store import Store
from jaxdl.platform.page.app import make_app
from jaxdl.platform.page.scan import address_of_folder
from jaxdl.report.status import Reason, State, add_failure
from jaxdl.report.status.__main__ import main

HERE = {"origin": "http://localhost"}
EVIL = "<img src=x onerror=alert(1)>\"'<script>alert(2)</script>"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "runs")


def sign_in(page, token=TOKEN, **headers):
    return page.post("/sign-in", data={"token": token}, headers=HERE | headers)


def test_without_a_token_nothing_can_be_done(folder):
    halt = f"{address(folder / 'running')}/halt"
    for options in ({}, {"tokens": [TOKEN]}):
        page = client(folder, **options)
        assert page.post(halt, headers=HERE).status_code == 403
        assert page.get(halt).status_code == 405
        assert "Halt: save and end" not in page.get(address(folder / "running")).text
    assert not (folder / "running" / HALT_FILE).exists()


def test_with_the_token_a_run_is_halted(folder):
    page = client(folder, tokens=[TOKEN])
    halt = f"{address(folder / 'running')}/halt"
    assert sign_in(page, "another-token").status_code == 403
    assert page.post(halt, headers=HERE).status_code == 403
    answer = sign_in(page)
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    assert "Halt: save and end" in page.get(address(folder / "running")).text
    for origin in ({}, {"origin": "http://elsewhere"}, {"origin": "null"}):
        assert page.post(halt, headers=origin).status_code == 403, "another site's form has the cookie too"
    assert not (folder / "running" / HALT_FILE).exists()
    assert page.post(halt, headers=HERE).status_code == 303
    assert (folder / "running" / HALT_FILE).read_text() == "halted on the status page\n"
    assert page.post(f"{address(folder / 'good')}/halt", headers=HERE).status_code == 409, "it has ended"
    page.post("/sign-out", headers=HERE)
    assert page.post(halt, headers=HERE).status_code == 403


def test_who_sends_wrong_tokens_keeps_nobody_waiting(folder):
    app = make_app([str(folder)], tokens=[TOKEN], hosts=None, everyone_looks=False)

    def at(host):
        transport = httpx.ASGITransport(app, client=(host, 1))  # pyright: ignore[reportArgumentType]
        return httpx.AsyncClient(
            transport=transport, base_url="http://page:8070", headers={"origin": "http://page:8070"}
        )

    async def ask():
        here, evil = at("10.0.0.1"), at("10.0.0.2")
        assert (await here.post("/sign-in", data={"token": TOKEN})).status_code == 303
        await here.get("/")
        form = [evil.post("/sign-in", data={"token": f"wrong{number}"}) for number in range(25)]
        header = [evil.get("/", headers={"authorization": f"Bearer wrong{number}"}) for number in range(25)]
        wrong = [asyncio.ensure_future(request) for request in form + header]
        await asyncio.sleep(0)
        start = time.monotonic()
        unknown = await evil.get("/", headers={"authorization": f"Bearer {TOKEN}"})
        fine = [await here.get("/") for _ in range(5)]
        took = time.monotonic() - start
        return fine, took, unknown, [answer.status_code for answer in await asyncio.gather(*wrong)], start

    fine, took, unknown, codes, start = asyncio.run(ask())
    assert [answer.status_code for answer in fine] == [200] * 5
    assert codes.count(429) == 46
    assert set(codes) <= {429, 403, 401}
    assert time.monotonic() - start > 1.9, "four wrong ones, one after the other"
    assert unknown.status_code == 429, "a guess is not looked at, or the answer would tell that it is right"
    assert took < 1.5


def test_a_cookie_is_of_one_server(folder):
    one, other = (client(folder, tokens=[TOKEN], everyone_looks=False) for _ in range(2))
    names = set()
    for port in (8070, 8071):
        answer = one.post(
            f"http://localhost:{port}/sign-in", data={"token": TOKEN}, headers={"origin": f"http://localhost:{port}"}
        )
        assert answer.status_code == 303
        names.add(answer.headers["set-cookie"].partition("=")[0])
    assert names == {"jaxdl_status_8070", "jaxdl_status_8071"}
    cookies = dict(one.cookies)
    header = {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    assert one.get("http://localhost:8070/", headers=header).status_code == 200
    assert other.get("http://localhost:8070/", headers=header).status_code == 401, "it was started again"


def test_a_form_of_many_fields_is_refused(folder):
    page = client(folder, tokens=[TOKEN])
    answer = page.post("/sign-in", content="&".join(f"a{number}=1" for number in range(9)), headers=HERE)
    assert answer.status_code == 400


def test_programs_send_the_token_as_a_header(folder):
    page, halt = client(folder, tokens=[TOKEN]), f"{address(folder / 'running')}/halt"
    assert page.post(halt, headers={"authorization": "Bearer wrong-token"}).status_code == 403
    assert page.post(halt, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 303
    assert (folder / "running" / HALT_FILE).exists()


def test_other_machines_need_the_token_to_look(folder):
    page = client(folder, tokens=[TOKEN], everyone_looks=False, hosts=None)
    picture = f"{address(folder / 'good')}/picture/confusion.png"
    looks = ["/", address(folder / "good"), picture, "/api/runs", f"/api{address(folder / 'good')}/log"]
    assert [page.get(path).status_code for path in looks] == [401] * len(looks)
    assert page.get("/static/page.css").status_code == page.get("/health").status_code == 200
    answer = page.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/"), "the token leaves the address"
    assert [page.get(path).status_code for path in looks] == [200] * len(looks)


def test_it_is_asked_by_the_name_of_this_machine_alone(folder):
    page = client(folder)
    assert page.get("/", headers={"host": "localhost:8070"}).status_code == 200
    refused = page.get("/", headers={"host": "evil.example"})
    assert (refused.status_code, list(refused.json())) == (403, ["error"])
    assert "name of this machine" in refused.json()["error"], "in the form of the page's other errors"


def test_every_answer_has_the_security_headers(folder):
    page = client(folder, tokens=[TOKEN])
    for path in ("/", "/nothing", "/static/page.js", "/api/runs", "/api/run/x", "/sign-in", "/compare"):
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "script-src 'self';" in policy, path
        assert "unsafe" not in policy, path
        assert "frame-ancestors 'none'" in policy, path
        assert headers["x-content-type-options"] == "nosniff", path


def test_hostile_texts_are_escaped_on_every_page(tmp_path):
    hostile = tmp_path / "runs" / EVIL.replace("/", "_")
    lines = [*rows(50), {"step": 60, "epoch": 1.0, f"eval/{EVIL}": 1.0}, {"step": 60, "event": EVIL, "kind": EVIL}]
    config = {EVIL: EVIL, "optimizer": {"kind": EVIL}}
    make_run(hostile, State.FAILED, lines=lines, config=config, reason=Reason(EVIL, 1, ""), hosts=(EVIL,), process=None)
    add_failure(hostile, 1, "error-0.txt", EVIL)
    for name in ("summary.json", "failures/1/failure.json", "init.json"):
        (hostile / name).write_text(json.dumps({"status": EVIL, "reason": EVIL, "mesh": {EVIL: EVIL}}))
    (hostile / f"{EVIL.replace('/', '_')}.log").write_text(EVIL)
    other = make_run(tmp_path / "runs" / "other")
    page = client(tmp_path, metrics=[f"eval/{EVIL}"])
    ids = [address_of_folder(path) for path in (hostile, other)]
    texts = [page.get(path).text for path in ("/", f"/run/{ids[0]}", f"/compare?run={ids[0]}&run={ids[1]}")]
    texts += [page.get(f"/?q={quote(EVIL)}&sort={quote(EVIL)}").text]
    for data in (page.get("/api/runs").json(), page.get(f"/api/run/{ids[0]}").json()):
        texts += data["parts"].values()
    for text in texts:
        assert "<img src=x" not in text
        assert "<script>alert" not in text
    assert "&lt;img src=x" in texts[0]
    assert page.get(f"/api/run/{ids[0]}/log?name={quote(EVIL)}").status_code == 404


@pytest.mark.parametrize(
    "name", ["../config.json", "..%2fconfig.json", "%2fetc%2fpasswd", "%2e%2e/%2e%2e", "config.json", "a.png%00"]
)
def test_no_address_leads_out_of_the_folders(folder, name):
    page = client(folder)
    for path in (f"{address(folder / 'good')}/picture/{name}", f"/run/{name}", f"/static/{name}", f"/search/{name}"):
        assert page.get(path).status_code in (400, 404), path
    assert page.get(f"/api{address(folder / 'good')}/log?name={name}").status_code == 404


def test_links_and_pipes_in_a_workdir_are_not_followed(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    runs = make_folder(tmp_path / "runs")
    good = runs / "good"
    (good / "mistakes.png").symlink_to(secret)
    (good / "no.png").write_bytes(b"<svg onload=alert(1)>")
    (good / "secret.log").symlink_to(secret)
    os.mkfifo(good / "pipe.log")
    os.mkfifo(good / "pipe.png")
    (good / "config.json").unlink()
    (good / "config.json").symlink_to("/etc/passwd")
    page = client(runs)
    for name in ("mistakes.png", "no.png", "pipe.png"):
        assert page.get(f"{address(good)}/picture/{name}").status_code == 404, name
    for name, why in (("secret.log", "leads out"), ("pipe.log", "no ordinary file")):
        log = page.get(f"/api{address(good)}/log?name={name}").json()
        assert log["text"] == "", name
        assert why in log["problem"], name
    html = page.get(address(good)).text
    assert "root:" not in html
    assert "config.json: it leads out of its folder" in html
    (good / "metrics.jsonl").unlink()
    os.mkfifo(good / "metrics.jsonl")
    (row,) = client(good).get("/api/runs").json()["rows"]
    assert row["problem"] == "metrics.jsonl: it is no ordinary file, and is not shown"


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "summary.json", "lease.json"])
def test_what_the_table_shows_is_read_in_the_workdir_alone(tmp_path, name):
    foreign = make_run(tmp_path / "foreign", lines=[{"step": 1, "epoch": 1.0, "eval/loss": 0.123}])
    run = make_run(tmp_path / "runs" / "run", lines=[])
    (foreign / name).touch()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(foreign / name)
    (row,) = client(tmp_path / "runs").get("/api/runs").json()["rows"]
    assert row["problem"] == f"{name}: it leads out of its folder, and is not shown"
    assert row["metrics"] == {}
    (run / name).unlink()
    (run / name).symlink_to("inner")
    (run / "inner").write_bytes((foreign / name).read_bytes())
    (row,) = client(tmp_path / "runs").get("/api/runs").json()["rows"]
    assert "leads out" not in row["problem"]


@pytest.mark.parametrize("name", ["examples.json", "status.json", "config.json", "metrics.jsonl"])
def test_a_pipe_in_one_run_keeps_no_curves_waiting(tmp_path, name):
    bad, good = (make_run(tmp_path / "runs" / which) for which in ("bad", "good"))
    (bad / name).unlink(missing_ok=True)
    os.mkfifo(bad / name)
    page, answers = client(tmp_path), []
    path = "/api/curves?" + "&".join(f"run={address_of_folder(run)}" for run in (bad, good))
    thread = threading.Thread(target=lambda: answers.append(page.get(path).json()["runs"]), daemon=True)
    thread.start()
    thread.join(20)
    assert answers, "it waits for the pipe"
    assert answers[0][1]["metrics"]
    if name != "status.json":
        assert answers[0][0]["problems"] == [f"{name}: it is no ordinary file, and is not shown"]


def test_names_that_are_no_unicode_are_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/runs/\xff\xfe"
    os.makedirs(path)
    make_run(tmp_path / "runs" / os.fsdecode(b"\xff\xfe"))
    make_run(tmp_path / "runs" / "other")
    page = client(tmp_path / "runs")
    names = {row["name"]: row["id"] for row in page.get("/api/runs").json()["rows"]}
    assert set(names) == {"other", "\\udcff\\udcfe"}
    assert all(page.get(f"/run/{run_id}").status_code == 200 for run_id in names.values())


def make_fleet(folder, workdir):
    """A fleet with a run that trains in a workdir, as its server sees it."""
    store = Store(folder)
    submitted = store.submit(["python", "-m", "jaxdl.train", "--workdir", str(workdir)], [1])
    run = {"run": submitted.name, "state": "running", "nodes": ["node0"], "sizes": [1], "left_out": {}, "needs": {},
           "weight": 1.0, "priority": 0, "attempt": 1, "resized": 0, "killed": 0, "since": 0.0, "ended": 0.0,
           "code": None, "reason": EVIL, "decided": "", "workdir": str(workdir), "share": 1.0, "speeds": {},
           "estimates": {}}  # fmt: skip
    store.write_view({"at": 1.0, "nodes": {"node0": submitted.name, "node1": ""}, "runs": [run]})
    output = store.path_of(submitted.name) / "attempts" / "1" / "output.txt"
    output.parent.mkdir(parents=True)
    output.write_text("of the fleet\n")
    (folder / "journal.jsonl").write_text('{"what": "started", "at": 5.0, "run": "0001", "nodes": ["node0"]}\nbroken\n')
    return store, submitted.name


def test_the_page_of_a_fleet_and_what_it_may_be_asked(tmp_path):
    run = make_run(tmp_path / "runs" / "a", State.PROCESSING, doing="training", process=this_process())
    store, number = make_fleet(tmp_path / "fleet", run)
    make_run(run, State.PROCESSING, doing="training")  # The submission has queued it.
    page = client(tmp_path, tokens=[TOKEN])
    fleet = f"/fleet/{address_of_folder(tmp_path / 'fleet')}"
    html = page.get(fleet).text
    for text in (
        "node1",
        "server is silent",
        "1 of its last lines are damaged",
        f'href="{address(run)}"',
        "&lt;img src",
    ):
        assert text in html, text
    assert "<img src=x" not in html
    assert page.get(f"/api{address(run)}/log").json()["text"] == "of the fleet\n"
    assert page.post(f"{fleet}/{number}/hold", headers=HERE).status_code == 403
    sign_in(page)
    assert page.post(f"{fleet}/{number}/hold", headers=HERE).status_code == 303
    assert store.order_of(number) == "hold"
    for path in (f"{fleet}/{number}/remove", f"{fleet}/..%2f/hold", f"/fleet/x/{number}/hold"):
        assert page.post(path, headers=HERE).status_code == 404, path
    assert page.post(f"{fleet}/0077/hold", headers=HERE).status_code == 409
    (tmp_path / "fleet" / "fleet.json").write_text("{")
    assert "fleet.json: it is damaged" in client(tmp_path).get(fleet).text
    (tmp_path / "fleet" / "fleet.json").unlink()
    (tmp_path / "fleet" / "fleet.json").symlink_to(run / "status.json")
    assert "fleet.json: it leads out of its folder" in client(tmp_path).get(fleet).text


def test_the_page_of_a_search(tmp_path):
    best = {"best_metric": "accuracy", "best_mode": "max"}
    search = tmp_path / "deep" / "er" / "search"
    for number, rate in enumerate((0.1, 0.5)):
        lines = [{"step": 10, "epoch": 1.0, "eval/accuracy": 0.7 + rate / 2}]
        make_run(search / "trials" / f"{number:04}", lines=lines, config={"optimizer": {"learning_rate": rate}}, **best)
    (search / SEARCH_FILE).write_text(json.dumps({"search": {"vary": ["optimizer.learning_rate=0.1,0.5"]}}))
    page = client(tmp_path)
    address_of_search = f"/search/{address_of_folder(search)}"
    html = page.get(address_of_search).text
    assert "0.95" in html
    assert "no report yet" in html
    result = {"metric": "eval/accuracy", "direction": "minimize", "best": {"number": 0, "command": f"train {EVIL}"},
              "trials": [{"number": 0, "settings": {"optimizer.learning_rate": 0.1}, "state": "finished", "value": 0.75,
                          "reason": EVIL}]}  # fmt: skip
    (search / RESULT_FILE).write_text(json.dumps(result))
    html = client(tmp_path).get(address_of_search).text
    assert html.index("Compare trial 0") < html.index("Compare trial 1"), "the best one is first"
    assert "<script>alert" not in html
    assert "<img src=x" not in html


def test_the_page_of_a_search_by_two_metrics(tmp_path):
    for number, loss in enumerate((0.5, 0.25, 0.75)):
        make_run(tmp_path / "trials" / f"{number:04}", lines=[{"step": 10, "epoch": 1.0, "eval/loss": loss}])
    given = {"vary": ["seed=1,2,3"], "metric": ["evaluation/loss", "num_params"], "direction": []}
    (tmp_path / SEARCH_FILE).write_text(json.dumps({"search": given}))
    address_of_search = f"/search/{address_of_folder(tmp_path)}"
    html = client(tmp_path).get(address_of_search).text
    assert html.index("Compare trial 1") < html.index("Compare trial 0") < html.index("Compare trial 2")
    assert "num_params" in html
    metrics = [{"eval/loss": 0.5, "num_params": 70007.0}, {"eval/loss": 0.25, "num_params": 8008}, {}]
    trials = [
        {"number": number, "value": told.get("eval/loss"), "metrics": told} for number, told in enumerate(metrics)
    ]
    result = {"metric": "eval/loss", "direction": "minimize", "front": [0, 1], "best": {"number": 1, "command": "x"},
              "metrics": {"eval/loss": "minimize", "num_params": "minimize"}, "trials": trials}  # fmt: skip
    (tmp_path / RESULT_FILE).write_text(json.dumps(result))
    html = client(tmp_path).get(address_of_search).text
    assert "On the Pareto front" in html
    assert "trial <b>0</b>, trial <b>1</b>" in html
    assert "70,007" in html
    bad_trials = [{"number": 0, "metrics": 3}]
    for broken in ({"metrics": 3}, {"metrics": {"a": None}}, {"front": 3}, {"front": [[{}]]}, {"trials": bad_trials}):
        (tmp_path / RESULT_FILE).write_text(json.dumps(result | broken))
        assert client(tmp_path).get(address_of_search).status_code == 200


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing-there", "--serve"], "nothing-there: there is no such folder"),
        ([".", "--serve", "--host", "0.0.0.0", "--port", "0"], "other machines reach it, and no token"),
        ([".", "--serve", "--json"], "--serve and --json"),
        ([".", "--serve", "--port", "70000"], "--port 70000"),
        ([".", "--port", "0"], "--port: it has no effect without --serve"),
        ([".", "--serve", "--token-file", "no-such-file"], "--token-file no-such-file"),
    ],
)
def test_mistakes_of_the_command_line_are_one_message(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXDL_STATUS_TOKEN", raising=False)
    assert message in refusal(capsys, *args, run=main)


def test_a_token_file_that_others_read_is_warned_of(tmp_path):
    from jaxdl.core.web.listening import others_read, read_tokens

    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(stat.S_IRUSR | stat.S_IROTH)
    assert others_read(path)
    assert read_tokens(path, "JAXDL_STATUS_TOKEN") == (TOKEN,)
