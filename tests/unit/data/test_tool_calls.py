"""The suite `tool_calls`: which answers are right, which fail without skill, and what models see."""

import json

import numpy as np
import pytest
from helpers.command import opdcl
from helpers.everyday import SAID
from helpers.families import FAMILIES, make_tokenizer, scripted, template
from helpers.recovering import Silent
from helpers.scripts import load_script
from helpers.tiny import make_project
from lm_eval.api.instance import Instance
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from opdcl.config.evaluate import EvalConfig
from opdcl.config.recover import RewardSection
from opdcl.config.shipped import package_folder
from opdcl.data.chat import encode_prompt, tool_row
from opdcl.data.floors import CONSTANT_ANSWER
from opdcl.data.similarity import nearest
from opdcl.data.suites import load_suite
from opdcl.distill.reward import reward_rows
from opdcl.errors import UsageError
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.stages.evaluate import BackboneLM

UTILS = load_script(package_folder("evals") / "tool_calls" / "utils.py")
SUITES = {name: load_suite(name) for name in ("tool_calls", "tool_calls_validation")}
DOCS = {name: suite.documents(None) for name, suite in SUITES.items()}
TEST = DOCS["tool_calls"]
KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}

RAIN = {"name": "rain", "arguments": {"city": "Bergen"}}
TEXT = json.dumps(RAIN)
LLAMA = '{"name": "rain", "parameters": {"city": "Bergen"}}'
OPENAI = json.dumps({"type": "function", "function": {"name": "rain", "arguments": '{"city": "Bergen"}'}})


