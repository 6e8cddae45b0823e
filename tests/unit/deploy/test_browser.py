"""The page that asks all models side by side: at this machine only, and with the answers of `opdcl chat`."""

import json
import socket
import threading

import httpx2
import pytest

from opdcl.config.model import ModelConfig
from opdcl.deploy.browser import ChatServer
from opdcl.deploy.chat import Chat


@pytest.fixture(scope="module")
def server(tiny_model):
    server = ChatServer(Chat(ModelConfig(id=str(tiny_model), dtype="float32"), {}), 8, 0.0)
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
    assert 'const states = ["base"];' in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "//" not in page.text.replace("// ", "")
    assert httpx2.get(f"{server.url}other").status_code == 404


def test_answers_are_those_of_chat_and_come_while_they_grow(server):
    for system in ("", "Answer as a pirate would."):
        expected = server.chat.answers("Hello", 8, system or None, 0.0, lambda state, text: None)
        found = lines(httpx2.post(server.url + "ask", json={"prompt": "Hello", "system": system}))
        assert found[-1] == {"texts": expected, "done": True}
        assert all(expected["base"].startswith(line["texts"].get("base", "")[:1]) for line in found)


def test_a_prompt_that_cannot_be_answered_is_named_and_the_server_goes_on(server):
    found = lines(httpx2.post(server.url + "ask", json={"prompt": "word " * 20_000}))
    assert "error" in found[-1]
    assert "done" in lines(httpx2.post(server.url + "ask", json={"prompt": "Hello"}))[-1]


def test_a_page_that_is_closed_does_not_let_the_next_prompt_in_early(server):
    expected = server.chat.answers("Hi", 8, None, 0.0, lambda state, text: None)
    address = ("127.0.0.1", server.server_port)
    body = json.dumps({"prompt": "Hello"}).encode()
    with socket.create_connection(address) as closed:
        head = f"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\nContent-Type: application/json\r\n"
        closed.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert lines(httpx2.post(server.url + "ask", json={"prompt": "Hi"}))[-1]["texts"] == expected


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b"[]", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b'{"prompt": "a"}', "headers": {"Content-Type": "text/plain"}}, 400),
        ({"json": {"prompt": "a"}, "headers": {"Host": "evil.example"}}, 403),
    ],
)
def test_other_sites_and_other_requests_are_refused(server, sent, code):
    assert httpx2.post(server.url + "ask", **sent).status_code == code
