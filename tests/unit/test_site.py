"""The documentation site: its statements about the code are true, and it builds without a warning."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.scripts import load_script

import opdcl
from opdcl.api import Options
from opdcl.config.reference import describe_fields
from opdcl.config.shipped import workflow_files
from opdcl.config.workflow import Workflow
from opdcl.pipeline.defaults import resolve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    return load_script(DOCS / "hooks.py")


def test_one_address_leads_to_the_project_and_a_release_has_a_real_one():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    address = urls["Repository"]
    assert all(url.startswith(address) for url in urls.values())
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    cloned = re.findall(r"git clone (\S+) opdcl\b", "".join(page.read_text() for page in pages))
    assert {*cloned} == {address}
    if ".dev" not in opdcl.__version__:
        assert "THIS-REPOSITORY" not in address, "name the public repository in pyproject.toml"


def test_the_reference_names_every_command_option_and_setting(hooks):
    page = hooks.commands()
    for words, command in hooks.every_command():
        part = page.partition(f"### {words}\n")[2].partition("\n### ")[0]
        assert command.help in part
        assert [p.name for p in command.params if not p.help] == []
        assert [
            name
            for p in command.params
            for name in ([p.metavar or p.name] if p.param_type_name == "argument" else p.opts)
            if name not in part
        ] == []
    assert {"opdcl run", "opdcl eval", "opdcl config schema", "opdcl workflows cp"} <= {
        words for words, _ in hooks.every_command()
    }
    assert [key for key, *_ in describe_fields() if f"| `{key}` |" not in hooks.settings()] == []


def test_the_python_page_names_every_function_and_argument():
    page = (DOCS / "take-it-away.md").read_text(encoding="utf-8")
    for name in set(opdcl.__all__) - {"__version__"}:
        row = re.search(rf"^\| `{name}` \|([^|]*)\|", page, re.M)[1]
        parameters = inspect.signature(getattr(opdcl, name)).parameters
        assert re.findall(r"`(\w+)`", row) == [p for p in parameters if p != "options"]
        assert ("and the four below" in row) == ("options" in parameters)
    assert [option for option in Options.__annotations__ if f"- `{option}" not in page] == []


def test_the_page_of_automatic_settings_has_the_numbers_of_the_code():
    page = (DOCS / "choosing-settings.md").read_text(encoding="utf-8").partition("## By model")[2]
    workflow = Workflow.model_validate({"finetune": {"data": "handbook"}, "recover": {}, "eval": {}})
    rows = re.findall(r"^\| (\d+) \|[^|]*\| ([\de.-]+) \| ([\de.-]+) \| (\d+) \|$", page, re.M)
    assert [int(hidden) for hidden, *_ in rows] == [576, 2048, 4096]
    for hidden, *numbers in rows:
        chosen, _ = resolve(workflow, int(hidden), 2.0, "cpu")
        assert [float(number) for number in numbers] == [
            chosen.finetune.learning_rate,
            chosen.recover.learning_rate,
            chosen.recover.rollouts,
        ]
    on_cpu, on_cuda = (resolve(workflow, 576, 2.0, device)[0] for device in ("cpu", "cuda"))
    assert f"is {on_cpu.finetune.batch_size} for every model" in page
    assert (
        f"{on_cpu.recover.micro_batch_tokens} on a CPU and {on_cuda.recover.micro_batch_tokens} on CUDA"
        in page
    )
    assert f"`eval.batch_size`** {on_cpu.eval.batch_size} and {on_cuda.eval.batch_size}." in page


def test_a_table_names_the_column_of_each_cell_and_a_wide_one_gets_a_wide_page(hooks):
    def table(columns):
        names = [f"<em>c{i}</em>" for i in range(columns)]
        head = "".join(f"<th>{name}</th>" for name in names)
        row = "".join(f'<td style="x">{name}</td>' for name in names)
        return f"<p>a</p><table><thead><tr>{head}</tr></thead><tbody><tr>{row}</tr></tbody></table>"

    page = SimpleNamespace(meta={})
    narrow = hooks.on_page_content(table(2), page)
    assert '<td data-label="c0" style="x"><em>c0</em></td><td data-label="c1"' in narrow
    assert page.meta == {}
    hooks.on_page_content(table(9) + narrow, page)
    assert page.meta == {"hide": ["toc"]}


def test_each_recipe_is_printed_and_linked(hooks):
    page = hooks.recipes()
    for name, file in workflow_files().items():
        assert file.read_text(encoding="utf-8").rstrip() in page
        assert f"](#{hooks.anchor(name)})" in page


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "workflows/README.md")]
WRITTEN += sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_the_scripts_options_and_targets_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for file, words in re.findall(r"(benchmarks/[\w./]*\w)([^`\n]*)", text):
        assert (ROOT / file).exists(), file
        if file.endswith(".py"):
            known = (ROOT / file).read_text(encoding="utf-8")
            options = re.findall(r"(?<!\S)--[a-z][\w-]*", re.split("  |['\"]", words)[0])
            assert [option for option in options if f'"{option}"' not in known] == [], file
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    named = re.findall(r"`make ([a-z-]+)|^ *make ([a-z-]+)(?=$|  | [A-Z]+=)", text, re.M)
    assert [name for pair in named for name in pair if name and name not in targets] == []


def test_the_readme_can_be_read_in_five_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    for heading in ("Install", "You have rows", "You have an adapter that got worse", "Results"):
        assert f"## {heading}\n" in text


def test_nothing_is_loaded_from_other_sites():
    pictures = (DOCS / "images").glob("*.svg")
    for file in (ROOT / "README.md", ROOT / "mkdocs.yml", *DOCS.glob("*.md"), *DOCS.glob("*.css"), *pictures):
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:src|href)=\"https?://|url\(https?:|@import|!\[[^]]*\]\(https?:", text) == [], (
            file.name
        )


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(hooks, tmp_path):
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs: ")[2]
    words = [sys.executable, *re.search(r"/python (-m mkdocs .*)", recipe)[1].split(), "-d", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {page.stem: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")}
    assert all(words in pages["reference"] for words in ("recover.general_per_domain", "--learning-rate"))
    # Addresses of earlier pages lead to a place that there is.
    moved = {name: target.partition(".html#") for name, target in hooks.MOVED.items()}
    assert [name for name, (page, _, place) in moved.items() if f'id="{place}"' not in pages[page]] == []
    assert [name for name in moved if f"url={hooks.MOVED[name]}" not in pages[name]] == []
    elsewhere = r"<(?:link|script|img)[^>]+(?:href|src)=\"?https?://"
    assert [name for name, page in pages.items() if re.search(elsewhere, page)] == []
    assert not any("<!-- opdcl:" in page for page in pages.values())
    assert not re.search(r'(?:href|src)="/', pages["404"])
    # The switch: by the system, light, dark.
    assert len(re.findall(r'data-md-color-media="[^"]*"[^>]*id="__palette_', pages["index"])) == 3
