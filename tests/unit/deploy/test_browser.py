"""The page that asks all models side by side: at this machine only, and with the answers of `opdcl chat`."""

import itertools
import json
import re
import socket
import threading
import time
import webbrowser

import httpx2
import pytest
from helpers.synthetic import measure, measure_states, write

import opdcl
from opdcl.cli import runs
from opdcl.config.model import ModelConfig
from opdcl.deploy.chat import Chat, ChatServer, _Handler
from opdcl.rundir.layout import RunDir


@pytest.fixture(scope="module")
def server(tiny_model):
    chat = Chat(ModelConfig(id=str(tiny_model), dtype="float32"), {}, max_new_tokens=8)
    server = ChatServer(chat, source="</script>runs/mine")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def lines(response) -> list[dict]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_page_has_a_column_for_each_model_and_loads_nothing_else(server):
    page = httpx2.get(server.url)
    assert server.url.startswith("http://127.0.0.1:")
    shown = {"states": ["base"], "limit": 8, "source": "</script>runs/mine", "system": "", "prompts": []}
    assert json.loads(re.search("const page = (.*);", page.text)[1]) == shown
    assert page.text.count("</script>") == 1
    policy = page.headers["Content-Security-Policy"]
    for part in ("default-src", "frame-ancestors", "base-uri", "form-action"):
        assert f"{part} 'none'" in policy
    assert "//" not in page.text.replace("// ", "")
    assert httpx2.get(f"{server.url}other").status_code == 404


def test_the_page_of_a_run_suggests_prompts_that_came_back(tiny_model, tmp_path, capfd):
    run = RunDir(tmp_path / "mine")
    evaluation = {"retention": ["instructions"], "system": "Be brief."}
    sections = {"model": {"id": str(tiny_model), "dtype": "float32"}, "eval": evaluation}
    write(run.config, {"workflow": sections, "origins": {}})
    measure_states(run, "instructions", (32, 8, 28))
    with opdcl.chat_page(run.path, 8) as server:
        assert server.shown["system"] == "Be brief."
        numbers = [int(prompt.split()[2]) for prompt in server.shown["prompts"]]
        assert len({*numbers} & {*range(8, 28)}) == 3
    measure(run, "tuned", {"instructions": []}, prompt="Another prompt")
    with opdcl.chat_page(run.path, 8) as server:
        assert server.shown["prompts"] == []
    assert "suggests no prompts: suite instructions: base and tuned" in capfd.readouterr().err


def test_answers_are_those_of_chat_and_come_while_they_grow(server):
    for system in ("", "Answer as a pirate would."):
        expected, cut = server.chat.answers("Hello", system or None, lambda state, text: None)
        found = lines(httpx2.post(server.url + "ask", json={"prompt": "Hello", "system": system}))
        assert found[-1] == {"texts": expected, "cut": cut, "done": True}
        assert all(expected["base"].startswith(line["texts"].get("base", "")[:1]) for line in found)


def test_a_prompt_that_cannot_be_answered_is_named_and_the_server_goes_on(server):
    found = lines(httpx2.post(server.url + "ask", json={"prompt": "word " * 20_000}))
    assert found[-1]["error"].startswith("prompt: the prompt has ")
    assert found[-1]["hint"] == "shorten the prompt, or lower max_new_tokens"
    assert "done" in lines(httpx2.post(server.url + "ask", json={"prompt": "Hello"}))[-1]


def test_models_stop_when_the_page_hangs_up_and_then_answer_the_next_prompt(server, monkeypatch):
    monkeypatch.setattr(server.chat, "max_new_tokens", 200)
    expected, _ = server.chat.answers("Hi", None, lambda state, text: None)
    tokens = itertools.count()
    embeddings = server.chat.backbone.causal_lm.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda *_: time.sleep(0.05 * (next(tokens) > 0)))
    address = ("127.0.0.1", server.server_port)
    body = json.dumps({"prompt": "Hello"}).encode()
    with socket.create_connection(address) as closed:
        head = f"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\nContent-Type: application/json\r\n"
        closed.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while b"texts" not in closed.recv(65536):
            pass
    with server.one_at_a_time:
        assert next(tokens) < 150
    hook.remove()
    assert lines(httpx2.post(server.url + "ask", json={"prompt": "Hi"}))[-1]["texts"] == expected


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b"[]", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b'{"prompt": "a"}', "headers": {"Content-Type": "text/plain"}}, 400),
        ({"content": b"[" * 400_000, "headers": {"Content-Type": "application/json"}}, 400),
        ({"json": {"prompt": "a"}, "headers": {"Host": "evil.example"}}, 403),
        ({"json": {"prompt": "a"}, "headers": {"Origin": "http://evil.example"}}, 403),
        ({"json": {"prompt": "a"}, "headers": {"Origin": "null"}}, 403),
    ],
)
def test_other_sites_and_other_requests_are_refused(server, sent, code):
    assert httpx2.post(server.url + "ask", **sent).status_code == code


def test_a_path_that_is_none_of_the_pages_is_not_answered(server):
    for path in ("", "other", "ask/", "ask?a"):
        assert httpx2.post(f"{server.url}{path}", json={"prompt": "a"}).status_code == 404
    assert httpx2.get(f"{server.url}ask").status_code == 404


def spoken(server, *headers: str, method: str = "POST /ask", body: bytes = b"") -> bytes:
    """Send a request word by word, and return all that comes back until the server hangs up."""
    address = ("127.0.0.1", server.server_port)
    with socket.create_connection(address, timeout=30) as client:
        head = "\r\n".join([f"{method} HTTP/1.1", f"Host: 127.0.0.1:{address[1]}", *headers, "", ""])
        client.sendall(head.encode() + body)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("length", ["-1", "abc", "2.0", "", "1_4", "+2", "1000001", "9" * 5000, "²"])
def test_a_length_that_is_none_is_refused_before_anything_is_read(server, capfd, length):
    headers = ("Content-Type: application/json", f"Content-Length: {length}")
    assert b" 400 " in spoken(server, *headers, body=b"{}").splitlines()[0]
    assert b" 400 " in spoken(server, "Content-Type: application/json").splitlines()[0]
    assert capfd.readouterr().err == ""


def test_a_client_that_falls_silent_is_dropped_without_a_word(server, monkeypatch, capfd):
    assert 0 < _Handler.timeout < 10
    monkeypatch.setattr(_Handler, "timeout", 0.3)
    assert b" 408 " in spoken(server, "Content-Type: application/json", "Content-Length: 9", body=b"{")
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(20)]
    for client in silent:
        client.sendall(b"POST /ask HTTP/1.1\r\n")
        client.settimeout(30)
    assert [client.recv(1) for client in silent] == [b""] * 20
    for client in silent:
        client.close()
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
    assert httpx2.get(server.url).status_code == 200


@pytest.mark.parametrize(("name", "opened"), [("firefox", True), ("w3m", False), ("/usr/bin/lynx", False)])
def test_the_browser_is_opened_once_the_server_answers(server, monkeypatch, name, opened):
    """A browser that returns only when it is closed does not keep the server from answering it."""
    seen = []

    def visit(self, url, *_):
        seen.append(httpx2.get(url).status_code)

    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser(name))
    monkeypatch.setattr(webbrowser.GenericBrowser, "open", visit)
    runs._open_page(server.url)
    assert seen == [200] * opened
