"""The pages of the documentation: some are followed on a two-layer model, all have valid commands and files.

The pages are used unchanged. To make them quick, the cache holds a tiny model under the embedded one's name,
the reader's files are short, and further settings reduce the sizes.
"""

import functools
import gc
import json
import re
import shlex
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import command as runner
from typer.main import get_command

import opdcl
from opdcl import cli
from opdcl.data.rows import load_rows

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")), "workflows/README.md"]
OPDCL = get_command(cli.app)
BLOCK = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.M | re.S)
INLINE = re.compile(r"`(opdcl [^`]+)`")

# The pages that are followed, block by block, and how their readers came to what they have before: an adapter
# and a merged model of another program, and their base.
ELSEWHERE = [
    "opdcl finetune rows.jsonl -o runs/elsewhere",
    "cp -r runs/elsewhere/stages/01-finetune/adapter my-adapter",
]
# In place of a clone of llama.cpp.
CONVERTER = f"mkdir llama.cpp && cp {ROOT}/tests/helpers/gguf_script.py llama.cpp/convert_hf_to_gguf.py"
FOLLOWED = {
    "README.md": ELSEWHERE,
    "docs/tutorial.md": [],
    "docs/take-it-away.md": [*ELSEWHERE, CONVERTER],
    "docs/repair.md": [
        *ELSEWHERE,
        "cp -r my-adapter my-extract",
        "opdcl export runs/elsewhere -o my-tuned-model",
        'cp -r "$OPDCL_CACHE/models/smollm2-135m" its-base',
        "cp its-base/tokenizer* its-base/chat_template* my-adapter",
    ],
}
QUANTIZED = "needs bitsandbytes, which is optional; tests/unit/model/test_quantized.py"
# Commands that cannot run inside a test, by their first words, and why. Their options are still checked.
CANNOT = {
    "make": "installs an environment",
    "source": "activates it",
    "git clone": "fetches from the network",
    "hf": "needs the Hub; tests/e2e/test_hub.py has one of its own",
    "ollama": "needs Ollama",
    "mergekit-extract-lora": "needs mergekit; tests/unit/model/test_other_base.py has what it writes",
    "opdcl recover my-adapter --domain rows.jsonl -o runs/quantized": QUANTIZED,
    "opdcl export runs/quantized": QUANTIZED,
    "opdcl eval from-quantized": QUANTIZED,
}

# At a rate that changes answers within a step or two: a tuned model that answers as base does is a fault.
TRAIN = {"finetune.lora.r": 4, "finetune.lora.alpha": 8, "finetune.epochs": 2, "finetune.learning_rate": 0.03}
RECOVER = {
    "recover.steps": 2,
    "recover.rollouts": 4,
    "recover.max_new_tokens": 4,
    "recover.domain_max_new_tokens": 4,
    "recover.validation_prompts": 2,
    "recover.health": "false",
}
EVAL = {"eval.limit": 4, "eval.max_new_tokens": 4}
SMALL = {
    "finetune": TRAIN,
    "recover": RECOVER,
    "eval": EVAL,
    "run": TRAIN | RECOVER | EVAL | {"finetune.epochs": 0.02, "recover.domain_rollouts": 4},
}

FLAGS = {"--steps": 2, "--limit": 4, "--epochs": 1}


@pytest.fixture
def reader(tmp_path, tiny_cache, monkeypatch) -> Path:
    """A folder with the reader's own files: rows, prompts and documents."""
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(12)]
    for name in ("all-rows", "rows", "test-rows"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"Write a line about the number {i}."} for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for folder in ("faq", "documents"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "leave.md").write_text(
            "# Leave\n\n## Who approves leave?\n\nPerpetua does.\n\n"
            "## How long is it?\n\nSix days.\nNot more.\n"
        )
    for name, value in {"OPDCL_CACHE": tiny_cache, "HOME": tmp_path, "COLUMNS": 120}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    gc.freeze()  # each training collects garbage; skip what the session has loaded already
    return tmp_path


def run_here(words: list[str]) -> None:
    """Run one command in this process."""
    done = runner.opdcl(*words[1:])
    # A gate is not decided on a few prompts.
    allowed = (0, 3, 5) if {"--max-drop", "--gates"} & {*words} else (0,)
    assert done.returncode in allowed, f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr}"


def small(words: list[str]) -> list[str]:
    """Make a command's sizes small, whatever the page sets; a dry run checks the page's own."""
    flagged = [
        f"{min(float(word), FLAGS[flag]):g}" if flag in FLAGS else word
        for flag, word in pairwise(["", *words])
    ]
    sizes = {} if "--dry-run" in words else SMALL.get(words[1], {})
    return [*flagged, *(word for key, value in sizes.items() for word in ("--set", f"{key}={value}"))]


def unknown_words(words: list[str]) -> list[str]:
    """Return the options, and commands, that opdcl does not have."""
    command = OPDCL
    rest = words[1:]
    while rest and hasattr(command, "commands"):
        if not rest[0].startswith("-"):
            if rest[0] not in command.commands:
                return [rest[0]]
            command = command.commands[rest[0]]
        elif rest[0] not in known_options(command):
            return [rest[0]]
        rest = rest[1:]
    flags = [
        word.partition("=")[0]
        for word in (rest[: rest.index("--")] if "--" in rest else rest)
        if word.startswith("-")
    ]
    return [flag for flag in flags if flag not in known_options(command)]


