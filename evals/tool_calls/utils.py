"""Requests with tools: whether an answer makes the right calls, or is right where no tool is needed."""

import json
import re
from pathlib import Path

import datasets

from opdcl.data.scoring import normalise

HERE = Path(__file__).parent
METRICS = ("correct_calls", "right_functions", "parsed_calls")

# Hermes and Qwen write each call in tags. Others write JSON alone, after a token such as <|python_tag|>.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
UNTAGGED = re.compile(r"(?:<\|\w+\|>|\[TOOL_CALLS\]|```(?:json)?)?\s*([\[{].*?)\s*(?:```)?", re.DOTALL)


def load_test(**kwargs):
    """Return the test split, under the name that the task scores."""
    return {"test": _split("test")}


def load_validation(**kwargs):
    """Return the validation split, under the name that the task scores."""
    return {"test": _split("validation")}


def _split(name):
    tools = {tool["function"]["name"]: tool for tool in _lines("tools")}
    # Arrow would give every object the union of all fields; as text they stay as they are.
    return datasets.Dataset.from_list(
        [
            {
                **row,
                "tools": json.dumps([tools[one] for one in row["tools"]]),
                "calls": json.dumps(row["calls"]),
                "target": "\n".join(map(_gold, row["calls"])) or row["answers"][0],
            }
            for row in _lines(name)
        ]
    )


def _lines(name):
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _gold(call):
    """Return a call as JSON; of each argument's accepted values, the first."""
    arguments = {name: accepted[0] for name, accepted in call["arguments"].items()}
    return json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)


def read_calls(answer):
    """Return the calls in an answer: JSON in tags among any text, or an answer that is nothing but JSON.

    Raises:
        ValueError: A call is malformed.
    """
    alone = UNTAGGED.fullmatch(answer.strip())
    calls = []
    for part in TAGGED.findall(answer) or ([alone[1]] if alone else []):
        while part := part.lstrip(" \n,;"):
            value, end = json.JSONDecoder().raw_decode(part)
            calls += value if isinstance(value, list) else [value]
            part = part[end:]
    return [_call(value) for value in calls]


def _call(value):
    """Return name and arguments of a call in the forms of Hermes, Llama (`parameters`) and OpenAI."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict):
            return {"name": value["name"], "arguments": arguments}
    raise ValueError("not a call")


def process_results(doc, results):
    """Score one answer; a prompt that needs no tool has one score: the answer is right and calls nothing."""
    wanted, answer = json.loads(doc["calls"]), results[0]
    try:
        made = read_calls(answer)
    except (ValueError, RecursionError):
        made = None
    if not wanted:
        found = any(re.search(rf"(?<!\w){re.escape(a)}(?!\w)", answer, re.IGNORECASE) for a in doc["answers"])
        return dict.fromkeys(METRICS, float(made == [] and found))
    named = bool(made) and sorted(c["name"] for c in made) == sorted(c["name"] for c in wanted)
    defaults = {tool["function"]["name"]: _defaults(tool) for tool in json.loads(doc["tools"])}
    right = named and all(any(_matches(call, one, defaults) for call in made) for one in wanted)
    return dict(zip(METRICS, map(float, (right, named, bool(made))), strict=True))


def _defaults(tool):
    properties = tool["function"]["parameters"]["properties"]
    return {name: p["default"] for name, p in properties.items() if "default" in p}


def _matches(call, wanted, defaults):
    """Whether a call has the wanted arguments; one left out or null has its default."""
    default = defaults[wanted["name"]]
    made = default | {name: value for name, value in call["arguments"].items() if value is not None}
    accepted = {name: [value] for name, value in default.items()} | wanted["arguments"]
    return (call["name"], made.keys()) == (wanted["name"], accepted.keys()) and all(
        _plain(value) in map(_plain, accepted[name]) for name, value in made.items()
    )


def _plain(value):
    """Return a value without case, punctuation and articles."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return normalise(value) if isinstance(value, str) else value
