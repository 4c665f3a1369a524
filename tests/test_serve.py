"""The server of OpenAI's interface: what it writes, to whom, and what it refuses."""

import asyncio
import concurrent.futures
import json
import queue
import signal
import socket
import subprocess
import sys

import httpx
import numpy as np
import openai
import pytest
from runs import ROOT
from serving import CONTEXT, QUEUE, SLOTS, Server, write_run
from test_serve_requests import CALL, TOOL

from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.inference.chatting import Chat
from jaxdl.inference.decoding.settings import Sampling
from jaxdl.inference.serve import programs
from jaxdl.inference.serve.answers import token_bytes, token_text
from jaxdl.inference.serve.engine import Engine, Job
from jaxdl.inference.serve.programs import Programs
from jaxdl.inference.serve.requests import Served, read_chat

PROMPTS = ["1 f", "", "0 fish, re", "blue", "fish", "\u00e9\u00e9"]
GREEDY = {"temperature": 0, "max_tokens": 20}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 20}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(workdir):
    with Server(workdir) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def completed(client, **options):
    return client.completions.create(model="tiny", **options)


def generated(server, prompt, *, max_tokens, **options):
    return "".join(server.predictor.generate(prompt, num_tokens=max_tokens, **options))


@pytest.mark.parametrize("options", [GREEDY, DRAWN, DRAWN | {"top_p": 0.5}])
def test_texts_are_those_of_generate(server, client, options):
    top_k = {"top_k": 7} if "top_p" in options else {}
    for prompt in PROMPTS[:4]:
        made = completed(client, prompt=prompt, **options, extra_body=top_k)
        assert made.choices[0].text == generated(server, prompt, **options, **top_k)
        streamed = list(completed(client, prompt=prompt, **options, extra_body=top_k, stream=True))
        assert "".join(piece.choices[0].text for piece in streamed) == made.choices[0].text
        assert [piece.choices[0].finish_reason for piece in streamed][-1] == made.choices[0].finish_reason == "length"
        assert made.usage.completion_tokens == 20
        assert made.usage.prompt_tokens == len(server.predictor.codec.prompt(prompt))


def test_several_prompts_and_texts_are_those_of_generate(server, client):
    made = completed(client, prompt=PROMPTS[:2], n=2, **DRAWN)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in made.choices]
    assert texts[0] != texts[1], "two texts of one prompt are drawn by keys of their own"
    several = server.predictor.complete(PROMPTS[:2], num_tokens=20, temperature=1.0, seed=5, samples=2)
    assert texts == [one.text for one in several], "as those of `generate --samples`"
    expected = list(server.predictor.complete(PROMPTS[:2], num_tokens=20, temperature=1.0, seed=5))
    assert [choice.text for choice in completed(client, prompt=PROMPTS[:2], **DRAWN).choices] == [
        one.text for one in expected
    ]
    as_tokens = completed(client, prompt=[list(b"1 f")], **GREEDY, echo=True)
    assert as_tokens.choices[0].text == "1 f" + generated(server, "1 f", **GREEDY)


def test_many_at_once_are_each_as_alone(server):
    requests = [
        {"model": "tiny", "prompt": PROMPTS[number % 6], "max_tokens": 5 + number, "temperature": number % 3 / 2,
         "seed": number, "top_p": 0.9 if number % 2 else 1, "stream": number % 5 == 0}
        for number in range(32)
    ]  # fmt: skip
    alone = [text_of(server.client.post("/v1/completions", json=request)) for request in requests]
    calls = server.num_calls

    async def all_at_once():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=request) for request in requests))

    together = [text_of(answer) for answer in asyncio.run(all_at_once())]
    assert together == alone
    assert len(set(alone)) > 20
    assert server.num_calls - calls < calls / 2, "texts are written side by side"
    assert server.engine.num_live == server.engine.num_waiting == 0


def text_of(answer):
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["text"]
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


