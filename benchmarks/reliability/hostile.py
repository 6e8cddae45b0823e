"""Content that tries to run scripts, send requests or control the terminal, shown in a real browser."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

from attempts import attempt, command, row, run, wait
from markupsafe import escape

from opdcl.results.render import write
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

RUN = "window.hostile=1"  # what a payload does if it runs
PAYLOADS: list[str] = json.loads(Path(__file__).with_name("payloads.json").read_text(encoding="utf-8"))


def hostile(place: Path, options: argparse.Namespace) -> list[dict]:
    """Put payloads into prompts, answers and descriptions; open each report in a browser and a terminal."""
    if not options.browser:
        return [row("hostile content", "needs --browser COMMAND (a Chromium)", "not measured here")]
    code, said = run(place, *command("hosted"))
    assert code == 0, said
    browser = Browser(options.browser)
    control = place / "control.html"
    control.write_text(f"<img src=x onerror={RUN}><img src=http://127.0.0.1:9/>")
    assert browser.visit(control) == (True, 1), "the check misses a script that runs and a request"
    plain = effects(place, "plain words")
    assert any("\x1b" in e for e in plain), "this is no terminal: not even a progress bar moves its cursor"
    shown = ran = requests = unsafe = 0
    for payload in PAYLOADS:
        poison(RunDir(place / "hosted"), payload)
        shown += _visible(payload) in (place / "hosted" / "report.html").read_text()
        found = browser.visit(place / "hosted" / "report.html")
        ran, requests = ran + found[0], requests + found[1]
        unsafe += not effects(place, payload) <= plain
    browser.close()
    ok = shown == len(PAYLOADS) and not (ran or requests or unsafe)
    fault = f"{len(PAYLOADS)} payloads: scripts, requests, terminal escapes, bidi marks"
    how = "in prompts, answers, targets and the description; each report opened in headless Chromium; each "
    how += "report, and a chat, shown on a pseudo-terminal"
    outcome = f"{ran} scripts ran, {requests} requests were sent, {unsafe} terminals received a control "
    return [row(fault, how, f"{outcome}sequence that plain text does not cause", ok=ok)]


def poison(hosted: RunDir, payload: str) -> None:
    """Put a payload into all texts of a run, and write its report again."""
    for file in hosted.evals.rglob("*.samples.jsonl"):
        rows = [json.loads(line) for line in file.read_text().split("\n") if line]
        passed = float(file.parent.name == "base")  # a report shows what base could do and others cannot
        for r in rows:
            r |= {"prompt": f"{payload} {r['doc_id']}", "response": payload, "target": payload}
            r["scores"] = {m: [passed] if isinstance(v, list) else passed for m, v in r["scores"].items()}
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = json.loads(hosted.config.read_text())
    config["workflow"]["description"] = payload
    hosted.config.write_text(json.dumps(config))
    write(Results(hosted))


EFFECT = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\].*?(?:\x07|\x1b\\)|.)"
    r"|[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]",
    re.DOTALL,
)


def effects(place: Path, words: str) -> set[str]:
    """Show the report and a chat with these words on a terminal; return the control sequences it received."""
    shown = on_terminal(place, "report", "hosted") + on_terminal(place, "chat", "hosted", words)
    return set(EFFECT.findall(shown))


def on_terminal(place: Path, *words: str) -> str:
    """Run `opdcl` on its own pseudo-terminal; return everything it wrote there."""
    ours, theirs = pty.openpty()

    def prepare() -> None:
        os.environ["TERM"] = "xterm-256color"
        for stream in range(3):
            os.dup2(theirs, stream)

    pid = attempt(place, *words, prepare=prepare)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # raised at the end of a pseudo-terminal
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    text = written.decode(errors="replace")
    assert wait(pid) == 0, text
    return text


def _visible(payload: str) -> str:
    """Return the payload as it must appear in the page: escaped, with control characters made visible."""
    return str(escape(harmless(payload))).split("\n")[0]


class Browser:
    """A headless Chromium, driven through a pipe."""

    def __init__(self, words: str):
        to, self._in = os.pipe()
        self._out, back = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f"exec {words} --remote-debugging-pipe about:blank 3<&{to} 4>&{back}"
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(["sh", "-c", shell], pass_fds=(to, back), **silent)
        self._last, self._buffer, self._session = 0, b"", ""
        self.events: list[dict] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += os.read(self._out, 65536)
            text, self._buffer = self._buffer.split(b"\0", 1)
            found = json.loads(text)
            if found.get("id") == self._last:
                return found.get("result", {})
            self.events.append(found)

    def visit(self, page: Path) -> tuple[bool, int]:
        """Open a page and click everything; return whether a payload ran, and how many requests were sent."""
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        time.sleep(0.5)
        click = "document.querySelectorAll('details').forEach(d => d.open = true);"
        click += "document.querySelectorAll('a, button, summary').forEach(a => a.click())"
        self.send("Runtime.evaluate", expression=click)
        time.sleep(0.3)
        ran = self.send("Runtime.evaluate", expression="window.hostile === 1", returnByValue=True)
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return ran["result"]["value"], sum(one["request"]["url"].startswith("http") for one in sent)

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(10)
