"""A random walk over the command line: seeded commands, bad input, damage and interruptions.

After every command it checks what a user relies on: no traceback, a message and a hint with each error, no
file changed outside the directory that the command was given, none at all when the command was refused, and
that the command in the hint leads on.
"""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from helpers.command import opdcl
from helpers.interrupts import PLACES, killed, signalled

FLOW = """
name: small
model: {{id: {model}, dtype: float32}}
finetune: {{data: rows.jsonl, epochs: 1, batch_size: 4, save_steps: 1, lora: {{r: 2, alpha: 4}},
  replay: {{share: 0}}}}
recover: {{general: [prompts.jsonl], steps: 2, rollouts: 2, lmbda: 1, max_new_tokens: 4,
  validate_every: 1, validation_prompts: 2}}
eval: {{retention: [general], domain: [facts], limit: 2, max_new_tokens: 4,
  data: {{general: general.jsonl, facts: facts.jsonl}}}}
"""

ROWS = ["rows.jsonl", "rows.csv", "notes", "facts.jsonl"]
BAD_ROWS = [
    "missing.jsonl",
    "malformed.jsonl",
    "keys.jsonl",
    "empty.jsonl",
    "long.jsonl",
    "latin.jsonl",
    "model",
]
BAD_RUNS = ["missing", "model", "adapter", "rows.jsonl", "photos", "."]
RUNS = ["a", "b"]
WRITING = ("run", "finetune", "recover", "eval", "report")
# Exit codes that promise that nothing was written: usage, and a machine that lacks something.
REFUSED = (2, 4)
CLEAN = (0, 1, 2, 3, 4, 130)


