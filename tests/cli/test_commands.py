"""The commands that need no trained model: help, recipes, settings, dry runs and the check of the machine."""

import json
import re
import shlex
import shutil

import pytest
from helpers import command as runner
from helpers.command import ROOT
from typer.main import get_command

from opdcl.cli import app
from opdcl.cli.options import EXAMPLES
from opdcl.config.shipped import shipped_suites


def test_help_names_every_command(opdcl):
    text = opdcl("--help")
    for name, command in get_command(app).commands.items():
        assert (f" {name} " in text) != command.hidden


def test_recipes_and_settings_are_completed():
    commands = get_command(app).commands
    workflow, settings = (
        next(p for p in commands["run"].params if p.name == name) for name in ("workflow", "settings")
    )
    context = commands["run"].make_context("run", ["quickstart"], resilient_parsing=True)
    assert [item.value for item in workflow.shell_complete(context, "quick")] == ["quickstart"]
    assert "recover.steps=" in [item.value for item in settings.shell_complete(context, "recover.st")]


def test_the_shipped_suites_are_listed_with_what_they_measure(opdcl):
    listed = {row["name"]: row for row in json.loads(opdcl("suites", "ls", "--json"))}
    assert listed.keys() == shipped_suites().keys()
    assert listed["instructions"]["role"] == "retention"
    prompts = (ROOT / "evals" / "instructions" / "test.jsonl").read_text().count("\n")
    assert listed["instructions"]["prompts"] == prompts
    assert {row["role"] for row in listed.values()} == {"retention", "domain", "control", "reward"}
    assert all(row["measures"] for row in listed.values())


def test_opdcl_alone_shows_where_to_begin(opdcl):
    assert "Begin with: opdcl run quickstart" in opdcl()
    assert opdcl() == opdcl("help") == opdcl("--help")
    assert opdcl("help", "recover") == opdcl("recover", "--help") == opdcl("recover", "-h")
    assert opdcl("help", "config", "show") == opdcl("config", "show", "--help")
    assert " validate " in opdcl("config")


