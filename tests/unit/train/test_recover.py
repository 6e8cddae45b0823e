"""Recovery and its rivals on a two-layer model: what each trains on, and which adapter is kept."""

import json
import shutil

import pytest
import torch
from helpers.recovering import Notes, Silent, recover_rows, run, short_recovery, whole_and_resumed
from helpers.synthetic import alter
from safetensors.torch import load_file, save_file

from opdcl.config.recover import RecoverConfig
from opdcl.data.prompts import read_recovery_source
from opdcl.data.rows import load_rows
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.start import SCALES, WEIGHTS_OF_GENERAL, Ends
from opdcl.train.validation import NO_WORSE, Measurement, Milestones


def held_out(rows):
    return [sum(r["validation"][f"{s}_kl"] for s in ("general", "domain")) for r in rows if "validation" in r]


@pytest.mark.parametrize("engine", ["slab", "graph", "generate"])
def test_sampler_and_trainer_agree_whichever_engine_samples(backbone, tuned, monkeypatch, engine):
    monkeypatch.setattr("opdcl.sampling.sample.pick_engine", lambda model: engine)
    rows = run(backbone, tuned, method="general", steps=16, validate_every=8)
    assert len([r for r in rows if "kl" in r]) == 16
    assert all(r["mismatch"] == 0 for r in rows if "mismatch" in r)
    assert any("mismatch" in r for r in rows)


def test_general_has_no_domain_steps(backbone, tuned):
    rows = run(backbone, tuned, method="general")
    assert {r["stream"] for r in rows if "stream" in r} == {"general"}


def test_imitation_learns_from_the_teachers_texts_and_the_student_samples_nothing(backbone, tuned):
    rows = [r for r in run(backbone, tuned, lmbda=0, loss={"kind": "cross_entropy"}) if "loss" in r]
    assert all("mismatch" not in r for r in rows)
    assert {(r["stream"], r["author"]) for r in rows} == {("general", "teacher"), ("domain", "teacher")}


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_recovery_whose_student_writes_at_another_temperature_resumes(backbone, tuned, temperature):
    settings = {"lmbda": 1.0, "on_policy": {"temperature": temperature}, "loss": {"kind": "jsd", "beta": 0.1}}
    whole, _ = whole_and_resumed(backbone, tuned, short_recovery(tuned, **settings), stop=2)
    rows = [row for row in read_jsonl(whole.metrics) if "loss" in row]
    assert {row["author"] for row in rows if row["stream"] == "general"} == {"student"}
    assert all("mismatch" not in row for row in rows)  # the probabilities are of another distribution


def test_without_steps_the_start_is_recovered(backbone, tuned):
    rows = run(backbone, tuned, start="auto", steps=0)
    assert rows[1]["validation"] == {**rows[0]["start"]["validation"], "best": True}
    assert not any("loss" in row for row in rows)


def test_a_given_scale_is_taken(backbone, tuned):
    given = run(backbone, tuned, start=0.5, steps=0)
    assert (given[0]["start"]["alpha"], given[0]["start"]["measured"]) == (0.5, {})
    assert_scaled(tuned, "out/adapter", 0.5)


def assert_scaled(folder, recovered, alpha):
    """Assert that an adapter is the tuned one times `alpha`."""
    before, after = (load_file(folder / f / "adapter_model.safetensors") for f in ("tuned", recovered))
    for name in before:
        torch.testing.assert_close(after[name], before[name] * (alpha if "lora_B" in name else 1))


def test_the_start_is_the_place_with_the_least_held_out_kl(backbone, tuned):
    rows = run(backbone, tuned, start="auto")
    start = rows[0]["start"]
    assert [*map(float, start["measured"])] == [*WEIGHTS_OF_GENERAL]
    ends = ({s: rows[0][end][f"{s}_kl"] for s in ("general", "domain")} for end in ("validation", "base"))
    at_tuned, at_base = ends
    tried = {None: at_tuned} | {float(mu): kl for mu, kl in start["measured"].items()}
    assert start["mu"] == min(tried, key=lambda mu: Ends(at_tuned, at_base).lost(tried[mu]))
    nearest, farthest = tried[WEIGHTS_OF_GENERAL[0]], tried[WEIGHTS_OF_GENERAL[-1]]
    assert nearest["domain"] < farthest["domain"]
    assert nearest["general"] > farthest["general"]


