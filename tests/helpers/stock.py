"""Rows of our own in the columns of lm-eval's tasks, and what lm-eval itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from opdcl.data.stock_tasks import stock_file

ABCD = ["iron", "wood", "glass", "wool"]
ARC = {
    "id": "1",
    "question": "Which is a metal?",
    "choices": {"text": ABCD, "label": [*"ABCD"]},
    "answerKey": "A",
}
SUM = {"question": "What is 2 + 2?", "answer": "Two and two.\n#### 4"}
OTHER_SUM = {"question": "What is 3 + 4?", "answer": "Three and four.\n#### 7"}
TURNS = {
    "input": "Turn left. Take 2 steps. Turn around. Take 2 steps.\nOptions:\n- Yes\n- No",
    "target": "Yes",
}
MC_ROW = {"question": "Which is a metal? ", "choices": ABCD, "answer": 0, "subject": "x"}
PASSAGE = "The bakery opened in 1931. It sells bread."
GPQA = {"Question": "Which is a metal?", "Correct Answer": "iron", "Explanation": "It shines."}
GPQA |= {f"Incorrect Answer {i}": ABCD[i] for i in (1, 2, 3)}
TRUTHFUL = {
    "question": "Is water wet?",
    "mc1_targets": {"choices": ["Yes.", "No, it is dry."], "labels": [1, 0]},
    "mc2_targets": {"choices": ["Yes.", "It is.", "No, it is dry."], "labels": [1, 1, 0]},
}
EMOTIONS = {"emotion1": "Joy", "emotion2": "Fear", "emotion3": "Rage", "emotion4": "Calm"}
SCORES = {f"emotion{i}_score": i for i in (1, 2, 3, 4)}
DROP = {
    "passage": PASSAGE,
    "question": "In which year did it open?",
    "query_id": "1",
    "answer": {
        "number": "1931",
        "date": {"day": "", "month": "", "year": ""},
        "spans": [],
        "worker_id": "",
        "hit_id": "",
    },
    "validated_answers": {"number": [], "date": [], "spans": [], "worker_id": [], "hit_id": []},
}

# A task of lm-eval -> two or more rows of its test data, and as many examples as its prompts show.
STOCK: dict[str, list[dict[str, Any]]] = {
    # Written answers: begun by the task; stops as texts, several, none; examples as turns; a system text.
    "arc_challenge_chat": [ARC, ARC | {"question": "Which one burns?", "answerKey": "B"}],
    "arc_challenge_llama": [ARC, ARC | {"question": "Which one burns?", "answerKey": "B"}],
    "mmlu_llama_astronomy": [MC_ROW | {"question": f"Which is metal number {i}?"} for i in range(6)],
    "gsm8k": [SUM, OTHER_SUM] * 4,
    "gsm8k_cot": [SUM, OTHER_SUM],
    "gsm8k_cot_llama": [SUM, OTHER_SUM],
    "triviaqa": [
        {"question": f"Who wrote book {i}", "answer": {"aliases": ["Ada", "Lovelace"]}} for i in (1, 2)
    ],
    "nq_open": [
        {"question": "who baked it", "answer": ["Ada", "Bo"]},
        {"question": "when", "answer": ["1931"]},
    ],
    "drop": [DROP, DROP | {"query_id": "2", "question": "When did the bakery open?"}],
    "hendrycks_math_algebra": [
        {"problem": f"What is {i} + 1?", "level": "1", "type": "a", "solution": f"\\boxed{{{i + 1}}}"}
        for i in (1, 2)
    ],
    "bbh_cot_fewshot_navigate": [TURNS, TURNS | {"target": "No"}],
    "bbh_zeroshot_navigate": [TURNS, TURNS | {"target": "No"}],
    "mmlu_pro_biology": [
        {"question": f"Which is metal {i}?", "options": ABCD, "answer": "A", "answer_index": 0}
        | {"category": "biology", "cot_content": "A: Let's think step by step. The answer is (A)."}
        for i in range(6)
    ],
    "gpqa_main_cot_zeroshot": [GPQA, GPQA | {"Question": "Which one shines?"}],
    "mgsm_direct_en": [
        {"question": "What is 2 + 2?", "answer": None, "answer_number": 4},
        {"question": "What is 3 + 4?", "answer": None, "answer_number": 7},
    ],
    "acp_areach_bool": [
        {"context": "A ferry.", "question": f"Is car {i} there?", "answer": "yes"} for i in (1, 2)
    ],
    "babi": [
        {"passage": PASSAGE + "\n", "question": f"What is sold {i}?", "answer": "bread"} for i in (1, 2)
    ],
    "eq_bench": [
        {"prompt": f"Rate the mood {i}.", "reference_answer_fullscale": repr(EMOTIONS | SCORES)}
        for i in (1, 2)
    ],
    "anagrams1": [
        {"context": "Unscramble: dabre", "completion": "bread"},
        {"context": "odog", "completion": "good"},
    ],
    # Beam search; a score of several texts together; draws from the likeliest tokens; very long answers.
    "code2text_go": [{"code_tokens": ["a"], "docstring_tokens": ["b"], "code": "a", "docstring": "b"}] * 2,
    "flores_ace_Arab-eng_Latn_prompt_1": [{"sentence_ace_Arab": "Roti.", "sentence_eng_Latn": "Bread."}] * 2,
    "global_piqa_nonparallel_generation_acm_arab": [
        {"prompt": "It rains.", "solution0": "Get wet.", "solution1": "Get dry.", "label": 0}
    ],
    "aime24": [{"Problem": "What is 2 + 2?", "Answer": 4}, {"Problem": "What is 3 + 4?", "Answer": 7}],
    # Likelihoods: with examples, a system text, choices from a function, several right ones, no choice.
    "boolq": [{"passage": PASSAGE, "question": f"is it open {i}", "label": i} for i in (0, 1)],
    "mmlu_astronomy": [MC_ROW | {"question": f"Which is metal number {i}?"} for i in range(6)],
    "hellaswag": [
        {
            "ind": i,
            "activity_label": "Baking",
            "ctx_a": "She kneads.",
            "ctx_b": "then she",
            "ctx": "",
            "label": "1",
        }
        | {"endings": ["sleeps.", "bakes it.", "flies.", "sings."], "source_id": "1", "split": "val"}
        | {"split_type": "a"}
        for i in (1, 2)
    ],
    "copa": [
        {
            "premise": "It rained.",
            "choice1": "The road was wet.",
            "choice2": "It was dry.",
            "question": q,
            "label": i,
        }
        for i, q in enumerate(("effect", "cause"))
    ],
    "truthfulqa_mc1": [TRUTHFUL, TRUTHFUL | {"question": "Is ice cold?"}],
    "truthfulqa_mc2": [TRUTHFUL, TRUTHFUL | {"question": "Is ice cold?"}],
    "cb": [{"premise": "It rains.", "hypothesis": "It is wet", "label": i} for i in (0, 1)],
    "asdiv": [{"body": "Ada has 2.", "question": f"How many {i}?", "answer": f"{i} (cups)"} for i in (2, 3)],
    "lambada_openai_cloze_yaml": [
        {"text": "We sought the key and found the key"},
        {"text": "A cat met a cat"},
    ],
    "leaderboard_bbh_navigate": [TURNS, TURNS | {"target": "No"}],
    "crows_pairs_english": [{"sent_more": "She cooks.", "sent_less": "He cooks."}] * 2,
}


def write_stock(folder: Path, name: str, **changes: Any) -> Path:
    """Write lm-eval's own task with the rows in `STOCK` as its data, and with `changes`; return its file."""
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in STOCK[name]))
    settings = load_yaml(stock_file(name), resolve_func=False)
    places = (settings.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot"))
    files = {split: str(rows) for split in places if split}
    own = {"include": str(stock_file(name)), "task": name, "dataset_path": "json", "dataset_name": None}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(own | {"dataset_kwargs": {"data_files": files}} | changes))
    return file


class Recorder(HFLM):
    """lm-eval's own model, which writes `most` tokens at most and records what it is asked to write."""

    def __init__(self, model: Any, tokenizer: Any, most: int):
        super().__init__(model, tokenizer=tokenizer, batch_size=1, max_length=100_000)
        self.most = most
        self.limits: set[int] = set()
        self.stops: set[tuple[str, ...]] = set()

    def _model_generate(self, context, max_length, stop, **options):
        limit = max_length - context.shape[1]
        self.limits.add(limit)
        self.stops.add(tuple(stop))
        return super()._model_generate(context, context.shape[1] + min(limit, self.most), stop, **options)


def run_by_lm_eval(model: Any, file: Path, chat: bool) -> dict[str, Any]:
    """Return what lm-eval's own command gives for a task's file, with or without the chat template."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model,
        tasks=[str(file)],
        # With its defaults, the manager would parse 14,000 files.
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
