"""`opdcl serve`: the command that it prints, and the program that it becomes."""

import json
import stat

import pytest
from helpers.command import opdcl, opdcl_process


@pytest.fixture(scope="module")
def folder(finished):
    folder = finished.parent
    program = folder / "vllm"
    program.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\necho "runtime=$VLLM_ALLOW_RUNTIME_LORA_UPDATING key=$VLLM_API_KEY"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_the_command_names_base_and_both_adapters(folder, tiny_model):
    words = "serve whole --vllm ./vllm --port 8123 --dry-run --json -- --max-model-len 512"
    done = opdcl(*words.split(), cwd=folder, code=0)
    result = json.loads(done.stdout)
    words = result["command"]
    assert words[1:3] == ["serve", str(tiny_model)]
    told = "--served-model-name base --host 127.0.0.1 --port 8123 --dtype float32 --max-lora-rank 8"
    for pair in f"{told} --max-loras 3".split(" --"):
        assert f" --{pair.removeprefix('--')} " in " ".join(words)
    names = words[words.index("--lora-modules") + 1 :][:2]
    assert [n.split("=")[0] for n in names] == ["tuned", "recovered"]
    assert names[1].endswith("whole/stages/02-recover/adapter")
    assert words[-2:] == ["--max-model-len", "512"]
    assert result["url"] == "http://127.0.0.1:8123/v1"


def test_the_process_becomes_the_server_and_passes_the_key_in_the_environment(folder):
    key = {"OPDCL_SERVER_KEY": "s3cret-word"}
    done = opdcl_process("serve", "whole", "--vllm", "./vllm", cwd=folder, env=key)
    assert done.returncode == 0, done.stderr
    *words, last = done.stdout.splitlines()
    assert words[0] == "serve"
    assert last == "runtime=True key=s3cret-word"
    assert "s3cret" not in "".join(words)


def test_without_vllm_the_error_says_how_to_install_it(folder):
    done = opdcl("serve", "whole", "--vllm", "no-such-program", cwd=folder, code=4)
    assert "there is no program 'no-such-program'" in done.stderr
    assert "pip install vllm" in done.stderr
    assert opdcl("serve", "nowhere", cwd=folder).returncode == 2
