"""Prompts that base writes itself: which of its texts are taken, and a recovery on them from end to end."""

import copy
import json
import os

import pytest
from helpers.command import opdcl
from helpers.teaching import taught
from helpers.tiny import SLOTS, make_project, make_writer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from opdcl.config.finetune import LoraSection
from opdcl.config.load import load, validate
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.console import Output
from opdcl.data.chat import user_turn
from opdcl.data.rows import load_rows
from opdcl.data.similarity import similarity
from opdcl.distill import own_prompts as own
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.pipeline.execute import execute
from opdcl.pipeline.job import Job
from opdcl.rundir.layout import RunDir
from opdcl.sampling.rollout import Prompt, Rollout

WORDS = {word.strip() for slot in range(1, 6) for word in SLOTS[slot]}


class Heard:
    """A stage's report that keeps what it is told."""

    def __init__(self):
        self.steps, self.notes = [], []

    def progress(self, done, total, **values):
        self.steps.append((done, total))

    def note(self, text):
        self.notes.append(text)


@pytest.fixture(scope="session")
def writer(tiny_model, tmp_path_factory):
    return make_writer(tmp_path_factory.mktemp("writer"), tiny_model)


@pytest.fixture(scope="session")
def written(writer):
    """The model that writes questions, as it is loaded from disk."""
    return Backbone.load(ModelConfig(id=str(writer), dtype="float32"))


@pytest.fixture
def write(written, tmp_path):
    """Write prompts into a file; return their texts and what was reported."""

    def write(file="prompts.jsonl", count=30, tests=(), **settings):
        report, config = Heard(), RecoverConfig(**settings)
        rows = own.own_prompts(config, count, written, list(tests), tmp_path / file, report)
        return [row.prompt[0]["content"] for row in rows], report

    return write


def test_base_writes_as_many_prompts_as_are_wanted_and_nothing_else(write, tmp_path):
    prompts, report = write()
    assert len(prompts) == 30
    for prompt in prompts:
        assert prompt.endswith("?")
        assert {*prompt.rstrip("?").split()} <= WORDS
    cosine = similarity(prompts, prompts)
    assert all(cosine[i, j] <= own.REPEATED for i in range(30) for j in range(i))
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": prompt} for prompt in prompts]
    assert report.steps[-1] == (30, 30)
    # The writer ends at once, signs without words, repeats itself, and never ends.
    for reason in ("cut off", "too short", "not text", "repetitive"):
        assert reason in report.notes[0]


def test_the_seed_alone_decides_what_is_written(write):
    first, _ = write("first.jsonl", seed=3)
    again, _ = write("again.jsonl", seed=3, steps=7)
    other, _ = write("other.jsonl", seed=4)
    assert again == first
    assert len({*first} & {*other}) < 5
    longer, _ = write("longer.jsonl", seed=3, count=60)
    assert longer[:30] == first


def test_prompts_are_written_by_base_and_not_by_an_adapter_on_it(written, write, tmp_path):
    expected, _ = write("base.jsonl")
    backbone = Backbone(copy.deepcopy(written.causal_lm), written.tokenizer)
    backbone.new_adapter(LoraSection(r=4, alpha=8), 1)
    for name, weight in backbone.peft.named_parameters():
        if "lora_B" in name:
            weight.data += 0.5
    rows = own.own_prompts(RecoverConfig(), 30, backbone, [], tmp_path / "tuned.jsonl", Heard())
    assert [row.prompt[0]["content"] for row in rows] == expected


def test_a_file_that_is_there_is_taken_as_it_is(write, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Edited by hand?"}\n')
    prompts, report = write("mine.jsonl")
    assert prompts == ["Edited by hand?"]
    assert report.steps == []


def test_prompts_near_to_a_test_are_left_out(write):
    free, _ = write("free.jsonl")
    tests = [f"{prompt} Answer in one sentence." for prompt in free[:5]]
    clean, report = write("clean.jsonl", tests=tests)
    assert len(clean) == 30
    assert not {*clean} & {*free[:5]}
    assert "near to a test" in report.notes[0]


def test_a_base_that_writes_no_prompts_is_given_up(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(own, "ROUND", 16)
    monkeypatch.setattr(own, "LONGEST", 24)
    report = Heard()
    wanted = r"base wrote 0 usable prompts; left out: 48 cut off; 10 were wanted"
    with pytest.raises(OpdclError, match=wanted) as given_up:
        own.own_prompts(RecoverConfig(), 10, loaded, [], tmp_path / "prompts.jsonl", report)
    assert "--prompts everyday" in given_up.value.hint
    assert report.steps == [(0, 10)] * 3  # four texts for each prompt, in whole rounds
    assert not (tmp_path / "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is a good name for a small black cat?", ""),
        ("Wie lange dauert der Flug von Köln nach Oslo?", ""),
        ("请写一首关于秋天和月亮的短诗。", ""),
        ("def f(x): return x + 1  # What does this do?", ""),
        ("", "too short"),
        ("Hi there", "too short"),
        ("12 + 13 + 14 = ?", "not text"),
        ("Half a character: \ufffd, is it?", "not text"),
        ("Who is it?<|im_start|>assistant\nMe.", "not text"),
        ("no no no no no no no no no no no no no", "repetitive"),
    ],
)
def test_what_is_no_prompt_has_a_reason(text, reason, written):
    ids = written.tokenizer(text, add_special_tokens=False)["input_ids"]
    markup = user_turn(written.tokenizer).markup
    assert own.fault(text, Rollout(Prompt([1]), [*ids, 2], finished=True), markup) == reason
    assert own.fault(text, Rollout(Prompt([1]), ids), markup) == "cut off"


