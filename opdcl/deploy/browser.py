"""A page on this machine where base, tuned and recovered answer the same prompt side by side.

opdcl chat runs/mine --browser
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opdcl.deploy.chat import Chat
from opdcl.faults import translate

PAGE = Path(__file__).parent / "browser.html"

# The page runs its own script and asks this server; it loads nothing from anywhere else.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

# Texts by state, and the states whose text is cut at the limit.
Answers = tuple[dict[str, str], list[str]]

# Seconds between two looks at answers that are being written.
PERIOD = 0.2

# Seconds after which a client that neither sends nor takes anything is dropped.
LONGEST_SILENCE = 5.0


class ChatServer(ThreadingHTTPServer):
    """Serves the page and its answers at 127.0.0.1 only; prompts are answered one after the other."""

    daemon_threads = True

    def __init__(self, chat: Chat, source: str = "", system: str = "", prompts: Sequence[str] = ()):
        """Listen at a free port. The page names the models' `source`, begins with a `system` prompt, and
        suggests `prompts`.
        """
        super().__init__(("127.0.0.1", 0), _Handler)
        self.chat = chat
        self.shown = {"states": [*chat.slots], "limit": chat.max_new_tokens}
        self.shown |= {"source": source, "system": system, "prompts": [*prompts]}
        self.one_at_a_time, self.stop = threading.Lock(), threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone; anything else is a defect, whose traceback helps."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def answer(self, prompt: str, system: str, on_text: Callable[[dict[str, str]], None]) -> Answers:
        """Return the answers by state; `on_text` gets what they are so far, again and again.

        If it raises an error, because the page was closed or its user stopped, the models stop as well.

        Raises:
            OpdclError: The prompt cannot be answered, for example because it is too long.
        """
        growing: dict[str, Callable[[], str]] = {}
        asked = prompt, system or None, growing.__setitem__, self.stop.is_set
        with self.one_at_a_time, ThreadPoolExecutor(1) as thread:
            self.stop.clear()
            found = thread.submit(self.chat.answers, *asked)
            try:
                while not wait([found], PERIOD).done:
                    on_text({state: text() for state, text in growing.copy().items()})
            finally:
                self.stop.set()
            return found.result()

    def server_close(self) -> None:
        """Stop the models too: the program would wait for their answers."""
        self.stop.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    timeout = LONGEST_SILENCE  # of its socket

    def do_GET(self) -> None:
        if not self._is_asked_for("/"):
            return
        self._begin("text/html; charset=utf-8")
        shown = json.dumps(self.server.shown).replace("<", "\\u003c")  # within a script, `</` could end it
        self.wfile.write(PAGE.read_text(encoding="utf-8").replace("SHOWN", shown).encode())

    def do_POST(self) -> None:
        """Answer `{"prompt", "system"}` with lines of JSON: the texts so far, and at the end all of them."""
        if not self._is_asked_for("/ask"):
            return
        length = self.headers.get("Content-Length", "")
        # A million bytes are no prompt that somebody typed.
        is_length = re.fullmatch("[0-9]{1,6}", length)
        if self.headers.get("Content-Type") != "application/json" or not is_length:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            asked = json.loads(self.rfile.read(int(length)))
            prompt, system = str(asked["prompt"]), str(asked.get("system", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        except TimeoutError:
            self.send_error(HTTPStatus.REQUEST_TIMEOUT)
            return
        self._begin("application/jsonl")
        try:
            texts, cut = self.server.answer(prompt, system, lambda texts: self._line({"texts": texts}))
            self._line({"texts": texts, "cut": cut, "done": True})
        except OSError:
            pass  # the page was closed, or takes nothing any more
        except Exception as fault:
            error = translate(fault)
            with contextlib.suppress(OSError):
                self._line({"error": error.message, "hint": error.hint})

    def _is_asked_for(self, path: str) -> bool:
        """Refuse a page of another site, whose name leads to this machine, and any other path."""
        port = self.server.server_port
        own = {f"127.0.0.1:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin", "").removeprefix("http://")
        if self.headers.get("Host") not in own or (origin and origin not in own):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != path:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

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
