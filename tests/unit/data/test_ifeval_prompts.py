"""The prompts in the official IFEval format: from hand-written requests, with all 25 instruction types."""

import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from helpers.command import ROOT
from helpers.everyday import SAID
from helpers.scripts import load_script
from helpers.wording import nearest

from opdcl.config.shipped import package_folder
from opdcl.data.own_words import request_of
from opdcl.data.stock_tasks import ensure_punkt

ensure_punkt()
import langdetect  # noqa: E402
from lm_eval.tasks.ifeval import instructions_registry  # noqa: E402

pytestmark = pytest.mark.nightly

langdetect.DetectorFactory.seed = 0
FILE = ROOT / "evals" / "ifeval" / "prompts.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TYPES = Counter(name for row in ROWS for name in row["instruction_id_list"])


@pytest.fixture(scope="module")
def maker():
    """The script that makes the file, as a module."""
    return load_script(ROOT / "evals" / "ifeval" / "make.py")


def test_the_script_makes_the_file(maker):
    assert maker.make_rows() == ROWS
    assert maker.make_rows(seed=1) != ROWS


def test_all_types_occur_often_enough():
    assert len(ROWS) >= 220
    assert {*TYPES} == {*instructions_registry.INSTRUCTION_DICT}
    assert min(TYPES.values()) >= 8
    assert {len(row["kwargs"]) for row in ROWS} == {1, 2, 3}
    assert len({row["prompt"] for row in ROWS}) == len({row["key"] for row in ROWS}) == len(ROWS)


def test_rows_have_the_official_form(maker):
    for row in ROWS:
        assert list(row) == ["key", "prompt", "instruction_id_list", "kwargs"]
        assert len(row["instruction_id_list"]) == len(row["kwargs"])
        assert all(set(kwargs) == set(maker.ARGUMENTS) for kwargs in row["kwargs"])


def test_every_instruction_is_given_all_that_its_check_needs():
    for row in ROWS:
        for name, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            given = {key: value for key, value in kwargs.items() if value is not None}
            instruction = instructions_registry.INSTRUCTION_DICT[name](name)
            instruction.build_description(**given)
            taken = instruction.get_instruction_args() or {}
            # A check invents each argument that is missing or out of range.
            assert {k: sorted(v) if isinstance(v, list) else v for k, v in taken.items()} == {
                k: sorted(v) if isinstance(v, list) else v for k, v in given.items()
            }, row["key"]


def test_no_prompt_has_conflicting_instructions():
    table = instructions_registry.conflict_make(
        {name: {*others} for name, others in instructions_registry.INSTRUCTION_CONFLICTS.items()}
    )
    for row in ROWS:
        for one, other in combinations(row["instruction_id_list"], 2):
            assert other not in table[one], row["key"]


def test_the_prompt_names_what_is_demanded():
    named = ["keywords", "forbidden_words", "keyword", "end_phrase", "first_word", "postscript_marker"]
    named += [f"num_{p}" for p in ("words", "sentences", "bullets", "highlights", "sections", "paragraphs")]
    for row in ROWS:
        for kwargs in row["kwargs"]:
            for value in [kwargs[key] for key in (*named, "prompt_to_repeat") if kwargs[key] is not None]:
                for part in value if isinstance(value, list) else [str(value)]:
                    assert part in row["prompt"], row["key"]


def test_no_request_is_near_to_a_shipped_prompt():
    requests = (ROOT / "evals" / "ifeval" / "requests.txt").read_text(encoding="utf-8").splitlines()
    requests = [line.partition("|")[0].strip() for line in requests]
    suite = [*(package_folder("evals") / "instructions").glob("*.jsonl")]
    prompts = [json.loads(line)["prompt"] for file in suite for line in file.read_text("utf-8").splitlines()]
    # Apart, because a word's weight depends on all texts that are compared.
    for texts in (prompts, SAID):
        near = nearest(requests, [*map(request_of, texts)])
        assert {requests[i]: round(float(near[i]), 2) for i in np.flatnonzero(near > 0.6)} == {}