def parameters(doc):
    """Return the schema of each function's arguments, by its name."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in json.loads(doc["tools"])}


def hermes(calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def scores(answer_of, docs=TEST, metric="correct_calls"):
    return np.array([UTILS.process_results(doc, [answer_of(doc)])[metric] for doc in docs])


def gold(doc):
    """Return the right answer in the form of Hermes."""
    return hermes(map(json.loads, doc["target"].splitlines())) if json.loads(doc["calls"]) else doc["target"]


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (f"<tool_call>\n{TEXT}\n</tool_call>", 1),
        (f"Let me look.\n<tool_call>{TEXT}</tool_call>\n<tool_call>{LLAMA}", 2),
        (f"<tool_call>{OPENAI}</tool_call>", 1),
        (LLAMA, 1),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", 2),
        (f"[TOOL_CALLS][{TEXT}, {TEXT}]", 2),
        (f"```json\n{OPENAI}\n```", 1),
        ("", 0),
        (CONSTANT_ANSWER, 0),
        ("Braces like {these} are no call.", 0),
        (f"I would write {TEXT}", 0),
    ],
)
def test_calls_are_read_in_the_common_forms(answer, count):
    assert UTILS.read_calls(answer) == [RAIN] * count


@pytest.mark.parametrize(
    "answer",
    [
        TEXT[:-2],
        f"<tool_call>{TEXT[:-1]}</tool_call>",
        "<tool_call>rain(Bergen)</tool_call>",
        f"{TEXT} There you are.",
        '{"city": "Bergen"}',
        '{"name": "rain"}',
        '{"name": "rain", "arguments": "Bergen"}',
        "[1, 2]",
    ],
)
def test_malformed_calls_are_no_calls(answer):
    with pytest.raises(ValueError, match=r".+"):
        UTILS.read_calls(answer)


SHOP = next(doc for doc in TEST if "K-204" in doc["prompt"])
HOTEL = next(doc for doc in TEST if "Krakow" in doc["prompt"])
TWO = next(doc for doc in TEST if "Oslo and in Rome" in doc["prompt"])
NONE = next(doc for doc in TEST if doc["group"] == "no tool")
CART, KRAKOW = (json.loads(doc["target"]) for doc in (SHOP, HOTEL))


def changed(call, **arguments):
    return json.dumps({**call, "arguments": call["arguments"] | arguments})


@pytest.mark.parametrize(
    ("doc", "answer", "expected"),
    [
        (SHOP, json.dumps(CART), (1, 1, 1)),
        (SHOP, changed(CART, product_id="k-204"), (1, 1, 1)),
        (SHOP, changed(CART, quantity=2), (0, 1, 1)),
        (SHOP, changed(CART, quantity="3"), (0, 1, 1)),
        (SHOP, changed(CART, colour="red"), (0, 1, 1)),
        (SHOP, json.dumps({**CART, "arguments": {"product_id": "K-204"}}), (0, 1, 1)),
        (SHOP, json.dumps({**CART, "name": "track_order"}), (0, 0, 1)),
        (SHOP, hermes([CART, CART]), (0, 0, 1)),
        (SHOP, json.dumps(CART)[:-1], (0, 0, 0)),
        (SHOP, "[" * 100_000, (0, 0, 0)),
        (SHOP, "I have added it.", (0, 0, 0)),
        (HOTEL, json.dumps(KRAKOW), (1, 1, 1)),
        (HOTEL, changed(KRAKOW, guests=2), (1, 1, 1)),  # the default
        (HOTEL, changed(KRAKOW, guests=None), (1, 1, 1)),
        (HOTEL, changed(KRAKOW, guests=1), (0, 1, 1)),
        (TWO, "; ".join(reversed(TWO["target"].splitlines())), (1, 1, 1)),
        (TWO, TWO["target"].splitlines()[0], (0, 0, 1)),
        (TWO, "; ".join([TWO["target"].splitlines()[0]] * 2), (0, 1, 1)),
        (NONE, f"It is {NONE['target']}.", (1, 1, 1)),
        (NONE, f"<tool_call>{TEXT}</tool_call> It is {NONE['target']}.", (0, 0, 0)),
        (NONE, "I cannot say.", (0, 0, 0)),
    ],
)
def test_an_answer_is_scored_by_form_function_and_arguments(doc, answer, expected):
    assert tuple(UTILS.process_results(doc, [answer])[metric] for metric in UTILS.METRICS) == expected


@pytest.mark.parametrize("name", SUITES)
def test_the_right_answer_scores_in_every_form(name):
    def listed(doc):
        return json.dumps([json.loads(line) for line in gold(doc).splitlines() if line.startswith("{")])

    assert SUITES[name].metrics == list(UTILS.METRICS)
    assert scores(gold, DOCS[name]).all()
    with_calls = [doc for doc in DOCS[name] if json.loads(doc["calls"])]
    assert scores(lambda doc: doc["target"].replace('"arguments"', '"parameters"'), with_calls).all()
    assert scores(listed, with_calls).all()


def test_there_are_enough_prompts_of_each_kind_from_the_first_ones_on():
    groups = [doc["group"] for doc in TEST]
    assert len(TEST) >= 100
    assert groups.count("no tool") >= 25
    assert groups.count("two calls") >= 15
    for start in range(0, 120, 30):
        assert {*groups[start : start + 30]} == {"one call", "two calls", "no tool"}
    prompts = [doc["prompt"] for docs in DOCS.values() for doc in docs]
    assert len({*prompts}) == len(prompts)


@pytest.mark.parametrize("name", SUITES)
def test_every_right_call_is_one_that_its_tools_allow(name):
    for doc in DOCS[name]:
        allowed = parameters(doc)
        assert len(allowed) == 4
        for call in json.loads(doc["calls"]):
            schema = allowed[call["name"]]
            assert {*schema["required"]} <= {*call["arguments"]} <= {*schema["properties"]}, doc["prompt"]
            for argument, accepted in call["arguments"].items():
                rules = schema["properties"][argument]
                for value in accepted:
                    assert isinstance(value, KINDS[rules["type"]]), (doc["prompt"], argument)
                    assert value in rules.get("enum", [value]), (doc["prompt"], argument)


def test_no_prompt_is_near_to_one_of_the_other_split_or_of_the_recovery_prompts():
    ours, theirs = ([doc["prompt"] for doc in docs] for docs in DOCS.values())
    for prompts, others in ((ours, [*theirs, *SAID]), (theirs, SAID)):
        near = nearest(prompts, others)
        assert {prompts[i]: float(near[i]) for i in np.flatnonzero(near > 0.6)} == {}


@pytest.mark.parametrize("name", SUITES)
def test_answers_without_content_score_nothing(name):
    floors = SUITES[name].floors(None, [gold(doc) for doc in DOCS[name]])
    means = {name: np.mean([s["correct_calls"] for s in rows]) for name, rows in floors.items()}
    # To fill in the function that shares most words with the prompt needs no understanding.
    assert 0 < means.pop("filled-in call") < 0.25
    assert means == dict.fromkeys(means, 0)
    assert {"constant", "long constant", "copy", "copy and constant", "shuffled"} <= means.keys()


@pytest.mark.parametrize("name", SUITES)
def test_another_prompts_right_answer_scores_near_nothing(name):
    docs = DOCS[name]
    answers = [gold(doc) for doc in docs]
    moved = [
        np.mean([UTILS.process_results(d, [answers[i - shift]])["correct_calls"] for i, d in enumerate(docs)])
        for shift in range(1, len(docs))
    ]
    assert np.mean(moved) < 0.005
    assert max(moved) < 0.05


def test_who_always_calls_or_never_calls_fails_the_prompts_that_need_the_other():
    always = scores(
        lambda doc: gold(doc) if json.loads(doc["calls"]) else f"{doc['target']}\n{hermes([RAIN])}"
    )
    never = scores(lambda doc: doc["target"] if doc["group"] == "no tool" else "Done.")
    assert always.mean() <= 0.8
    assert never.mean() <= 0.25
    first = scores(lambda doc: hermes([{"name": next(iter(parameters(doc))), "arguments": {}}]))
    assert first.mean() < 0.03


def small(doc=SHOP):
    """Return a document with the first of its tools alone, whose prompt is short."""
    return {**doc, "tools": json.dumps(json.loads(doc["tools"])[:1])}


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_an_evaluation_shows_the_tools_and_scores_the_call(family, tmp_path):
    tokenizer, doc = make_tokenizer(FAMILIES[family]), small()
    row = tool_row(doc, [{"role": "user", "content": doc["prompt"]}], "row")
    ids = encode_prompt(row, tokenizer, 5000)
    assert json.loads(doc["tools"])[0]["function"]["description"] in tokenizer.decode(ids)
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    end = FAMILIES[family].eos
    backbone = scripted(tokenizer, FAMILIES[family], ids, f"<tool_call>{call}</tool_call>{end}")
    lm = BackboneLM(backbone, None, EvalConfig(batch_size=1), tmp_path / "partial", Silent())
    # The scripted model writes this only after a prompt of exactly this length.
    (answer,) = lm.generate_until([Instance("generate_until", doc, ("", {"max_gen_toks": 80}), 0)])
    assert answer == f"<tool_call>{call}</tool_call>"


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_template_that_supports_tools_is_accepted(family):
    tokenizer = make_tokenizer(FAMILIES[family])
    lengths = SUITES["tool_calls"].lengths(None, tokenizer)
    assert len(lengths) == len(TEST)
    bare = encode_prompt(tool_row({}, [{"role": "user", "content": TEST[0]["prompt"]}], ""), tokenizer, 5000)
    assert lengths[0] > len(bare) + 500


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3", "suite 'tool_calls': the chat template leaves out tools"),
        ("gpt-oss", "does not read tool calls as this chat template writes them"),
    ],
)
def test_a_template_whose_calls_could_not_be_scored_is_refused(family, reason):
    with pytest.raises(UsageError, match=reason):
        SUITES["tool_calls"].lengths(None, make_tokenizer(FAMILIES[family]))


def test_a_reward_shows_the_tools_too():
    task = SUITES["tool_calls_validation"].task
    rows = reward_rows(RewardSection(suite="tool_calls_validation"), task)
    assert [row.tools for row in rows] == [json.loads(doc["tools"]) for doc in DOCS["tool_calls_validation"]]


def test_a_run_is_measured_by_name_where_the_template_supports_tools(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path, tiny_model))
    long = tmp_path / "long"
    long.mkdir()
    for file in tiny_model.iterdir():
        (long / file.name).write_bytes(file.read_bytes())
    shape = read_json(long / "config.json")
    (long / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 2048}))
    model = AutoModelForCausalLM.from_pretrained(long)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained("mine")
    small = ("--limit", "3", "--set", "eval.max_new_tokens=4", "--base", "long")

    refused = opdcl("eval", "mine", "--retention", "tool_calls", *small, "-o", "refused")
    assert refused.returncode == 2
    assert "suite 'tool_calls': the chat template leaves out tools" in refused.stderr
    assert "--set model.chat_template=FILE" in refused.stderr
    assert not (tmp_path / "refused").exists()

    (tmp_path / "qwen.jinja").write_text(template("qwen2_5.jinja"))
    family = ("--set", "model.chat_template=qwen.jinja")
    assert opdcl("eval", "mine", "--retention", "instructions", *small, *family, "-o", "run").returncode == 0
    measured = opdcl("eval", "run", "--retention", "tool_calls", "--limit", "3")
    assert measured.returncode == 0, measured.stderr
    run = RunDir(tmp_path / "run")
    for state in ("base", "tuned"):
        result = read_json(run.eval_result(state, "tool_calls"))
        assert (result["n"], result["metric"]) == (3, "correct_calls")
        assert result["floor"]["constant"]["correct_calls"] == 0
    rows = read_jsonl(run.eval_samples("base", "tool_calls"))
    assert [row["target"] for row in rows] == [doc["target"] for doc in TEST[:3]]
    assert [row["group"] for row in rows] == ["one call"] * 2 + [TEST[2]["group"]]
