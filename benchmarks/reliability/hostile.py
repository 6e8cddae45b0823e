"""Content that tries to run scripts, send requests or control the terminal, shown in a real browser."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

from attempts import attempt, command, row, run, wait

RUN = "window.hostile=1"
PAYLOADS = [
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f'"><script>{RUN}</script>',
    f"' autofocus onfocus='{RUN}",
    f'<iframe src="javascript:parent.{RUN}"></iframe>',
    f'<a href="javascript:{RUN}">x</a>',
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<math><mtext><style></math><img src onerror={RUN}>",
    "<img src=http://127.0.0.1:9/a.png>",
    "<link rel=stylesheet href=http://127.0.0.1:9/a.css>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<style>@import 'http://127.0.0.1:9/a';</style>",
    "<object data=http://127.0.0.1:9/a></object>",
    "<form action=http://127.0.0.1:9/><button>go",
    "<base href=http://127.0.0.1:9/>",
    "![a](http://127.0.0.1:9/a.png)",
    f"[a](javascript:{RUN})",
    f"```\n</pre><script>{RUN}</script>",
    f"{{{{ 7*7 }}}}{{% raw %}}<script>{RUN}</script>",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"\\u003cscript\\u003e{RUN}",
    f"<!--><script>{RUN}</script>-->",
    f"]]><![CDATA[<script>{RUN}</script>]]>",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\x1b]8;;http://127.0.0.1:9/\x07link\x1b]8;;\x07",
    "\u202egnp.exe",
    "\u2066\u2069\u200f",
    "\x01\x07\x08\x7f\x9b31m",
    "a\rb\x0bc\x85d\u2028e\u2029f",
    "[bold red]a[/bold red][link=http://127.0.0.1:9/]x[/link]",
    "%00%0d%0aSet-Cookie:x",
]


def hostile(place: Path, options) -> list[dict]:
    """Put payloads into prompts, answers and descriptions; open each report in a browser and a terminal."""
    if not options.browser:
        return [row("hostile content", "needs --browser COMMAND (a Chromium)", "not measured here", "-")]
    from opdcl.results.report import write
    from opdcl.rundir.layout import RunDir

    code, said = run(place, *command("hosted"))
    assert code == 0, said
    browser = Browser(options.browser)
    control = place / "control.html"
    control.write_text(f"<img src=x onerror={RUN}><img src=http://127.0.0.1:9/>")
    assert browser.visit(control) == (True, 1), (
        "the check misses a script that runs and a request that is sent"
    )
    plain = effects(place, "plain words")
    assert any("\x1b" in e for e in plain), "this is no terminal: not even a progress bar moves its cursor"
    shown = ran = requests = unsafe = 0
    for payload in PAYLOADS:
        for file in (place / "hosted" / "evals").rglob("*.samples.jsonl"):
            rows = [json.loads(line) for line in file.read_text().split("\n") if line]
            passed = float(
                file.parent.name == "base"
            )  # a report shows what base could do and the others cannot
            for r in rows:
                r |= {"prompt": f"{payload} {r['doc_id']}", "response": payload, "target": payload}
                r["scores"] = {m: [passed] if isinstance(v, list) else passed for m, v in r["scores"].items()}
            file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        config = json.loads((place / "hosted" / "config.json").read_text())
        config["workflow"]["description"] = payload
        (place / "hosted" / "config.json").write_text(json.dumps(config))
        write(RunDir(place / "hosted"))
        page = (place / "hosted" / "report.html").read_text()
        shown += _visible(payload) in page
        found = browser.visit(place / "hosted" / "report.html")
        ran, requests = ran + found[0], requests + found[1]
        unsafe += not effects(place, payload) <= plain
    browser.close()
    ok = shown == len(PAYLOADS) and not (ran or requests or unsafe)
    return [
        row(
            f"{len(PAYLOADS)} payloads: scripts, requests, terminal escapes, bidi marks",
            "in prompts, answers, targets and the description; each report "
            "opened in headless Chromium; each report, and a chat, shown on a pseudo-terminal",
            f"{'' if ok else 'FAILED: '}{ran} scripts ran, {requests} requests were sent, "
            f"{unsafe} terminals received a control sequence that plain text does not cause",
            "-",
        )
    ]


EFFECT = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\].*?(?:\x07|\x1b\\)|.)"
    r"|[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]",
    re.DOTALL,
)


def effects(place: Path, words: str) -> set[str]:
    """Show the report and a chat with these words on a terminal; return the control sequences it received."""
    return {
        e
        for command in (["report", "hosted"], ["chat", "hosted", words])
        for e in EFFECT.findall(on_terminal(place, *command))
    }


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
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # raised at the end of a pseudo-terminal
        pass
    os.close(ours)
    text = written.decode(errors="replace")
    assert wait(pid) == 0, text
    return text


def _visible(payload: str) -> str:
    """Return the payload as it must appear in the page: escaped, with control characters made visible."""
    from markupsafe import escape

    from opdcl.sanitize import harmless

    return str(escape(harmless(payload))).split("\n")[0]


class Browser:
    """A headless Chromium, driven through a pipe."""

    def __init__(self, words: str):
        to, self._in = os.pipe()
        self._out, back = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f"exec {words} --remote-debugging-pipe about:blank 3<&{to} 4>&{back}"
        self._process = subprocess.Popen(
            ["sh", "-c", shell], pass_fds=(to, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._last = 0
        self._buffer = b""
        self.events: list[dict] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
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
        self.send(
            "Runtime.evaluate",
            expression="document.querySelectorAll('details').forEach(d => d.open = true);"
            "document.querySelectorAll('a, button, summary').forEach(a => a.click())",
        )
        time.sleep(0.3)
        ran = self.send("Runtime.evaluate", expression="window.hostile === 1", returnByValue=True)["result"][
            "value"
        ]
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return ran, sum(url.startswith("http") for url in urls)

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(10)
