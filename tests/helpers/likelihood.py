"""Small data files in the layout of lm-eval's own datasets, with sentences of our own."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    ("Which of these keeps food cold?", ["a candle", "a refrigerator", "a broom", "a window"], 1),
    ("What do bees collect from flowers?", ["nectar", "gravel", "ink", "glass beads and old coins"], 0),
    ("Which tool is used to cut paper?", ["a spoon", "a pillow", "scissors"], 2),
    ("What happens to ice in warm water?", ["it burns", "it rusts", "it sings", "it melts"], 3),
    ("Where do most fish live?", ["in sand dunes", "in water", "in the clouds over hills", "in bread"], 1),
    ("Which of these gives light at night?", ["a lamp", "a sock", "a stone", "a bucket of cold water"], 0),
    ("What does a thermometer measure?", ["colour", "weight", "temperature", "the age of a tree"], 2),
    ("Which animal lays eggs?", ["a cow", "a horse", "a goat", "a hen"], 3),
    ("What do plants need to grow?", ["light", "music"], 0),
    ("What is a bridge for?", ["to store milk", "to cross a river", "to bake", "to count sheep"], 1),
]

ROWS = {
    "arc_easy": [
        {
            "id": f"own-{i}",
            "question": question,
            "choices": {"text": choices, "label": list("ABCD"[: len(choices)])},
            "answerKey": "ABCD"[right],
        }
        for i, (question, choices, right) in enumerate(QUESTIONS)
    ],
    # Five examples before each question.
    "leaderboard_mmlu_pro": [
        {"question": question, "options": choices, "answer": "ABCD"[right], "answer_index": right}
        for question, choices, right in QUESTIONS
    ],
    # The choices differ in what stands before the text that is compared.
    "winogrande": [
        {
            "sentence": f"The {big} does not fit into the {small} because the _ is too {word}.",
            "option1": big,
            "option2": small,
            "answer": "1" if word == "large" else "2",
        }
        for big, small in (("table", "car"), ("coat", "drawer"), ("ladder", "shed"), ("book", "envelope"))
        for word in ("large", "small")
    ],
    # One text goes on; nothing is chosen.
    "lambada_openai": [
        {"text": f"We looked for the {thing} all day, and in the evening we found the {thing}"}
        for thing in ("key", "cat", "letter", "map", "boat", "ring")
    ],
}


def write_rows(folder: Path, task: str, rows: list[dict] | None = None) -> Path:
    """Write the rows of a task, or others in their place; return the file."""
    file = folder / f"{task}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROWS[task] if rows is None else rows)))
    return file


def reference(folder: Path, model) -> dict:
    """Return what lm-eval's own `simple_evaluate` gives for a model on the files of `write_rows`."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    from opdcl.data.stock_tasks import stock_file

    tasks = []
    for task in ROWS:
        settings = {k: v for k, v in load_yaml(stock_file(task)).items() if not k.startswith("dataset_")}
        files = {"test": str(folder / f"{task}.jsonl")}
        settings |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        settings |= {"training_split": None, "validation_split": None, "test_split": "test"}
        if settings.get("num_fewshot"):
            settings |= {"fewshot_split": "test", "fewshot_config": {"split": "test"}}
        tasks.append(settings)
    # With its defaults, the manager would parse 14,000 files.
    return simple_evaluate(
        model, tasks=tasks, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )


def check_against(expected: dict, task: str, result: dict, rows: list[dict]) -> list[list[float]]:
    """Assert that a result has lm-eval's scores to the last digit; return lm-eval's log-likelihoods."""
    samples = sorted(expected["samples"][task], key=lambda row: row["doc_id"])
    for metric in result["metrics"]:
        scores, mean = [row["scores"][metric] for row in rows], expected["results"][task][f"{metric},none"]
        assert scores == [sample[metric] for sample in samples]
        assert sum(scores) / len(scores) == mean
        assert result["metrics"][metric] == round(mean, 6)
    return [[answer[0][0] for answer in sample["resps"]] for sample in samples]
