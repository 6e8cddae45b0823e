"""A changed or truncated adapter is not trusted, and the report names all commands and its own directory."""

import os
import shutil

from helpers.command import opdcl
from helpers.synthetic import alter

from opdcl.rundir.files import read_json

ADAPTER = "stages/02-recover/adapter/adapter_model.safetensors"
CONFIG = "stages/02-recover/adapter/adapter_config.json"


def change(path):
    """Flip bits in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(byte ^ 0xFF for byte in content[middle : middle + 400])
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def double_alpha(path):
    alter(path, lora_alpha=2 * read_json(path)["lora_alpha"])


EVERY_VERB = (
    ["export", "run", "-o", "model"],
    ["export", "run", "-o", "model", "--format", "adapter"],
    ["chat", "run", "Hello"],
    ["serve", "run", "--dry-run", "--vllm", "true"],
    ["run", "other.yaml", "-o", "other"],
)


def test_a_damaged_adapter_is_refused_by_every_verb_that_would_use_it(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (tmp_path / "other.yaml").write_text("start: run\neval: {retention: [instructions]}\n")
    for file, damage, verbs in (
        (ADAPTER, change, EVERY_VERB),
        (ADAPTER, truncate, EVERY_VERB[:1]),
        (ADAPTER, os.remove, EVERY_VERB[2:3]),
        (CONFIG, double_alpha, EVERY_VERB[3:4]),
        (CONFIG, os.remove, EVERY_VERB[4:]),
    ):
        damage(run / file)
        problem = "is missing" if damage is os.remove else "has changed"
        for words in verbs:
            refused = opdcl(*words, cwd=tmp_path)
            assert refused.returncode == 2, (words, refused.stderr)
            assert f"{file} {problem} since its stage recorded it" in refused.stderr
            assert "--force" in refused.stderr
        shutil.copy(finished / file, run / file)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "other").exists()


def test_the_repair_that_the_error_names_works(finished, project, tmp_path):
    shutil.copytree(finished, project / "hurt")
    change(project / "hurt" / ADAPTER)
    told = opdcl("export", "hurt", "-o", "never", cwd=project).stderr
    command = told.split("repeat the stage: opdcl ")[1].split()
    done = opdcl(*command, cwd=project, code=0)
    assert (project / "hurt" / ADAPTER).read_bytes() == (finished / ADAPTER).read_bytes()
    # The base weights, the fine-tune and its results are as they were.
    assert "finetune: skipped" in done.stderr