def test_an_adapter_that_cannot_be_projected_is_scaled_and_that_is_said(backbone, tuned):
    weights = load_file(tuned / "tuned" / "adapter_model.safetensors")
    layers = dict(backbone.causal_lm.named_modules())
    for name in [name for name in weights if "lora_A" in name]:
        place = name.removeprefix("base_model.model.").split(".lora_A")[0]
        norms = layers[place].weight.float().norm(dim=1)
        weights[f"base_model.model.{place}.lora_magnitude_vector"] = norms
    save_file(weights, tuned / "tuned" / "adapter_model.safetensors")
    alter(tuned / "tuned" / "adapter_config.json", use_dora=True)
    report, out = Notes(), StageDir(tuned / "out")
    recover_rows(short_recovery(tuned, lmbda=1.0), backbone, tuned / "tuned", out, report)
    backbone.drop_adapters()
    start = read_jsonl(out.metrics)[0]["start"]
    assert (start["mu"], [*map(float, start["measured"])]) == (None, [*SCALES])
    assert any("DoRA" in line for line in report.lines)


def test_the_student_starts_as_the_scaled_adapter_and_every_share_counts_from_tuned(backbone, tuned):
    settings = {"steps": 2, "validate_every": 2, "learning_rate": 1e-12, "health": False}
    whole = run(backbone, tuned, start=1.0, **settings)[0]["validation"]
    shutil.rmtree(tuned / "out")
    rows = run(backbone, tuned, start=0.4, **settings)
    assert_scaled(tuned, "out/adapter", 0.4)
    tuned_row, end = [row["validation"] for row in rows if "validation" in row]
    assert tuned_row["general_kl"] == pytest.approx(whole["general_kl"], rel=1e-5)
    assert end["general_kl"] == pytest.approx(rows[0]["start"]["validation"]["general_kl"], rel=1e-4)
    assert end["domain_gap_closed"] == pytest.approx(1 - end["domain_kl"] / rows[0]["base"]["domain_kl"])


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "general"},
        {"general_teacher": "tuned"},
        {"domain_teacher": "base"},
        {"teachers": {"slow": {"kind": "ema"}}, "domain_teacher": "slow"},
    ],
)
def test_without_base_and_tuned_as_teachers_the_student_starts_as_tuned(backbone, tuned, settings):
    rows = run(backbone, tuned, start="auto", steps=2, **settings)
    assert (rows[0]["start"]["alpha"], rows[0]["start"]["mu"]) == (1, None)
    assert rows[0]["start"]["measured"] == {}


def test_rows_that_name_base_or_tuned_leave_the_start_to_be_chosen(backbone, tuned):
    file = tuned / "general.jsonl"
    first, *rows = map(json.loads, file.read_text().splitlines())
    file.write_text("".join(json.dumps(row) + "\n" for row in [first | {"teacher": "tuned"}, *rows]))
    assert len(run(backbone, tuned, start="auto", steps=2)[0]["start"]["measured"]) > 2


def test_a_recovery_from_a_scaled_start_resumes_with_the_same_adapter(backbone, tuned):
    config = short_recovery(tuned, start=0.5, lmbda=0.5, validate_every=2, health=False)
    whole_and_resumed(backbone, tuned, config, stop=3)


def test_a_recovery_killed_before_its_first_checkpoint_starts_at_the_same_place(backbone, tuned):
    config = short_recovery(tuned, start="auto", lmbda=0.5, health=False)
    whole_and_resumed(backbone, tuned, config, stop=2)


def test_without_a_distance_between_base_and_teacher_there_is_no_share(backbone, tuned):
    rows = run(backbone, tuned, steps=2, validate_every=2, domain_teacher="base")
    measured = [r["validation"] for r in rows if "validation" in r][-1]
    assert measured["domain_kl"] > 0
    assert "domain_gap_closed" not in measured


def test_method_general_is_measured_by_the_general_stream_alone(backbone, tuned):
    """It leaves the domain by design; that must neither halt it nor choose its adapter."""
    settings = {"steps": 24, "validate_every": 4, "learning_rate": 1e-2, "sample_ahead": 1}
    rows = run(backbone, tuned, method="general", **settings)
    measured = [r["validation"] for r in rows if "validation" in r]
    assert measured[-1]["domain_kl"] > measured[0]["domain_kl"] + 0.05
    from_base = [max(m["general_kl"], m["own_kl"]) for m in measured]  # by base's text or the student's
    kept = [score for score, m in zip(from_base, measured, strict=True) if m["best"]]
    assert kept[-1] <= NO_WORSE * min(from_base) < from_base[0]


def test_the_data_of_a_recovery_is_read_once_per_source_and_split(tuned):
    config = RecoverConfig(domain=str(tuned / "domain.jsonl"), rollouts=8)
    reads = []

    def read_rows(source, split="train"):
        reads.append((source, split))
        return load_rows(source, split)

    source = read_recovery_source(config, read_rows)
    assert reads == [(config.domain, "train"), ("everyday", "train"), ("everyday", "validation")]
    assert len(source.rows["domain"]) == 8
    assert set(source.held_out) == {"general"}