@pytest.mark.parametrize(
    ("text", "earlier"),
    [
        ("Why do horses sleep standing up?", "How long do the horses sleep standing up?"),
        ("Warum schläft die Gräfin im Turm?", "warum schläft die gräfin im turm"),
        ("请写一首关于秋天的短诗", "请写一首关于秋天的诗"),
        ("Почему небо голубое днём?", "Почему днём небо голубое"),
        ("What is it to you?", "What is it to you?"),  # no word of content
    ],
)
def test_a_prompt_that_repeats_another_is_found_in_any_script(text, earlier):
    other = "Write a limerick about a frog in Peru."
    assert own.with_repeats([text, other], ["", ""], [earlier], []) == ["repeated", ""]
    assert own.with_repeats([earlier, other, text], [""] * 3, [], []) == ["", "", "repeated"]
    assert own.with_repeats([earlier, other, text], ["cut off", "", ""], [], []) == ["cut off", "", ""]


def test_a_context_on_prompts_of_its_own_is_refused():
    shown = {"kind": "base", "context": "{answer} {prompt}"}
    with pytest.raises(UsageError, match="prompts that base writes have none"):
        validate({"recover": {"general": "self", **taught(shown, "general")}})


class Stopped(Output):
    """Interrupt where the recovery would begin, after the prompts were written."""

    def stage(self, name, *after):
        if name == "recover":
            raise KeyboardInterrupt
        return super().stage(name, *after)


@pytest.fixture
def project(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path, writer))
    return tmp_path


# At higher rates training spoils the writer, whose hidden states are so simple.
TINY = ["recover.general=self", "finetune.learning_rate=1e-5", "recover.learning_rate=1e-5"]
SELF = [word for setting in TINY for word in ("--set", setting)]


def test_a_run_on_prompts_of_its_own(project, writer):
    planned = opdcl("run", "tiny.yaml", *SELF, "-o", "run", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "base writes 18 of its own" in planned.stdout + planned.stderr
    assert "warning" not in planned.stdout + planned.stderr
    assert not (project / "run").exists()

    workflow, _ = load(["tiny.yaml"], TINY)
    run = RunDir(project / "run")
    with pytest.raises(Interrupted):
        execute(Job.of(workflow, run), Stopped("quiet"))
    file = project / "run" / "stages" / "02-recover" / "prompts.jsonl"
    before = os.stat(file).st_mtime_ns
    prompts = {row.prompt[0]["content"] for row in load_rows(str(file))}
    assert len(prompts) == 18

    done = opdcl("run", "tiny.yaml", *SELF, "-o", "run")
    assert done.returncode == 0, done.stderr
    sampled = [json.loads(line) for line in (file.parent / "samples.jsonl").read_text().splitlines()]
    assert sampled
    assert all(any(prompt in row["prompt"] for prompt in prompts) for row in sampled)
    again = opdcl("eval", "run", "--limit", "5")
    assert again.returncode == 0, again.stderr
    assert "recover: skipped, done" in again.stderr
    assert os.stat(file).st_mtime_ns == before
    assert f"{file.relative_to(project / 'run')}" in (project / "run" / "seal.json").read_text()


def test_base_writes_its_part_of_a_mixture(project, writer):
    mixed = ["--set", "recover.general=[self=0.25, prompts.jsonl=0.75]", *SELF[2:]]
    done = opdcl("run", "tiny.yaml", *mixed, "-o", "run")
    assert done.returncode == 0, done.stderr
    stage = project / "run" / "stages" / "02-recover"
    own = {row.prompt[0]["content"] for row in load_rows(str(stage / "prompts.jsonl"))}
    assert len(own) == 5  # a quarter of 16, and one to hold out
    assert "base writes 4 of its own" in done.stderr
    kinds = json.loads((stage / "stage.json").read_text())["kinds"]
    assert sum(kind["share"] for kind in kinds.values()) == pytest.approx(1, abs=1e-3)
    assert "What the recovery practised" in (project / "run" / "report.md").read_text()


def test_an_adapter_is_recovered_on_prompts_of_its_base(project, writer):
    model = AutoModelForCausalLM.from_pretrained(writer)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained("mine")
    sizes = {"steps": 2, "rollouts": 4, "max_new_tokens": 6, "validation_prompts": 2, "learning_rate": 1e-5}
    small = [word for key, value in sizes.items() for word in ("--set", f"recover.{key}={value}")]
    words = ["recover", "mine", "--domain", "rows.jsonl", *small]
    done = opdcl(*words, *SELF[:2], "-o", "set")
    assert done.returncode == 0, done.stderr
    done = opdcl(*words, "--prompts", "self", "-o", "option")
    assert done.returncode == 0, done.stderr
    texts = [(project / run / "stages/02-recover/prompts.jsonl").read_text() for run in ("set", "option")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 6


def test_a_template_without_room_for_a_user_turn_is_refused_with_the_fix(project, writer):
    (project / "bare").mkdir()
    for file in writer.iterdir():
        (project / "bare" / file.name).write_bytes(file.read_bytes())
    (project / "bare" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    refused = opdcl("run", "tiny.yaml", *SELF, "--base", "bare", "-o", "run")
    assert refused.returncode == 2
    assert "no markup around a user turn" in refused.stderr
    assert "--prompts everyday" in refused.stderr
    assert not (project / "run").exists()