def known_options(command) -> set[str]:
    return {"--help", *(name for parameter in command.params for name in parameter.opts)}


def run_line(line: str, folder: Path) -> None:
    """Run one line of a shell block."""
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(line, comments=True)]
    if not words or any(line.startswith(start) for start in CANNOT):
        return
    if words[0] == "opdcl":
        run_here(small(words))
    else:
        done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def small_verb(verb):
    """Return a verb of the Python API whose sizes are small, whatever the page sets."""
    sizes = SMALL["eval" if verb.__name__ == "evaluate" else verb.__name__]
    typed = {key: False if value == "false" else value for key, value in sizes.items()}

    @functools.wraps(verb)
    def smaller(*given, settings=None, **named):
        if isinstance(settings, list):  # from the command line, whose sizes are small already
            return verb(*given, settings=settings, **named)
        named |= {name: min(named[name], FLAGS[f"--{name}"]) for name in named if f"--{name}" in FLAGS}
        return verb(*given, settings=(settings or {}) | typed, **named)

    return smaller


# A change that breaks a command breaks it on the first page.
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page == "README.md" else pytest.mark.nightly) for page in FOLLOWED],
)
def test_every_block_of_a_page_works_in_reading_order(page, reader, monkeypatch):
    for verb in ("run", "finetune", "recover", "evaluate"):
        monkeypatch.setattr(opdcl, verb, small_verb(getattr(opdcl, verb)))
    for line in FOLLOWED[page]:
        run_line(line, reader)
    names: dict = {}
    for number, (_, language, title, body) in enumerate(BLOCK.findall((ROOT / page).read_text("utf-8"))):
        text = textwrap.dedent(body)
        file = reader / (title or f"block-{number}.{language}")
        if language in ("yaml", "json") and not file.exists():
            file.write_text(text)
        if language in ("", "sh", "console"):
            for line in text.splitlines():
                run_line(line.strip(), reader)
        elif language == "python":
            exec(compile(text, f"{page}, block {number}", "exec"), names)


@pytest.mark.nightly
def test_the_files_that_pages_show_are_accepted(reader):
    (reader / "least.yaml").write_text("finetune: {data: rows.jsonl}\n")
    (reader / "my-template.jinja").write_text("{{ messages }}")
    for page in PAGES:
        for _, language, _, body in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            text = textwrap.dedent(body)
            match language:
                case "yaml":
                    (reader / "shown.yaml").write_text(text)
                    run_here(["opdcl", "config", "validate", "least.yaml", "shown.yaml"])
                case "json":
                    # A page may break a row into several lines.
                    (reader / "shown.jsonl").write_text(re.sub(r"\n\s+", " ", text))
                    assert load_rows("shown.jsonl")
                case other:
                    known = ("", "sh", "console", "python", "text")
                    assert other in known, f"a block of {page} is neither tried nor marked as text"


@pytest.mark.nightly
def test_the_notebook_runs_from_top_to_bottom_and_again(reader, monkeypatch, capsys):
    for verb in ("run", "finetune", "recover", "evaluate"):
        monkeypatch.setattr(opdcl, verb, small_verb(getattr(opdcl, verb)))
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for _ in range(2):  # the second time, everything is there already
        names: dict = {}
        for number, cell in enumerate(cells):
            exec(compile(cell, f"quickstart.ipynb, cell {number}", "exec"), names)
    assert names["result"].report.is_file()
    assert (reader / "my-model" / "config.json").is_file()
    assert "recovered: " in capsys.readouterr().out


def text_of(pages) -> str:
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)


def block_lines(text: str) -> list[str]:
    """Return the lines of the shell blocks of pages."""
    shell = [body for _, language, _, body in BLOCK.findall(text) if language in ("", "sh", "console")]
    return [line.strip() for body in shell for line in body.splitlines()]


def test_commands_and_options_of_all_pages_exist():
    text = text_of(PAGES)
    commands = [shlex.split(line.removeprefix(".venv/bin/"), comments=True) for line in block_lines(text)]
    commands += [shlex.split(command) for command in {*INLINE.findall(text)}]
    commands = [words for words in commands if words[:1] == ["opdcl"] and words[1] != "COMMAND"]
    assert len(commands) > 120
    assert [(words, unknown) for words in commands if (unknown := unknown_words(words))] == []


def test_an_unknown_command_or_option_is_noticed():
    wrong = ["opdcl recovr runs/x", "opdcl recover x --stepz 3", "opdcl workflows list", "opdcl --verzion"]
    for line in (*wrong, "opdcl serve x --prot 1 -- --y"):
        assert unknown_words(shlex.split(line)), line


def test_every_exception_matches_a_command_on_a_page():
    lines = block_lines(text_of(FOLLOWED))
    assert [start for start in CANNOT if not any(line.startswith(start) for line in lines)] == []
