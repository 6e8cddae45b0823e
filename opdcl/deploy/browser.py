"""A page on this machine where base, tuned and recovered answer the same prompt side by side.

opdcl chat runs/mine --browser
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opdcl.deploy.chat import Chat
from opdcl.errors import translate

PAGE = Path(__file__).parent / "browser.html"

# The page runs its own script and asks this server; it loads nothing from anywhere else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

# Seconds between two looks at answers that are being written.
PERIOD = 0.2

# A longer request is no prompt that somebody typed, in bytes.
LONGEST_REQUEST = 1_000_000


class ChatServer(ThreadingHTTPServer):
    """Serves the page and its answers at 127.0.0.1 only; prompts are answered one after the other."""

    daemon_threads = True

    def __init__(self, chat: Chat, max_new_tokens: int, temperature: float, port: int = 0):
        """Listen at a port; 0 takes a free one."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.chat = chat
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.one_at_a_time = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def answer(self, prompt: str, system: str, on_text: Callable[[dict[str, str]], None]) -> dict[str, str]:
        """Return the answers by state; `on_text` gets what they are so far, again and again.

        Raises:
            OpdclError: The prompt cannot be answered, for example because it is too long.
        """
        growing: dict[str, Callable[[], str]] = {}
        finished: dict[str, str] = {}
        faults: list[Exception] = []

        def work() -> None:
            try:
                finished.update(
                    self.chat.answers(
                        prompt, self.max_new_tokens, system or None, self.temperature, growing.__setitem__
                    )
                )
            except Exception as fault:  # raised again in the thread that asked
                faults.append(fault)

        with self.one_at_a_time:
            worker = threading.Thread(target=work, daemon=True)
            worker.start()
            try:
                while worker.is_alive():
                    worker.join(PERIOD)
                    on_text({state: text() for state, text in growing.copy().items()})
            finally:
                worker.join()  # if the page was closed, the model still writes this answer
        if faults:
            raise faults[0]
        return finished


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        if self._is_from_elsewhere():
            return
        if self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._begin("text/html; charset=utf-8")
        names = json.dumps([*self.server.chat.slots])
        self.wfile.write(PAGE.read_text(encoding="utf-8").replace("STATES", names).encode())

    def do_POST(self) -> None:
        """Answer `{"prompt", "system"}` with lines of JSON: the texts so far, and at the end all of them."""
        length = int(self.headers.get("Content-Length") or 0)
        if self._is_from_elsewhere():
            return
        if self.headers.get("Content-Type") != "application/json" or length > LONGEST_REQUEST:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            asked = json.loads(self.rfile.read(length))
            prompt, system = str(asked["prompt"]), str(asked.get("system", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        self._begin("application/jsonl")
        try:
            texts = self.server.answer(prompt, system, lambda texts: self._line({"texts": texts}))
            self._line({"texts": texts, "done": True})
        except ConnectionError:
            pass  # the page was closed
        except Exception as fault:
            self._line({"error": translate(fault).message})

    def _is_from_elsewhere(self) -> bool:
        """Refuse a page of another site, whose name leads to this machine."""
        port = self.server.server_port
        if self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return False
        self.send_error(HTTPStatus.FORBIDDEN)
        return True

    def _begin(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _line(self, value: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: prompts are the user's own."""