def make_world(folder: Path, model: Path) -> Path:
    """Write the files of a walk: good and bad rows, folders that are no runs, and two runs."""
    folder.mkdir(parents=True)
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(8)]
    files = {
        "rows.jsonl": _lines(rows),
        "facts.jsonl": _lines(rows[:3]),
        "general.jsonl": _lines(
            {"question": f"What comes after {i}?", "answer": f"{i + 1}"} for i in range(3)
        ),
        "prompts.jsonl": _lines({"prompt": f"Write a line about the number {i}."} for i in range(6)),
        "rows.csv": "question,answer\nWho?,Me\nWhere?,There\nWhen?,Now\nWhy?,Because\n",
        "notes/one.md": "The door of room 7 is red.\n",
        "notes/two.md": "The key hangs in room 9.\n",
        "malformed.jsonl": '{"question": "q", "answer": "a"}\n{"question": "q", "ans\n',
        "keys.jsonl": _lines([{"sentence": "It rains.", "label": 1}]),
        "empty.jsonl": "",
        "long.jsonl": _lines([*rows, {"question": "why " * 900, "answer": "So."}]),
        "small.yaml": FLOW.format(model=model),
        "typo.yaml": FLOW.format(model=model).replace("steps: 2", "stepz: 2"),
        "gone.yaml": FLOW.format(model=model).replace("prompts.jsonl", "gone.jsonl"),
        "model/config.json": '{"model_type": "llama"}',
        "model/README.md": "My card.\n",
        "photos/cat.jpg": "meow",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.jsonl").write_bytes('{"question": "Où?", "answer": "Là"}\n'.encode("latin-1"))
    for command in (["run", "small.yaml", "-o", "b", "-q"], _finetune(model, "a"), _export("b", "adapter")):
        done = opdcl(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def _lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _finetune(model: Path, out: str, data: str = "rows.jsonl") -> list[str]:
    small = ("model.dtype=float32", "finetune.lora.r=2", "finetune.batch_size=4", "finetune.save_steps=1")
    sets = [word for setting in small for word in ("--set", setting)]
    return ["finetune", data, "--base", str(model), "-o", out, "--epochs", "0.5", *sets]


def _recover(run: str) -> list[str]:
    small = ("rollouts=2", "max_new_tokens=4", "validation_prompts=2", "lmbda=1", "validate_every=1")
    sets = [word for setting in small for word in ("--set", f"recover.{setting}")]
    return ["recover", run, "--prompts", "prompts.jsonl", "--steps", "1", *sets]


def _eval(run: str) -> list[str]:
    files = ["--retention", "general", "--data", "general=general.jsonl", "--domain", "facts.jsonl"]
    return ["eval", run, *files, "--limit", "2", "--set", "eval.max_new_tokens=4"]


def _export(run: str, out: str) -> list[str]:
    return ["export", run, "-o", out, "--format", "adapter"]


class Walk:
    """One sequence of commands in a copy of the world. `story` is what happened, for a failing test."""

    def __init__(self, seed: int, world: Path, model: Path, folder: Path):
        self.random = random.Random(seed)
        self.folder, self.model = folder, model
        self.story: list[str] = [f"seed {seed}"]
        self.damaged: set[str] = set()
        shutil.copytree(world, folder)
        for run in RUNS:
            if self.random.random() < 0.2:
                shutil.rmtree(folder / run)

    def go(self) -> None:
        """Walk some steps, then check that the runs have a way on."""
        for _ in range(self.random.randint(2, 4)):
            damaged = self._damage() if self.random.random() < 0.25 else ""
            if self.random.random() < 0.3:
                self._interrupted(self._work())
            else:
                self._checked(self._command(damaged))
        for run in (*RUNS, "c", "d"):
            self._has_a_way_on(run)

    # What is done.

    def _command(self, damaged: str) -> list[str]:
        pick = self.random.choice
        run = damaged or pick([*RUNS * 5, *BAD_RUNS])
        new = pick(["c", "d", run])
        data = pick([*ROWS * 2, *BAD_ROWS])
        flow = pick([["small.yaml"]] * 4 + [["typo.yaml"], ["gone.yaml"], ["missing.yaml"], ["quickstrt"]])
        commands = [
            ["run", *flow, "-o", new],
            ["run", *flow, "-o", new, "--dry-run"],
            _finetune(self.model, new, data),
            [*_finetune(self.model, new, data), "--dry-run"],
            _recover(run),
            [*_recover(run), "--domain", data],
            [*_recover(run), "--dry-run"],
            _eval(run),
            [*_eval(run), "--domain", pick([*BAD_ROWS, "rows.csv"])],
            ["eval", run, "--retention", pick(["instructons", "arc_easy", "general"]), "--limit", "1"],
            ["eval", run, "--retention", "ifeval", "--data", f"ifeval={data}", "--limit", "1"],
            ["report", run],
            ["report", run, "--json"],
            ["verify", run],
            ["compare", run, pick([*RUNS, *BAD_RUNS])],
            ["compare", "a", run, "-o", pick(["comparison", *BAD_RUNS])],
            ["chat", run, "Which door?", "--max-new-tokens", "2"],
            [*_export(run, pick(["exported", *BAD_RUNS]))],
            ["export", run, "-o", "merged"],
            ["export", run, "-o", "exported", "--state", pick(["tuned", "recovered", "best"])],
            ["serve", run, "--dry-run"],
            ["config", "show", *flow],
            ["config", "validate", *flow],
            ["workflows", "cp", "quickstart", pick(["mine.yaml", "small.yaml", "nowhere/mine.yaml"])],
        ]
        words = pick([*commands, *(words for words in commands if self._trains(words))])
        if self._trains(words) and self.random.random() < 0.3:
            words = [*words, *pick(OPTIONS)]
        return words

    def _work(self) -> list[str]:
        """Return a command that has something to do, if its run is there."""
        new, old = self.random.choice(["c", "d"]), self.random.choice(RUNS)
        works = [["run", "small.yaml", "-o", new], _finetune(self.model, new), _recover(old), _eval(old)]
        works += [[*_recover("b"), "--force"], [*_eval("b"), "--force"], _export(old, "exported")]
        return self.random.choice(works)

    def _trains(self, words: list[str]) -> bool:
        return words[0] in ("run", "finetune", "recover", "eval") and "--dry-run" not in words

    def _damage(self) -> str:
        """Change or delete one file of a run, as a disk or a user may; return the run."""
        run = self.random.choice(RUNS)
        files = sorted(p for p in (self.folder / run).rglob("*") if p.is_file() and "logs" not in p.parts)
        if self.random.random() < 0.7:  # most files belong to checkpoints, which few commands read
            files = [p for p in files if "trainer" not in p.parts]
        if not files:
            return ""
        file = self.random.choice(files)
        kind = self.random.choice(["delete", "truncate", "flip", "garbage"])
        content = file.read_bytes()
        if kind == "delete":
            file.unlink()
        else:
            middle = len(content) // 2
            flipped = bytes(b ^ 255 for b in content[middle : middle + 64])
            file.write_bytes(
                {
                    "truncate": content[:middle],
                    "flip": content[:middle] + flipped + content[middle + 64 :],
                    "garbage": b"\x00garbage",
                }[kind]
            )
        self.damaged.add(run)
        self.story.append(f"{kind} {file.relative_to(self.folder)}")
        return run

    def _interrupted(self, words: list[str]) -> None:
        """Stop a command somewhere by one Ctrl-C, by two, or by a kill; then give the same command again."""
        place = self.random.choice(PLACES)
        # Early places as often as late ones: most commands are over soon.
        count = round(math.exp(self.random.uniform(0, math.log({"layer": 400, "rename": 20}[place]))))
        how = self.random.choice(["once", "twice", "kill"])
        if how == "kill":
            before = self._files()
            stopped = killed(
                lambda: opdcl(*words, cwd=self.folder), place, count, self.folder.with_suffix(".log")
            )
            self.story.append(f"{'killed' if stopped else 'not killed'} at {place} {count}:")
            self._only_given_directories_changed(words, before, 0, killed=True)
        else:
            counts = [count] if how == "once" else [count, count + self.random.randint(1, 40)]
            self.story.append(f"Ctrl-C at {place} {counts}:")
            with signalled(place, counts):
                stopped = self._checked(words, follow=False).returncode == 130
        code = self._checked(words).returncode if stopped else 0
        sound = self.damaged.isdisjoint(words)
        assert code == 0 or not sound, "what a command began, the same command finishes"

    # What is checked.

    def _checked(self, words: list[str], follow: bool = True, seen: tuple[str, ...] = ()):
        """Run a command and check what it printed and wrote; then follow the commands that it printed."""
        before = self._files()
        done = opdcl(*words, cwd=self.folder, env={"COLUMNS": "200"})
        self.story.append(f"exit {done.returncode}: opdcl {shlex.join(words)}\n{_indented(done.stderr)}")
        self._only_given_directories_changed(words, before, done.returncode)
        _is_clean(words, done)
        error = _line(done, "error: ")
        assert not error or error not in seen, f"the hint leads back to the same error: {error}"
        assert not (seen and re.search("No such (option|command)|unexpected extra argument", error)), error
        if follow and len(seen) < 3:
            for following in _following(words, done):
                following += ["--dry-run"] if self._trains_for_minutes(following) else []
                self._checked(following, True, (*seen, error or "success"))
        return done

    def _trains_for_minutes(self, words: list[str]) -> bool:
        """Whether a command runs a shipped workflow, or a copy of one, on the embedded model."""
        if words[0] != "run" or "--dry-run" in words or len(words) == 1:
            return False
        flow = self.folder / words[1]
        return not flow.is_file() or str(self.model) not in flow.read_text(encoding="utf-8")

    def _files(self) -> dict[str, tuple[int, int]]:
        entries = ((p, p.lstat()) for p in sorted(self.folder.rglob("*")) if not p.is_dir())
        return {str(p.relative_to(self.folder)): (s.st_mtime_ns, s.st_size) for p, s in entries}

    def _only_given_directories_changed(
        self, words: list[str], before: dict, code: int, killed: bool = False
    ) -> None:
        after = self._files()
        changed = sorted(n for n in before.keys() | after if before.get(n) != after.get(n))
        given = _written_by(words)
        if killed:  # it leaves a folder that would have got the given name, to be removed a day later
            changed = [n for n in changed if not any(n.startswith(f".{g}.opdcl-") for g in given)]
        outside = [name for name in changed if not any(name == g or name.startswith(f"{g}/") for g in given)]
        assert not outside, f"changed outside of {given}: {outside}"
        # A command that reads a damaged file late may have begun.
        kept = code in REFUSED and self.damaged.isdisjoint(given)
        started = [n for n in changed if kept and not n.endswith(".lock") and "/logs/" not in n]
        assert not started, f"refused, and yet changed: {started}"

    def _has_a_way_on(self, run: str) -> None:
        """Check that an undamaged run is whole, and that its report and its next stage can be made."""
        if not (self.folder / run / "config.json").exists() or run in self.damaged:
            return
        assert self._checked(["verify", run]).returncode == 0, "no file was damaged"
        report = self._checked(["report", run])
        # After two steps, a tiny model may well answer as base does.
        same = "fault: base and tuned give the same answer" in report.stderr
        assert report.returncode == same


OPTIONS = [
    ["--force"],
    ["--seed", "7"],
    ["--json"],
    ["-q"],
    ["--set", "recover.steps=0"],
    ["--set", "lora.r=8"],
    ["--set", "finetune.learning_rate=fast"],
    ["--set", 'finetune.lora.target_modules=["q_proj","nosuch"]'],
    ["--set", "eval.retention=general"],
    ["--nosuchoption"],
]


def _written_by(words: list[str]) -> list[str]:
    """Return the files and folders that a command may write."""
    if "--dry-run" in words:
        return []
    if words[:2] == ["workflows", "cp"]:
        return words[3:] or [f"{words[2]}.yaml"]
    if "-o" in words:
        return [words[words.index("-o") + 1]]
    if words[0] in ("run", "finetune"):
        return ["runs"]
    return [words[1]] if words[0] in WRITING and len(words) > 1 else []


def _is_clean(words: list[str], done: subprocess.CompletedProcess[str]) -> None:
    """Check exit code, message and hint, and that `--json` prints one document."""
    code, error = done.returncode, _line(done, "error: ")
    assert code in CLEAN, code
    assert "Traceback" not in done.stderr + done.stdout
    # A library's or Python's own words: `translate` prints the name of the exception.
    assert not re.match(r"[A-Za-z.]*(Error|Exception|Exit|Interrupt): ", error), error
    if code:
        assert error, "an error has a message"
        assert _line(done, "hint: ") or code == 130, "an error has a hint"
    elif "--json" in words:
        json.loads(done.stdout)


def _line(done: subprocess.CompletedProcess[str], start: str) -> str:
    found = (line for line in done.stderr.splitlines() if line.startswith(start))
    return next(found, "").removeprefix(start)


def _following(words: list[str], done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Return the commands that a message tells to give next; those with placeholders are skipped."""
    advice = _line(done, "hint: ") or _line(done, "next: ")
    commands = []
    for text in re.findall(r"\bopdcl [a-z][^;#|]*", advice):
        command = text.split("  ")[0].strip()
        if not re.search(r"\b[A-Z]{2,}\b|owner/name|…", command):
            commands.append(_small(shlex.split(command)[1:]))
    if not commands and (folder := re.search(r"\(-o ([^\s)]+)\)", advice)):
        commands.append(_with_out(words, folder[1]))
    if (
        re.search(r"--force\b", advice)
        and not commands[1:]
        and "--force" not in words
        and words[0] in WRITING
    ):
        commands.append([*words, "--force"])
    return commands


def _small(words: list[str]) -> list[str]:
    """Return a printed command with fewer steps or prompts than the defaults."""
    if words[0] == "eval" and "--limit" not in words:
        return [*words, "--limit", "1", "--set", "eval.max_new_tokens=4"]
    if words[0] == "recover" and "--steps" not in words:
        return [*_recover(words[1]), *words[2:]]
    return words


def _with_out(words: list[str], out: str) -> list[str]:
    if "-o" not in words:
        return [*words, "-o", out]
    at = words.index("-o") + 1
    return [*words[:at], out, *words[at + 1 :]]


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines()[-6:])
