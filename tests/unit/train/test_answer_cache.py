"""Texts that are kept for later runs: the same bits with and without them, and only where all is the same."""

import json
import os
import threading

import pytest
import torch
from helpers.command import ROOT
from helpers.recovering import Silent, recover_rows, short_recovery
from helpers.scripts import load_script

from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train import answer_cache
from opdcl.train.answer_cache import CompletionCache, texts_folder
from opdcl.train.external_teachers import SecondModel
from opdcl.train.teachers import EmaTeacher, Teacher
from opdcl.words import Prompt, Rollout

PROMPTS = [Prompt([1, 520, 3690, 198, 9 + i]) for i in range(3)]
OPTIONS = {"max_new_tokens": 5, "seed": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept_files():
    return len([*answer_cache.texts_folder().glob("*.json")])


def recovered(backbone, folder, name, **settings):
    """Return a recovery's adapter and metrics, apart from times, and the number of texts that are new."""
    config, out, known = short_recovery(folder, **settings), StageDir(folder / name), kept_files()
    fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
    recover_rows(config, fresh, folder / "tuned", out, Silent())
    fresh.drop_adapters()
    rows = [{k: v for k, v in r.items() if k not in ("seconds", "parts")} for r in read_jsonl(out.metrics)]
    weights = (out.adapter / "adapter_model.safetensors").read_bytes()
    return weights, rows, kept_files() - known


def test_a_recovery_from_kept_texts_has_the_bits_of_one_that_samples_them(backbone, tuned):
    *first, new = recovered(backbone, tuned, "first", lmbda=0.5)
    assert new > 0
    assert recovered(backbone, tuned, "second", lmbda=0.5) == (*first, 0)


def test_another_recovery_of_the_same_adapter_uses_them_too(backbone, tuned):
    slow, _, _ = recovered(backbone, tuned, "slow", learning_rate=1e-4)
    fast, _, new = recovered(backbone, tuned, "fast", learning_rate=1e-2)
    assert fast != slow
    assert new == 0
    _, _, new = recovered(backbone, tuned, "other", learning_rate=1e-2, seed=1)
    assert new > 0  # another seed draws other answers


def answers(backbone, state="base", prompts=PROMPTS, **options):
    """Return what a state writes, and whether it was kept."""
    written = []

    class Writer(Teacher):
        def complete(self, prompts, **options):
            written.append(prompts)
            return super().complete(prompts, **options)

    rollouts = CompletionCache(backbone).complete(Writer(backbone, state), prompts, **OPTIONS | options)
    return rollouts, not written


def test_kept_answers_equal_sampled_ones_in_all_they_hold(backbone):
    sampled, was_kept = answers(backbone)
    assert not was_kept
    assert sampled == Teacher(backbone, "base").complete(PROMPTS, **OPTIONS)
    finished = []
    kept, was_kept = answers(backbone, on_finished=finished.extend)
    assert was_kept
    assert kept == finished == sampled
    assert all(r.logprobs for r in kept)


# Changes of what answers beside the prompts and options, given a backbone and a patch.
CHANGES = {
    "weights": lambda backbone, _: backbone.causal_lm.get_input_embeddings().weight.data[5, 0].add_(1e-3),
    "dtype": lambda backbone, _: backbone.causal_lm.to(torch.bfloat16),
    "settings": lambda backbone, patch: patch.setattr(backbone.causal_lm.config, "rms_norm_eps", 1e-3),
    "end": lambda backbone, patch: patch.setattr(backbone, "eos_ids", [7]),
    "threads": lambda _, patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "packages": lambda _, patch: patch.setattr(answer_cache, "versions", lambda: {"torch": "0"}),
    "device": lambda _, patch: patch.setattr(answer_cache, "machine_of", lambda device: {"name": "other"}),
}
OTHER_OPTIONS = [{"seed": 2}, {"max_new_tokens": 6}, {"temperature": 0.5}, {"batch_size": 2}]
OTHER_OPTIONS += [{"prompts": PROMPTS[::-1]}, {"prompts": PROMPTS[:2]}]


@pytest.mark.parametrize("change", [*CHANGES, *OTHER_OPTIONS])
def test_whatever_can_change_an_answer_makes_other_texts(backbone, change, monkeypatch):
    answers(backbone)
    if named := isinstance(change, str):
        CHANGES[change](backbone, monkeypatch)
    options = {} if named else change
    assert not answers(backbone, **options)[1]
    assert answers(backbone, **options)[1]


def test_an_adapter_has_texts_of_its_own_until_a_weight_of_it_changes(adapted):
    of_base, _ = answers(adapted)
    of_tuned, was_kept = answers(adapted, "tuned")
    assert not was_kept
    assert of_tuned != of_base
    assert answers(adapted, "tuned") == (of_tuned, True)
    layer = adapted.adapted_layers("tuned")[0]
    layer.scaling["tuned"] *= 2
    assert not answers(adapted, "tuned")[1]
    layer.lora_B["tuned"].weight.data[0, 0] += 1e-3
    assert not answers(adapted, "tuned")[1]
    assert answers(adapted)[1]  # base is as it was


def test_what_training_changes_or_another_model_writes_is_not_kept(adapted):
    writers = [Teacher(adapted, "student"), EmaTeacher(adapted, "general", 0.5)]
    writers.append(SecondModel(adapted, adapted.causal_lm))
    for writer in writers:
        CompletionCache(adapted).complete(writer, PROMPTS, **OPTIONS)
    assert not texts_folder().exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace("[[[", "[[[1, ", 1),
        lambda text: json.dumps({"rows": json.loads(text)["rows"]}),
        lambda text: "[]",
        lambda text: "",
    ],
    ids=["cut off", "another token", "without its hash", "another format", "empty"],
)
def test_a_damaged_file_is_sampled_again_and_written_anew(backbone, damage):
    sampled, _ = answers(backbone)
    (file,) = texts_folder().glob("*.json")
    text = file.read_text()
    file.write_text(damage(text))
    assert answers(backbone) == (sampled, False)
    assert file.read_text() == text


