"""Ask the states of a run the same questions, in the terminal or on a page that has the answers side by side.

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
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import Row
from opdcl.errors import UsageError
from opdcl.faults import translate
from opdcl.model.load_backbone import accept_adapter, load_backbone
from opdcl.sampling.sample import sample
from opdcl.words import Prompt, Rollout

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


class Chat:
    """The loaded base with one or two adapters, which may belong to a tuned model beside it."""

    def __init__(
        self,
        base: ModelConfig,
        adapters: dict[str, Path],
        tuned: ModelConfig | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.0,
    ):
        self.backbone, self.name = load_backbone(base, tuned), base.id
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        # The backbone holds two adapters, under these names; a single adapter must be `student`.
        names = ("student",) if len(adapters) == 1 else ("tuned", "student")
        self.slots = {"base": "base", **dict(zip(adapters, names, strict=False))}
        for state, adapter in adapters.items():
            accept_adapter(self.backbone, adapter, self.slots[state])
        if adapters:
            self.backbone.peft.set_adapter("student")

    def answers(
        self,
        prompt: str,
        system: str | None,
        on_answer: Callable[[str, Callable[[], str]], None],
        stopped: Callable[[], bool] = bool,
    ) -> tuple[dict[str, str], list[str]]:
        """Return the answer of `base` and each adapter by state, and which of them are cut at the limit.

        `on_answer` gets each state, and a function that returns what it has written so far. Once `stopped`
        returns True, nothing more is written.

        Raises:
            UsageError: The prompt has bytes that are not UTF-8.
        """
        for text in (prompt, system or ""):
            _refuse_broken(text)
        messages = [{"role": "system", "content": system}] if system else []
        row = Row([*messages, {"role": "user", "content": prompt}], None, None, "prompt")
        longest_prompt = self.backbone.context_length - self.max_new_tokens
        ids = encode_prompt(row, self.backbone.tokenizer, longest_prompt)
        options: Any = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        options |= {"eos_ids": self.backbone.eos_ids, "stopped": stopped}
        texts, cut = {}, []
        for state, slot in self.slots.items():
            if stopped():
                break
            rollout = Rollout(Prompt(ids))  # the sampler appends to it
            on_answer(state, partial(self._text, rollout))
            with self.backbone.merged(slot) as model:
                sample(model, [rollout], **options)
            texts[state] = self._text(rollout)
            if len(rollout.completion_ids) == self.max_new_tokens and not rollout.finished:
                cut.append(state)
        return texts, cut

    def _text(self, rollout: Rollout) -> str:
        text = self.backbone.tokenizer.decode(list(rollout.completion_ids), skip_special_tokens=True)
        return str(text).strip()


def _refuse_broken(text: str) -> None:
    """Refuse a text with bytes that were not UTF-8, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        shown = text.encode(errors="replace").decode()[:60]
        hint = "convert it: iconv -f ISO-8859-1 -t UTF-8"
        raise UsageError(f"the prompt is not UTF-8: {shown!r}", hint) from fault


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
