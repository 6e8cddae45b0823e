"""A two-layer model with the real tokenizer, made once per session; the longest tests run first."""

import copy
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

os.environ.setdefault("TERM", "dumb")
# In-process commands must compute exactly what commands in processes compute, so all use one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("FORCE_COLOR", None)
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from helpers.cache import private_cache
from helpers.tiny import make_model, make_project, tune_whole

# With two workers the end must not wait for one long test. Files that share a fixture stand together.
LONGEST_FIRST = (
    "e2e/test_processes.py",
    "e2e/test_recipes.py",
    "e2e/test_docs.py",
    "e2e/test_hub.py",
    "e2e/test_workflow.py",
    "e2e/",
    "",
)


# How many of the longest tests a record of durations names.
RECORDED = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write the longest tests to a JSON file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write a record of the durations, with set-up, if the option asks for one."""
    if not (file := config.getoption("--record")):
        return
    from opdcl.rundir.layout import machine

    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=config.rootpath, capture_output=True, text=True, check=True
    )
    record = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "workers": config.getoption("numprocesses", None) or 1,
        "tests": len(seconds),
        "seconds of all tests": round(seconds.total()),
        "longest": {name: round(taken, 1) for name, taken in seconds.most_common(RECORDED)},
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Unpack the embedded model before the workers need it, and make a cache for the tests of each."""
    # A shell starts what runs in its background with Ctrl-C ignored, nohup a lost terminal; tests send both.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    os.fsync = lambda handle: None  # no test cuts the power
    cache = Path(tempfile.mkdtemp(prefix="opdcl-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(cache))
    private_cache(cache)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first; the others keep their order."""
    tests = Path(__file__).parent
    items.sort(
        key=lambda item: next(
            i for i, start in enumerate(LONGEST_FIRST) if str(item.path).startswith(f"{tests}/{start}")
        )
    )


@pytest.fixture(autouse=True)
def without_kept_texts() -> None:
    """Let every test sample its own texts."""
    shutil.rmtree(Path(os.environ["OPDCL_CACHE"]) / "texts", ignore_errors=True)


# The tests that look at plots, which take a second for each report.
DRAWN = ("unit/results/", "unit/test_records.py", "e2e/test_benchmarks.py")


@pytest.fixture(autouse=True)
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave plots empty but for the tests that look at them; fixtures of sessions draw theirs."""
    loaded = sys.modules.get("matplotlib.figure")
    tests = Path(__file__).parent
    if loaded and not any(str(request.path).startswith(f"{tests}/{start}") for start in DRAWN):
        monkeypatch.setattr(loaded.Figure, "savefig", lambda figure, file, **_: file.write("<svg></svg>"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model, see `helpers.tiny`; OPDCL_TINY_MODEL names one that is there already."""
    for module in (
        "opdcl.measure.evaluate",
        "opdcl.train.finetune",
        "opdcl.train.recover",
        "matplotlib.figure",
    ):
        importlib.import_module(module)
    templates = importlib.import_module("lm_eval.utils").env  # lm-eval compiles one for each document
    templates.from_string = functools.cache(templates.from_string)
    gc.freeze()  # each training collects garbage; skip what the libraries have loaded
    if folder := os.environ.get("OPDCL_TINY_MODEL"):
        return Path(folder)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def whole_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, fine-tuned as a whole."""
    return tune_whole(tiny_model, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def loaded(tiny_model: Path):
    """The tiny model as it is loaded from disk, not to be changed."""
    from opdcl.config.model import ModelConfig
    from opdcl.model.load_backbone import load_backbone

    return load_backbone(ModelConfig(id=str(tiny_model), dtype="float32"))


@pytest.fixture
def backbone(loaded):
    """A copy of the tiny model, which a test may change."""
    import torch

    from opdcl.model.backbone import Backbone

    torch.use_deterministic_algorithms(False)  # as loading does
    return Backbone(copy.deepcopy(loaded.causal_lm), copy.deepcopy(loaded.tokenizer))


@pytest.fixture(scope="session")
def project(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, prompts and `tiny.yaml`, in which `finished` was made; tests may add to it."""
    return make_project(tmp_path_factory.mktemp("project"), tiny_model)


@pytest.fixture
def tiny_folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder of the test's own with rows, prompts and `tiny.yaml`."""
    monkeypatch.chdir(make_project(tmp_path, tiny_model))
    return tmp_path


@pytest.fixture(scope="session")
def tiny_cache(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the embedded model is the tiny one."""
    from opdcl.rundir.hashes import seal

    cache = tmp_path_factory.mktemp("cache")
    shutil.copytree(tiny_model, cache / "models" / "smollm2-135m")
    seal(cache / "models" / "smollm2-135m")
    return cache


@pytest.fixture(scope="session")
def finished(project: Path) -> Path:
    """A run that was not interrupted, to be read or copied."""
    from helpers.command import opdcl  # which takes over the environment when it is imported

    done = opdcl("run", "tiny.yaml", "-o", "whole", "--json", cwd=project, code=0)
    (project / "summary.json").write_text(done.stdout)
    return project / "whole"