def test_a_reader_beside_two_writers_finds_whole_files_only(cache):
    rollouts = [Rollout(p, list(range(2000)), [-0.1] * 2000, True) for p in PROMPTS]
    file, found, running = texts_folder() / f"{'a' * 16}.json", [], True

    def write():
        while running:
            answer_cache._keep(file, rollouts)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not file.exists():
        pass
    found = [answer_cache._read(file) for _ in range(30)]
    running = False
    for writer in writers:
        writer.join()
    assert found == [[[r.completion_ids, r.logprobs, True] for r in rollouts]] * 30
    assert [entry.name for entry in texts_folder().iterdir()] == [file.name]


def test_without_a_folder_for_them_texts_are_sampled_and_it_is_said(backbone, cache, caplog):
    cache.write_text("a file")
    sampled, _ = answers(backbone)
    assert answers(backbone) == (sampled, False)
    texts = CompletionCache(backbone)
    caplog.clear()
    for seed in (1, 2):
        texts.complete(Teacher(backbone, "base"), PROMPTS, max_new_tokens=5, seed=seed)
    assert caplog.text.count("texts are not kept for later runs") == 1


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "device", "folder", "nothing"):
        assert answer_cache._read(tmp_path / name) is None


def test_the_record_holds_a_faster_recovery_with_the_same_adapter():
    record = json.loads((ROOT / "benchmarks" / "texts.json").read_text())
    texts = load_script(ROOT / "benchmarks" / "texts.py")
    found = texts.compare(record["first"], record["second"])
    assert found == {"same_bits": True, "cpu_seconds_less": record["cpu_seconds_less"]}
    assert found["cpu_seconds_less"] > 0
    assert not texts.compare(record["first"], record["second"] | {"adapter_sha256": "other"})["same_bits"]
