"""What a run has stored opens no file of the user's and names no server: the command says it anew."""

import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.command import opdcl
from ruamel.yaml import YAML

from opdcl.config.load import load
from opdcl.errors import UsageError
from opdcl.model.consent import base_of_run, is_stored_file, without_consent
from opdcl.rundir.layout import RunDir

PRIVATE = "a private line {{ x }}"


@pytest.fixture
def folder(tiny_folder, monkeypatch):
    (tiny_folder / "private.txt").write_text(PRIVATE)
    monkeypatch.setenv("OPDCL_SERVER_KEY", "s3cret-key")
    return tiny_folder


@pytest.fixture
def server():
    """A server that records what it is asked, with the key, if any."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.url = [], f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def received(folder, **settings):
    """Write somebody else's run, which claims that the user typed its settings; return its folder."""
    flow, _ = load(["tiny.yaml"], ["eval.closeness=null", "eval.retention=[]"])
    tree = flow.model_dump(exclude_none=True)
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tree[section][name] = value
    claimed = ("eval.server.url", "recover.server.url", "model.chat_template", "eval.system")
    run = folder / "theirs"
    run.mkdir(exist_ok=True)
    content = {"workflow": tree, "origins": dict.fromkeys(claimed, "--set")}
    (run / "config.json").write_text(json.dumps(content))
    with open(run / "workflow.yaml", "w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(tree, file)
    return run


COMMANDS = {
    "eval": ("eval", "theirs"),
    "dry": ("eval", "theirs", "--dry-run"),
    "recover": ("recover", "theirs", "--dry-run"),
    "run": ("run", "theirs/workflow.yaml", "-o", "theirs", "--dry-run"),
    "elsewhere": ("run", "theirs/workflow.yaml", "-o", "mine", "--dry-run"),
    "forced": ("run", "theirs/workflow.yaml", "-o", "theirs", "--force"),
}


@pytest.mark.parametrize("stage", ["eval", "recover"])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_server_that_a_run_names_is_asked_for_anew(folder, server, words, stage):
    received(folder, **{f"{stage}__server": {"url": server.url}})
    if words[0] == "eval" and stage == "recover":
        words = ("recover", *words[1:])  # an evaluation trains nothing
    done = opdcl(*words, cwd=folder, code=2)
    assert server.seen == []
    assert f"a run directory cannot make this command use the server {server.url}" in done.stderr
    assert f"--set {stage}.server.url={server.url}" in done.stderr


def test_the_hint_can_be_copied_into_a_shell(folder):
    url = "http://evil.example/$(touch${IFS}hurt);'x"
    received(folder, eval__server={"url": url})
    said = opdcl(*COMMANDS["dry"], cwd=folder).stderr
    words = shlex.split(" ".join(said.split("name it yourself: ")[1].split()))
    assert words == ["--set", f"eval.server.url={url}"]


@pytest.mark.parametrize("given", ["eval.server.url={url}", "eval.server={{url: '{url}'}}"])
def test_a_server_that_the_command_names_is_asked_without_a_key_in_a_dry_run(folder, server, given):
    received(folder, eval__server={"url": "http://attacker.example"})
    words = ("--dry-run", "--set", given.format(url=server.url))
    assert opdcl(*COMMANDS["elsewhere"], *words, cwd=folder).returncode == 0
    assert server.seen == [("/v1/models", None)]


def test_a_run_that_has_lost_its_settings_is_still_none_of_the_users_own(folder, server):
    run = received(folder, eval__server={"url": server.url})
    (run / "config.json").unlink()
    (run / "seal.json").write_text("{}")
    (run / "inner").mkdir()
    (run / "inner/recipe.yaml").write_text((run / "workflow.yaml").read_text())
    (folder / "link.yaml").symlink_to(run / "inner/recipe.yaml")
    for file in (run / "workflow.yaml", run / "inner/recipe.yaml", folder / "link.yaml"):
        assert is_stored_file(file)
        done = opdcl("run", file, "-o", "mine", "--dry-run", cwd=folder)
        assert "a run directory cannot make this command use the server" in done.stderr
    assert server.seen == []
    assert not is_stored_file(folder / "tiny.yaml")


def test_a_teacher_outside_the_run_is_asked_for_anew_and_one_inside_is_not(folder):
    outside, inside = folder / "own.jsonl", folder / "theirs/data/more.jsonl"
    teachers = {
        "a": {"kind": "adapter", "adapter": str(folder)},
        "b": {"kind": "base", "prompts": str(outside)},
        "c": {"kind": "base", "prompts": str(inside)},
    }
    run = received(folder, recover__teachers=teachers, recover__general_teacher="b")
    inside.parent.mkdir()
    inside.write_text('{"prompt": "Who?"}\n')
    outside.write_text('{"prompt": "Who?"}\n')
    done = opdcl("run", run / "workflow.yaml", "-o", "theirs", "--dry-run", cwd=folder, code=2)
    teachers.pop("a")
    received(folder, recover__teachers=teachers, recover__general_teacher="b")
    done = opdcl("run", run / "workflow.yaml", "-o", "theirs", "--dry-run", cwd=folder)
    assert f"--set recover.teachers.b.prompts={outside.name}" in done.stderr
    assert "more.jsonl (" not in done.stderr
    named = ("--set", f"recover.teachers.b.prompts={outside}")
    done = opdcl("run", run / "workflow.yaml", "-o", "theirs", "--dry-run", *named, cwd=folder)
    assert "cannot make this command use" not in done.stderr


@pytest.mark.parametrize("stage", ["eval", pytest.param("recover", marks=pytest.mark.nightly)])
def test_a_stored_system_prompt_that_begins_with_at_is_a_text(folder, stage):
    text = f"@{folder / 'private.txt'}"
    run = received(folder, **{f"{stage}__system": text})
    for words in (COMMANDS["eval"], COMMANDS["run"]):
        done = opdcl(*words, "--set", "eval.limit=1", cwd=folder)
        assert PRIVATE not in done.stderr + done.stdout
    flow, _ = load([str(run / "workflow.yaml")], is_stored=is_stored_file)
    assert getattr(flow, stage).system == text
    written = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert not any(PRIVATE.encode() in content for content in written)
    # The same words of the user's open the file, in a command and in a workflow file of their own.
    (folder / "mine.yaml").write_text((run / "workflow.yaml").read_text())
    assert getattr(load(["mine.yaml"])[0], stage).system == PRIVATE
    assert getattr(load(["tiny.yaml"], [f"{stage}.system='{text}'"])[0], stage).system == PRIVATE
    assert getattr(load(["tiny.yaml"], [f"{stage}={{system: '{text}'}}"])[0], stage).system == PRIVATE


def test_an_arm_may_name_the_file_of_a_system_prompt(folder):
    arms = "arms: {v1.5: {recover: {system: '@private.txt'}, model: {chat_template: private.txt}}}\n"
    (folder / "arms.yaml").write_text(arms)
    arm = load(["tiny.yaml", "arms.yaml"])[0].arms["v1.5"]
    assert arm == {"recover": {"system": PRIVATE}, "model": {"chat_template": PRIVATE}}


@pytest.mark.parametrize(
    "words", [*COMMANDS.values(), ("chat", "theirs", "hi"), ("export", "theirs", "-o", "x")]
)
def test_a_stored_template_is_its_text_and_no_file(folder, words):
    received(folder, model__chat_template=str(folder / "private.txt"))
    done = opdcl(*words, cwd=folder, code=2)
    assert "chat_template: is neither a Jinja template nor a file that can be read" in done.stderr
    assert PRIVATE not in done.stderr


def test_a_run_of_one_model_stores_no_arms(folder, server):
    run = received(folder)
    content = json.loads((run / "config.json").read_text())
    for arms in ({"arms": {"a": {"eval": {"server": {"url": server.url}}}}}, {"seeds": [1]}):
        saved = {**content, "workflow": content["workflow"] | arms}
        with pytest.raises(UsageError, match="its settings describe several"):
            without_consent(saved, run)
        with open(run / "workflow.yaml", "w", encoding="utf-8") as file:
            YAML(typ="safe", pure=True).dump(saved["workflow"], file)
        done = opdcl(*COMMANDS["elsewhere"], cwd=folder)
        assert (done.returncode, server.seen) == (2, [])
        assert "its settings describe several" in done.stderr


@pytest.mark.parametrize("model", [None, "text", {}, {"id": 5}, {"id": "a", "chat_template": "/etc/passwd"}])
def test_a_run_whose_model_is_none_is_damaged(folder, model):
    run = RunDir(received(folder))
    content = json.loads(run.config.read_text())
    content["workflow"]["model"] = model
    run.config.write_text(json.dumps(content))
    if model == {}:
        assert base_of_run(run, False).id
        return
    with pytest.raises(UsageError, match="is damaged"):
        base_of_run(run, False)


@pytest.mark.parametrize(
    ("words", "is_tracked"),
    [
        (("recover", "theirs"), False),
        (("run", "theirs/workflow.yaml", "-o", "theirs"), False),
        (("recover", "theirs", "--set", "track=[tensorboard]"), True),
    ],
)
def test_a_tracker_that_only_a_run_has_named_is_not_used(folder, words, is_tracked):
    run = received(folder)
    stored = json.loads((run / "config.json").read_text())
    stored["workflow"] |= {"track": ["tensorboard"], "eval": None}
    stored["origins"]["track"] = "--set"
    (run / "config.json").write_text(json.dumps(stored))
    (run / "workflow.yaml").write_text(json.dumps(stored["workflow"]))
    done = opdcl(*words, "--set", "recover.steps=1", "--set", "finetune.epochs=0.3", cwd=folder, code=0)
    assert (run / "tracking").exists() == is_tracked
    assert ("not tracked: " in done.stderr) != is_tracked
    assert is_tracked or "--set track=[tensorboard] does" in done.stderr