@pytest.mark.parametrize("columns", ["60", "160"])
def test_no_summary_is_cut(tmp_path, columns):
    for words in ((), ("config",), ("workflows",), ("suites",)):
        shown = runner.opdcl(*words, cwd=tmp_path, env={"COLUMNS": columns}).stdout
        assert "..." not in shown.replace("[ARGS]...", "")
        assert words != ("config",) or "and where each value comes from." in " ".join(shown.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_each_command_has_an_example_that_parses_and_no_type_of_python(opdcl, name):
    shown = opdcl(*name.split(), "--help")
    assert EXAMPLES[name] in shown
    assert not re.search(r"<(str|int|float|path|list|Path)\b|\[\[", shown)
    words = shlex.split(EXAMPLES[name])
    command = get_command(app)
    for word in name.split():
        command = command.commands[word]
    assert command.make_context(name, words[1 + len(name.split()) :]).params


def test_every_command_has_an_example():
    commands = get_command(app).commands
    names = {n for n, c in commands.items() if not hasattr(c, "commands") and not c.hidden}
    names |= {f"{n} {inner}" for n, c in commands.items() for inner in getattr(c, "commands", ())}
    assert names == {*EXAMPLES}


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("workflows ls", "opdcl run quickstart --dry-run"),
        ("workflows show own-data", "opdcl workflows cp own-data mine.yaml"),
        ("workflows cp own-data mine.yaml", "opdcl run mine.yaml --dry-run"),
        ("config validate quickstart", "opdcl run quickstart --dry-run"),
        ("config schema recover.loss", "opdcl run quickstart --set recover.loss.kind=VALUE --dry-run"),
        ("doctor", "opdcl run quickstart"),
        ("finetune rows.jsonl -o out --dry-run", "opdcl finetune rows.jsonl -o out"),
    ],
)
def test_each_command_ends_with_the_next_one(tmp_path, words, command):
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n')
    done = runner.opdcl(*words.split(), cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == f"next: {command}"
    assert "next:" not in done.stdout
    if "cp" not in words and "show" not in words:
        assert runner.opdcl(*words.split(), "--json", cwd=tmp_path).stderr == ""


def test_version_is_one_line(opdcl):
    from opdcl import __version__

    assert opdcl("--version") == f"{__version__}\n"


def test_workflows_are_listed_as_text_and_as_json(opdcl):
    assert "quickstart" in opdcl("workflows", "ls")
    listed = json.loads(opdcl("workflows", "ls", "--json"))
    assert "quickstart" in [w["name"] for w in listed]
    assert all(w["description"] for w in listed)


def test_a_workflow_is_shown_and_copied_as_it_is_shipped_and_never_overwrites(opdcl, refused, tmp_path):
    shipped = (ROOT / "workflows" / "quickstart.yaml").read_text()
    assert opdcl("workflows", "show", "quickstart").strip() == shipped.strip()
    opdcl("workflows", "cp", "quickstart")
    opdcl("workflows", "cp", "quickstart", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == (tmp_path / "quickstart.yaml").read_text() == shipped
    assert "valid" in opdcl("config", "validate", "mine.yaml")
    assert "mine.yaml exists" in refused("workflows", "cp", "quickstart", "mine.yaml")


def test_config_show_names_the_origin_of_each_value(opdcl):
    args = ("config", "show", "quickstart", "--set", "recover.steps=7")

    def rows(*options: str) -> dict[str, list[str]]:
        lines = [line.strip() for line in opdcl(*args, *options).splitlines() if line.strip()]
        return {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}

    own, every = rows(), rows("--all")
    assert own["recover.steps"] == ["7", "--set"]
    assert own["finetune.data"][0] == "handbook/quick"
    assert re.fullmatch(r"quickstart\.yaml:\d+", own["finetune.data"][1])
    assert "recover.on_policy.reverse" not in own
    assert every["recover.on_policy.reverse"] == ["0.0", "default"]
    assert own.items() <= every.items()
    result = json.loads(opdcl(*args, "--json"))
    assert result["workflow"]["recover"]["steps"] == 7
    assert result["origins"]["recover.steps"] == "--set"


def test_config_validate_answers_as_text_and_as_json(opdcl):
    assert opdcl("config", "validate", "quickstart") == "quickstart: valid\n"
    answer = json.loads(opdcl("config", "validate", "quickstart", "--json"))
    assert answer == {"name": "quickstart", "valid": True}


def test_config_schema_is_a_table_or_a_json_schema(opdcl):
    listed = opdcl("config", "schema")
    assert "recover.general_per_domain: " in listed
    for line in (
        "finetune.learning_rate: auto  (number | auto)",
        "model.revision: null  (text | null)",
        "model.shard: false  (true | false)",
        "finetune.data: required  (text)",
        "finetune.lora.target_modules: all-linear  (text | list of text)",
        "seeds: []  (list of integer)",
    ):
        assert f"{line}\n" in listed
    schema = json.loads(opdcl("config", "schema", "--json"))
    assert schema["additionalProperties"] is False
    assert "recover" in schema["properties"]


def test_config_schema_may_be_asked_for_one_section_or_key(opdcl):
    keys = [field["key"] for field in json.loads(opdcl("config", "schema", "recover.loss", "--json"))]
    assert keys == ["recover.loss.kind", "recover.loss.beta", "recover.loss.k"]
    assert opdcl("config", "schema", "recover.loss.kind").startswith(
        "recover.loss.kind: forward_kl  (reverse_kl | forward_kl | jsd | top_k | policy_gradient | "
        "cross_entropy)\n"
    )
    assert "finetune.lora.r: 32  (integer)" in opdcl("config", "schema", "r")


def test_a_dry_run_is_one_json_document_and_writes_nothing(opdcl, tmp_path):
    plan = json.loads(opdcl("finetune", "handbook", "-o", "out", "--dry-run", "--json"))
    assert [(task["stage"], task["action"]) for task in plan["tasks"]] == [("finetune", "run")]
    # 263 of 840 rows, five times, 16 to a step, and 614 of replayed ones.
    assert plan["steps"]["finetune"] == 877
    assert plan["memory_bytes"]["finetune"] > 135e6 * 2
    assert plan["disk_bytes"] > 0
    assert [*tmp_path.iterdir()] == []


def test_pairs_and_lists_reach_the_settings(opdcl, refused, tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n' * 2)
    tuned = shutil.copytree(tiny_model, tmp_path / "tuned")
    words = ("eval", tuned, "--base", tiny_model, "--limit", "2")
    words += ("--retention", "instructions,neighbours", "--domain", "mine")
    words += ("--data", "mine=rows.jsonl", "--max-drop", "neighbours=5", "--dry-run", "--json")
    planned = json.loads(opdcl(*words))["tasks"]
    suites = [task["suite"] for task in planned if task["state"] == "base"]
    assert suites == ["instructions", "neighbours", "mine", "closeness"]
    assert "gates.max_drop names other" in refused(*words, "--max-drop", "other=3")
    assert "is not a number" in refused(*words, "--max-drop", "few")


@pytest.mark.nightly
def test_a_dry_run_counts_the_longest_prompt(opdcl, tmp_path):
    sizes = []
    for words in (10, 4000):
        rows = [json.dumps({"question": f"{i} " + "word " * words}) for i in range(2)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
        own = runner.sets(f"recover.general={tmp_path}/prompts.jsonl")
        plan = opdcl("run", "quickstart", "-o", "out", *own, "--dry-run", "--json")
        sizes.append(json.loads(plan)["memory_bytes"]["recover"])
    assert sizes[1] > 1.2 * sizes[0]


def test_doctor_passes_on_this_machine(opdcl):
    checks = {check["name"]: check for check in json.loads(opdcl("doctor", "--json"))}
    assert {"python", "torch", "trl", "memory", "disk", "device"} <= {*checks}
    assert all(check["ok"] for check in checks.values() if check["needed"])


def test_doctor_exits_with_4_if_something_is_missing(tmp_path):
    # Even root cannot write to this folder.
    done = runner.opdcl("doctor", "--json", cwd=tmp_path, env={"OPDCL_CACHE": "/proc/self/opdcl"}, code=4)
    checks = json.loads(done.stdout)
    assert [check["name"] for check in checks if check["needed"] and not check["ok"]] == ["cache"]
    assert "error: this machine cannot run opdcl: cache\n" in done.stderr