@pytest.mark.slow
def test_on_a_mesh_it_writes_what_one_device_does(server, workdir):
    with Server(workdir, "--mesh.replica", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2") as other:
        assert other.engine._programs.sizes == [SLOTS], "one program: its rows are spread over the devices"
        for options in (GREEDY, DRAWN):
            assert text_of(other.ask(**options)) == generated(server, "1 f", **options)


def test_a_long_prompt_is_read_in_pieces_between_the_tokens_of_others(server, workdir, monkeypatch):
    """What is written after it is the same; another text goes on while it is read."""
    monkeypatch.setattr(programs, "PIECE", 16)
    prompt, calls = "0 fish, red fish, blue fish\n1 fish, red fish, bl", []
    with Server(workdir) as other:
        assert other.engine._programs.pieces(len(prompt)) == [0, 16, 32]
        assert other.engine._programs.pieces(16) == [0]
        assert other.engine._programs.pieces(37) == [0, 16, 21]
        for name in ("read", "write"):
            monkeypatch.setattr(other.engine._programs, name, noted(calls, name, getattr(other.engine._programs, name)))
        options = DRAWN | {"max_tokens": 12, "repetition_penalty": 1.3, "ignore_eos": True}
        expected = server.ask(prompt=prompt, **options).json()["choices"][0]["text"]
        for length in (len(prompt), len(prompt) - 11):
            alone = other.ask(prompt=prompt[:length], **options).json()["choices"][0]["text"]
            assert alone == server.ask(prompt=prompt[:length], **options).json()["choices"][0]["text"]
        greedy = {"prompt": "1 f", "max_tokens": 60, "temperature": 0}
        short = server.ask(**greedy).json()["choices"][0]["text"]

        async def both():
            async with httpx.AsyncClient(base_url=other.url, timeout=120) as client:
                common = {"model": "tiny", "ignore_eos": True}
                bodies = [common | greedy] + 3 * [common | {"prompt": prompt, **options}]
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        del calls[:]
        made = [answer.json()["choices"][0]["text"] for answer in asyncio.run(both())]
    assert made == [short, *[expected] * 3]
    assert "read write read write read" in " ".join(calls)


def noted(calls, name, function):
    """The function, which says that it was called."""

    def call(*args):
        calls.append(name)
        return function(*args)

    return call


@pytest.mark.slow
def test_a_network_without_a_cache_reads_the_texts_again(server):
    inference = server.predictor.merged()
    made = Programs(inference, num_slots=2, context=CONTEXT, vocab_size=256, cached=False)
    made.allocate()
    engine, news = Engine(made, max_waiting=9), queue.Queue()
    engine.start()
    hows = [Sampling(num_tokens=20, temperature=0), Sampling(num_tokens=12, temperature=1.0, seed=5)] * 2
    engine.submit([Job(list(b"1 f"), how, lambda one, at=at: news.put((at, one))) for at, how in enumerate(hows)])
    tokens = [[] for _ in hows]
    while sum(map(len, tokens)) < 64:
        at, written = news.get(timeout=120)
        assert written.finish != "failed", engine.failure
        tokens[at] += [token.token for token in written.tokens]
    engine.stop()
    for how, each in zip(hows, tokens, strict=True):
        expected = generated(server, "1 f", max_tokens=how.num_tokens, temperature=how.temperature, seed=how.seed)
        assert bytes(each).decode(errors="replace").rstrip("\ufffd") == expected.rstrip("\ufffd")


def test_stop_texts_and_tokens_end_a_text(server, client):
    whole = generated(server, "1 f", **GREEDY)
    made = completed(client, prompt="1 f", stop=whole[5:8], **GREEDY)
    end = whole.index(whole[5:8])
    assert (made.choices[0].text, made.choices[0].finish_reason) == (whole[:end], "stop")
    assert made.usage.completion_tokens == end + 3
    streamed = list(completed(client, prompt="1 f", stop=[whole[5:8]], **GREEDY, stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == whole[:end]
    token = whole.encode()[6]
    made = completed(client, prompt="1 f", **GREEDY, extra_body={"stop_token_ids": [token]})
    assert made.choices[0].text == whole[: whole.index(chr(token))]
    assert made.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_network(server, client):
    made = completed(client, prompt="1 f", **DRAWN | {"max_tokens": 6}, logprobs=2).choices[0]
    tokens = list(b"1 f")
    for name, logprob, top in zip(
        made.logprobs.tokens, made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True
    ):
        logits = server.predictor.logits([tokens + [0] * (CONTEXT - len(tokens))])[0, len(tokens) - 1]
        expected = logits - np.log(np.exp(logits).sum())
        token = ord(name) if len(name) == 1 else int(name[-2:], 16)
        assert logprob == pytest.approx(expected[token], abs=1e-4)
        assert sorted(top.values(), reverse=True) == pytest.approx(sorted(expected)[:-3:-1], abs=1e-4)
        tokens.append(token)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "?"}], max_tokens=3, logprobs=True, top_logprobs=4
    )
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [4] * len(content)
    assert chat.usage.completion_tokens in (len(content), len(content) + 1)


def test_tokens_that_a_text_has_are_penalized_as_in_openais_reference(server, client):
    """Against NumPy: those of the prompt are not, and one text's are not another's."""
    frequency, presence, tokens = 0.4, -1.5, list(b"1 f")
    options = {"frequency_penalty": frequency, "presence_penalty": presence}
    made = completed(client, prompt="1 f", **GREEDY, **options).choices[0].text
    times = np.zeros(256)
    for _ in range(20):
        logits = server.predictor.logits([tokens + [0] * (CONTEXT - len(tokens))])[0, len(tokens) - 1]
        token = int(np.argmax(logits - times * frequency - (times > 0) * presence))
        times[token] += 1
        tokens.append(token)
    assert made == bytes(tokens[3:]).decode(errors="replace")
    assert made != generated(server, "1 f", **GREEDY)
    drawn = completed(client, prompt="1 f", **DRAWN, **options, n=2).choices
    alone = completed(client, prompt="1 f", **DRAWN, **options).choices[0].text
    assert [drawn[0].text, drawn[0].text != drawn[1].text] == [alone, True]