def test_every_validation_grades_what_the_student_writes_itself(backbone, tuned):
    rows = run(backbone, tuned, steps=6, validate_every=3, max_new_tokens=6)
    first, *later = [row for row in rows if "validation" in row]
    assert [row["step"] for row in later] == [3, 6]
    for row in (first, *later):
        own = row["validation"]
        assert min(own["own_kl"], own["own_distance"]) > 0
        assert 1 <= own["own_length"] <= 6
        assert 0 <= own["own_ended"] <= 1
        assert 0 <= own["own_repetition"] <= 1
    assert {"own_length", "own_ended", "own_repetition"} <= set(first["base"])
    assert "own_kl" not in first["base"]


@pytest.mark.parametrize(("context", "compared"), [(None, 2), ("{prompt} ({answer})", 4)])
def test_no_model_is_compared_with_itself_on_the_same_prompts(backbone, answered, context, compared):
    parts, report = {}, Silent()
    report.part = lambda what, done, total: parts.update({what: total})
    teachers = {"told": {"kind": "base", "context": context}}
    config = short_recovery(answered, steps=2, health=False, teachers=teachers, domain_teacher="told")
    recover_rows(config, backbone, answered / "tuned", StageDir(answered / "out"), report)
    measured = [parts.get(f"measuring {name}", 0) for name in ("the original model", "the model in training")]
    assert measured == [compared - 2, 4]
    assert read_jsonl(answered / "out" / "metrics.jsonl")[0]["base"]["general_kl"] == 0


def test_a_student_equal_to_base_is_at_no_distance_on_its_own_answers(backbone, tuned):
    # Recovery of an adapter without effect: base, tuned and student are one model.
    file = tuned / "tuned" / "adapter_model.safetensors"
    save_file({name: weight * ("lora_A" in name) for name, weight in load_file(file).items()}, file)
    rows = run(backbone, tuned, steps=2, validate_every=2, learning_rate=1e-9)
    distances = [row["validation"]["own_kl"] for row in rows if "validation" in row]
    assert distances == pytest.approx([0, 0], abs=1e-6)


def test_the_kept_adapter_is_chosen_by_the_worse_of_base_s_text_and_its_own():
    kl = {"general": 0.2, "domain": 0.1}
    assert Measurement(kl).score("alternating") == pytest.approx(0.3)
    assert Measurement(kl, own_kl=0.1).score("alternating") == pytest.approx(0.3)
    assert Measurement(kl, own_kl=0.9).score("alternating") == pytest.approx(1.0)


def test_a_resumed_validation_remembers_the_lowest_score():
    def kl(general, domain):
        return {"general_kl": general, "domain_kl": domain}

    start = {"alpha": 0.3, "validation": kl(2, 1)}
    rows = [
        {"step": 0, "validation": kl(4, 0), "base": kl(0, 3), "start": start},
        {"step": 1, "loss": 1.0},
        {"step": 4, "validation": {**kl(1, 1), "best": True}},
        {"step": 8, "validation": {**kl(1, 2), "best": False}},
    ]
    restored = Milestones.restore(rows, "alternating")
    measured = [m.row() for m in (restored.tuned, restored.base, restored.start)]
    assert measured == [kl(4, 0), kl(0, 3), kl(2, 1)]
    assert restored.lowest_score == 2


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([4.0, 1.0, 1.2, 1.24], 3),  # wavering: the last one
        ([4.0, 1.0, 1.2, 1.3], 2),  # worse than the lowest by more than that
        ([4.0, 1.0, 3.0, 1.1], 3),  # it came back
        ([4.0, 6.0, 7.0, 8.0], 0),
    ],
)
def test_among_equals_the_later_adapter_is_kept(backbone, tuned, monkeypatch, scores, kept):
    following = iter([scores[0], *scores])  # the first one is read back from the metrics too
    monkeypatch.setattr(Measurement, "score", lambda self, method: next(following))
    run(backbone, tuned, steps=6, validate_every=2, health=False)
    found = json.loads((tuned / "out" / "trainer" / "best" / "validation.json").read_text())
    assert found == {"step": 2 * kept, "score": scores[kept]}


def test_the_rate_rises_to_its_peak_and_falls_on_a_line(backbone, tuned):
    rows = run(backbone, tuned, steps=20, validate_every=20, learning_rate=1e-3, health=False)
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert len(rates) == 20
    assert rates == pytest.approx([5e-4, *[1e-3 * left / 18 for left in (18, *range(18, 0, -1))]])


def test_held_out_texts_follow_the_seed(backbone, tuned):
    distances = []
    for seed in (0, 0, 1):
        rows = run(backbone, tuned, steps=2, validate_every=2, learning_rate=1e-12, seed=seed)
        distances.append(rows[0]["validation"]["general_kl"])
        shutil.rmtree(tuned / "out")
    assert distances[0] == distances[1] != distances[2]
