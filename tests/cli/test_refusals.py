"""Wrong input: each command refuses it with a helpful message, and changes nothing."""

import pytest

# Command -> what the error must contain.
WRONG = {
    "run quickstart -o o --set recover.stepz=3": ("unknown key recover.stepz", "did you mean recover.steps?"),
    "finetune missing.jsonl -o out": ("missing.jsonl' does not exist",),
    "finetune handbook -o out --epochs 0": ("finetune.epochs", "greater than 0", "argument"),
    "finetune handbook -o out --epochs few": ("--epochs", "number"),
    "finetune --data rows.jsonl": ("No such option: --data", "finetune rows.jsonl", "without an option"),
    "finetune -o out": ("ROWS", "opdcl finetune rows.jsonl", "opdcl finetune --help"),
    "finetune x --lr 1e-4": ("No such option: --lr\n", "hint: opdcl finetune --help"),
    "finetune x --learning_rate 1e-4": ("did you mean --learning-rate?",),
    "finetune x --batch-size 4": ("did you mean --set finetune.batch_size=VALUE?",),
    "recover": ("SOURCE", "hint: opdcl recover runs/mine"),
    "evaluate x": ("No such command 'evaluate'.\n", "opdcl eval --help  # did you mean eval?"),
    "quickstart": ("No such command 'quickstart'.\n", "hint: opdcl run quickstart"),
    "config schemas": ("opdcl config schema --help",),
    "config schema recover.los": ("no setting 'recover.los'", "did you mean recover.loss?"),
    "config validate quickstart --set eval.retention=[instructons]": (
        "eval.retention names no suite 'instructons', --set",
        "did you mean instructions?",
    ),
    "config validate quickstart --set lora.r=8 --set recover.stepz=4 --set finetune.epochs=few": (
        "error: finetune.epochs: must be a number (got 'few', --set); Passes over the data (opdcl config",
        "error: unknown key recover.stepz (in --set); did you mean recover.steps?\n",
        "error: unknown key lora; did you mean finetune.lora.r?\n",
    ),
    "run qwen3-1.7b-24gb -o out": (
        "recipe qwen3-1.7b-24gb needs data of yours: finetune.data is data/domain.jsonl",
        "opdcl workflows cp qwen3-1.7b-24gb",
    ),
    "finetune handbook --base gpt2 -o out": ("'gpt2' is not in the local cache", "hf download gpt2\n"),
    "finetune handbook --base gpt2.gguf -o out": ("neither a folder nor a hub id",),
    "chat nowhere hi --temperature -1": ("--temperature",),
    "recover nowhere": ("nowhere does not exist", "opdcl finetune", "an adapter folder, or a Hub id"),
    "eval nowhere": ("nowhere does not exist",),
    "eval nowhere --data ifeval": ("is not SUITE=PATH",),
    "eval . --domain missing.jsonl": ("domain questions 'missing.jsonl' do not exist", "the name of a suite"),
    "report nowhere": ("nowhere is not a run directory",),
    "report . --json": ("is not a run directory",),
    "finetune cut.jsonl -o out": ("cut.jsonl:2: not valid JSON",),
    "finetune bare.jsonl -o out": ("bare.jsonl:2)",),
    "finetune named.csv -o out": ("named.csv:2: the row has only id, name",),
    "finetune table.xlsx -o out": ("cannot tell the format of .xlsx",),
    "run key.yaml -o out": ("unknown key recover.stepz, key.yaml:2",),
    "run gone.yaml -o out": ("gone.jsonl does not exist",),
    "finetune handbook -o photos": ("photos exists and is not a run directory",),
    "finetune handbook -o table.xlsx": ("table.xlsx is a file",),
    "nosuchcommand": ("nosuchcommand", "opdcl --help"),
    "run quickstart --nosuchflag": ("--nosuchflag", "opdcl run --help"),
}


# Files of the folder in which the command is typed.
FILES = {
    "cut.jsonl": '{"question": "q", "answer": "a"}\n{"question\n',
    "bare.jsonl": '{"question": "q", "answer": "a"}\n{"question": "q"}\n',
    "named.csv": "id,name\n1,x\n",
    "table.xlsx": "x",
    "key.yaml": "recover:\n  stepz: 3\n",
    "gone.yaml": "finetune: {data: handbook}\neval: {data: {ifeval: gone.jsonl}}\n",
    "photos/cat.jpg": "meow",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_refused_with_a_helpful_message(refused, tmp_path, command):
    (tmp_path / "photos").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    errors = refused(*command.split())
    for words in WRONG[command]:
        assert words in errors


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("ifeval", "no column 'prompt'"),
        ("gsm8k", "'question' is undefined"),
        ("arc_easy", "data.jsonl:1: 'question' is undefined"),
    ],
)
def test_local_data_that_do_not_fit_their_suite_are_refused_before_training(
    refused, tmp_path, suite, message, options
):
    (tmp_path / "data.jsonl").write_text('{"sentence": "It rains."}\n' * 9)
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n')
    finetune = "finetune: {data: rows.jsonl, replay: {share: 0}}"
    evaluation = f"eval: {{retention: [{suite}], data: {{{suite}: data.jsonl}}}}"
    (tmp_path / "flow.yaml").write_text(f"{finetune}\n{evaluation}\n")
    assert message in refused("run", "flow.yaml", "-o", "out", *options)


def test_an_escape_sequence_in_the_input_does_not_reach_the_terminal(refused):
    assert "\x1b" not in refused("run", "\x1b[31mred")