def test_the_template_reads_tools(server):
    """As they were given; earlier calls have arguments, not their JSON."""
    chat = Chat(server.predictor)
    chat.template = ChatTemplate("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[-1] | tojson }}")
    served = Served("tiny", 2, server.predictor.codec, 9999, 9999, 9, chat)
    last = {"role": "assistant", "content": None, "tool_calls": [CALL]}

    def text_of(**body):
        ask = read_chat(json.dumps({"messages": [last], "max_completion_tokens": 7} | body).encode(), served)
        assert ask.hows[0].num_tokens == 7
        return server.predictor.codec.decode(ask.prompts[0])

    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    message = json.dumps({"role": "assistant", "content": "", "tool_calls": [call]})
    assert text_of(tools=[TOOL]) == json.dumps(TOOL) + message
    assert text_of(tools=[TOOL], tool_choice="none") == message
    assert text_of() == message


def test_a_conversation_is_answered_by_the_template(server, client):
    messages = [{"role": "user", "content": "fish?"}]
    prompt = server.predictor.chat_template.render(messages, add_generation_prompt=True)
    expected = completed(client, prompt=prompt, max_tokens=9, temperature=1, seed=3).choices[0].text
    options = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 1, "seed": 3}
    made = client.chat.completions.create(**options)
    assert made.choices[0].message.content == expected
    assert made.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "sh?"}]}]
    streamed = list(
        client.chat.completions.create(
            **options | {"messages": parts}, stream=True, stream_options={"include_usage": True}
        )
    )
    assert streamed[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices) == expected
    assert streamed[-1].choices == []
    assert streamed[-1].usage == made.usage
    assert streamed[-2].choices[0].finish_reason == made.choices[0].finish_reason


def test_what_is_known_of_the_server(server, client):
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
    assert server.client.get("/health").json() == {"status": "ok"}
    metrics = dict(
        line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    assert int(metrics["jaxdl_written_tokens_total"]) == server.engine.num_written
    assert int(metrics["jaxdl_requests_in_flight"]) == 1, "this one"
    assert int(metrics['jaxdl_answers_total{path="/health",status="200"}']) >= 1


def sent(server, **body):
    """A socket on which a request has been sent, whose answer is not read."""
    content = json.dumps({"prompt": "1 f", "max_tokens": 60, "ignore_eos": True} | body).encode()
    connection = socket.create_connection(server.bound.getsockname())
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server, stream):
    written = server.engine.num_written
    with server.held():
        connections = [sent(server, stream=stream, n=SLOTS) for _ in range(2)]
        server.until(lambda: server.engine.num_live == SLOTS and server.engine.num_waiting == SLOTS)
        for connection in connections:
            connection.close()
        server.until(lambda: server.engine.num_waiting == 0)
        server.until(lambda: all(job.cancelled for job in server.engine._jobs))
    server.until(lambda: server.engine.num_live == 0)
    assert server.engine.num_written - written < 60 * SLOTS
    assert server.ask().status_code == 200


def test_more_than_may_wait_are_refused(server):
    with server.held():
        connections = [sent(server, n=SLOTS + QUEUE)]
        server.until(lambda: server.engine.num_waiting == QUEUE)
        answer = server.ask(model="tiny")
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "1"
        assert server.client.get("/health").status_code == 200
        for connection in connections:
            connection.close()
        server.until(lambda: server.engine.num_waiting == 0)
    assert server.ask().status_code == 200


@pytest.mark.slow
def test_requests_end_after_a_signal(workdir):
    """One that has just begun, whose programs are compiled meanwhile."""
    command = [sys.executable, "-m", "jaxdl.serve", "--workdir", str(workdir), "--port", "0", "--no-warm-up"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving tiny (step 2) on http://127.0.0.1:"), line + process.stderr.read()
            url = line.split()[-1]
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                body = {"prompt": "1 f", "max_tokens": 60, "ignore_eos": True, "stream": True}
                answer = pool.submit(httpx.post, f"{url}/completions", json=body, timeout=120)
                with httpx.Client(base_url=url[:-3]) as client:
                    while "in_flight 1" not in client.get("/metrics").text.replace("in_flight 2", "in_flight 1"):
                        assert not answer.done()
                process.send_signal(signal.SIGTERM)
                assert text_of(answer.result())
            assert process.wait(60) == 0
            error = process.stderr.read()
            assert "key-value cache: 8 slots of 64 tokens take" in error
            assert "Traceback" not in error
        finally:
            process.kill()


class _Codec:
    """A tokenizer with bytes and a piece that begins a word."""

    is_bytes = False
    names = ("▁fish", "<0xE2>", "</s>")

    def decode(self, tokens):
        return "".join(("fish", "\ufffd", "</s>")[token] for token in tokens)

    def name(self, token):
        return self.names[token]


def test_tokens_have_names():
    codec = _Codec()
    assert [token_text(codec, token) for token in range(3)] == [" fish", "bytes:\\xe2", "</s>"]
    assert [token_bytes(codec, token) for token in range(3)] == [list(b" fish"), [0xE2], list(b"</s>")]
