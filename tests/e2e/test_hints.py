"""A hint on a finished run is followed to the letter: nothing is trained again that had not changed."""

import json
import re
import shlex
import shutil

import pytest
from helpers.command import opdcl
from unit.data.test_own_tasks import PLAIN

# What is typed on a finished run and refused -> the stages that it would have made otherwise than they are.
REFUSED = {
    "eval run --domain task/flags.yaml": "",
    "eval run --domain other.jsonl": "",
    "eval run --domain rowz.jsonl": "",
    "eval run --domain sub/questions.jsonl": "",
    "eval run --retention instructons": "",
    "eval run --data rows.jsonl": "",
    "eval run --data questions=rowz.jsonl": "",
    "eval run -o elsewhere": "",
    "eval run --columns question": "",
    "eval run --max-drop much": "",
    "eval run --set model.dtype=bfloat16": "",
    "eval run --set eval.limits=3": "",
    "eval run --set eval.limit": "",
    "eval run --set recover.steps=9": "recover",
    "eval run --set finetune.seed=9": "finetune recover",
    "eval run --set eval.server.url=http://127.0.0.1:9/v1": "",
    "eval run/stages/01-finetune": "",
    "recover run --steps 9": "recover",
    "recover run --domain other.jsonl": "recover",
    "recover run --base missing-model": "finetune recover",
    "recover run --step 9": "recover",
    "finetune rows.jsonl -o run --epochs 9": "finetune recover",
    "finetune rows.jsonl -o rows.jsonl": "finetune",
    "run tiny.yaml -o run --set recover.steps=9": "recover",
    "run tinny.yaml -o run": "",
    "report run/stages": "",
    "report run/stages/01-finetune/adapter": "recover",  # in another run
    "report run --gates rows.jsonl": "finetune",  # in another run
    "compare run": "",
    "chat run Hello --temperature -1": "",
    "chat run/stages/01-finetune Hello": "",
    "export run -o taken": "",
    "export run -o model --state tunde": "",
}

# What stands for something of the user's in a hint.
STAND_FOR = {
    "question=NAME,answer=NAME": "question=Q,answer=A",
    "PROMPTS": "prompts.jsonl",
    "ROWS": "rows.jsonl",
    "NAME": "another",
    "SUITE": "another",
    "RUN": "run",
    "WORKFLOW": "tiny.yaml",
}
ONE = r"(?:(?:--set|--columns|--data|--domain|--max-drop|-o) \S*[^\s;,().?]|--trust-remote-code|--force)"
OPTIONS = re.compile(rf"(?<![\w-]){ONE}(?: {ONE})*")


@pytest.fixture
def folder(finished, project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")
    for name in ("rows.jsonl", "prompts.jsonl", "tiny.yaml"):
        shutil.copy(project / name, name)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for place in ("task", "sub", "taken"):
        (tmp_path / place).mkdir()
    (tmp_path / "task/flags.yaml").write_text(PLAIN)
    for name in ("task/rows.jsonl", "sub/questions.jsonl"):
        shutil.copy("rows.jsonl", name)
    others = [{"Q": row["question"], "A": row["answer"]} for row in rows]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    return tmp_path


def ways(words: list[str], message: str, hint: str) -> list[list[str]]:
    """Return the commands that a hint names for one that was refused."""
    for typed, meant in STAND_FOR.items():
        hint = re.sub(rf"(?<![\w-]){typed}(?![\w-])", meant, hint)
    hint = hint.partition("  # ")[0]
    found, same = [], words[2:]
    if words[0] == "run":  # whose run is an option
        same = words[4:]
    for text in re.findall(r"opdcl ([a-z]+ [^;,()]*)", hint):
        found.append(shlex.split(text) + (same if "same options" in hint else []))
    for text in OPTIONS.findall(re.sub(r"opdcl [a-z]+ [^;,()]*", "", hint)):
        options, kept = shlex.split(text), [*words]
        if options[0] in kept[1:] and options[0] != "--set":  # it takes the place of the one that was typed
            place = kept.index(options[0])
            del kept[place : place + 2]
        found.append([*kept, *options])
    if meant := re.search(r"did you mean (\S+)\?", hint):
        wrong = re.search(r"'([^']+)'|unknown key (\S+)|No such option: (\S+)", message)
        typed = next(filter(None, wrong.groups()))
        found.append([word.replace(typed, meant[1]) for word in words])
    if "leave out -o" in hint:
        place = words.index("-o")
        found.append(words[:place] + words[place + 2 :])
    return found


def try_out(words: list[str]):
    has_dry_run = words[0] in ("run", "finetune", "recover", "eval")
    return opdcl(*words, *(["--dry-run", "--json"] if has_dry_run else []))


def trained_again(words: list[str], done) -> set[str]:
    """Return the stages that a command would train."""
    if words[0] not in ("run", "finetune", "recover", "eval") or "--help" in words:
        return set()
    again = ("run", "resume", "stale")
    return {t["stage"] for t in json.loads(done.stdout)["tasks"] if t["action"] in again} - {"eval"}


def test_no_hint_on_a_finished_run_trains_again_what_had_not_changed(folder):
    before = {file: file.stat().st_mtime_ns for file in folder.glob("run/stages/*/stage.json")}
    answers = {}  # to each command; none changes what another one finds
    for command, allowed in REFUSED.items():
        waiting, followed, hints = [shlex.split(command)], [], 0
        while waiting:
            words = waiting.pop(0)
            if words in followed or len(followed) > 12:
                continue
            followed.append(words)
            if (*words,) not in answers:
                answers[*words] = try_out(words)
            done = answers[*words]
            if done.returncode == 0:
                trained = trained_again(words, done)
                assert trained <= {*allowed.split()}, (command, words, trained)
                continue
            error, hint = done.stderr.rpartition("hint: ")[::2]
            assert hint, (command, words, done.stderr)
            assert words == followed[0] or error.startswith("error: "), (command, words, done.stderr)
            hints += 1
            waiting += ways(words, error, hint)
        assert hints, command
    assert {file: file.stat().st_mtime_ns for file in before} == before
