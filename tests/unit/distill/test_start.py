"""The least-squares start: a dense reference, its limits, its effect on held-out KL, and who has none."""

import shutil

import pytest
import torch
from helpers.adapters import made_by_peft
from helpers.recovering import PROMPT, Silent, run, short_recovery, whole_and_resumed
from safetensors.torch import load_file, save_file

from opdcl.distill import start
from opdcl.distill.prompts import read_recovery_source
from opdcl.model.backbone import Backbone
from opdcl.model.lora import parts
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout
from opdcl.stages.recover import recover

WEIGHTS = "adapter_model.safetensors"


def texts(seed: int) -> list[Rollout]:
    """Return completions of random tokens, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 40_000, (n,), generator=generator).tolist()  # noqa: E731
    return [Rollout(PROMPT + draw(4 + i % 3), draw(9 + i % 5)) for i in range(16)]


DOMAIN, GENERAL = texts(0), texts(1)


@pytest.fixture
def student(backbone, tuned):
    """The backbone as a recovery begins: the student is a copy of tuned."""
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    backbone.causal_lm.eval()
    return backbone


@pytest.fixture
def changed_little(tuned):
    """An adapter whose change is small, as after a fine-tune: then a layer's output moves nearly linearly."""
    file = tuned / "tuned" / WEIGHTS
    weights = {k: 0.1 * v if "lora_B" in k else v for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return tuned


def factors(backbone, state="student"):
    return [parts(layer, state)[0].detach().clone() for layer in backbone.adapted_layers(state)]


def move(backbone, weight, batch_tokens=64):
    texts = {"domain": DOMAIN, "general": GENERAL}
    start.move(backbone, backbone.adapted_layers("student"), texts, weight, batch_tokens)
    return factors(backbone)


@torch.no_grad()
def inputs_by_hand(backbone, rollouts, state):
    """Return what each layer reads where it predicts an answer, from whole plain passes, `(M, K)` in fp64."""
    layers = backbone.adapted_layers("student")
    read: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(layers))}
    for rollout in rollouts:
        kept: dict[int, torch.Tensor] = {}
        hooks = [
            layer.register_forward_hook(lambda layer, x, y, i=i, kept=kept: kept.update({i: x[0]}))
            for i, layer in enumerate(layers)
        ]
        with backbone.state(state) as model:
            model(input_ids=torch.tensor([rollout.prompt_ids + rollout.completion_ids]))
        for hook in hooks:
            hook.remove()
        for i, x in kept.items():
            answer = range(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            read[i] += [x[0, position - 1].double() for position in answer]
    return [torch.stack(rows) for rows in read.values()]


def least_squares(a_RK, domain_MK, general_MK, weight):
    """Solve the stacked rows of both texts and of the ridge, row by row of A', without any second moments."""
    domain_MK = domain_MK / len(domain_MK) ** 0.5
    general_MK = general_MK * (weight / len(general_MK)) ** 0.5
    mean = (domain_MK.square().sum() + general_MK.square().sum()) / a_RK.shape[1]
    ridge_KK = torch.eye(a_RK.shape[1], dtype=torch.float64) * (start.RIDGE * mean).sqrt()
    old_RK = a_RK.double()
    rows = torch.cat([domain_MK, ridge_KK, general_MK])
    target = torch.cat([domain_MK @ old_RK.T, ridge_KK @ old_RK.T, 0 * general_MK @ old_RK.T])
    return torch.linalg.lstsq(rows, target).solution.T


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_every_layer_gets_the_dense_least_squares_solution(student, weight):
    before, others = factors(student), [parts(layer, "student")[1] for layer in student.adapted_layers()]
    unmoved = [b.detach().clone() for b in others]
    domain, general = inputs_by_hand(student, DOMAIN, "tuned"), inputs_by_hand(student, GENERAL, "base")
    after = move(student, weight)
    assert len(before) == 14
    for layer, a, x, y, new in zip(student.adapted_layers(), before, domain, general, after, strict=True):
        expected = least_squares(a, x, y, weight)
        assert float((new - expected).norm()) < 1e-3 * float((new - a).norm())
        assert torch.equal(parts(layer, "tuned")[0], a)
    assert all(torch.equal(b, old) for b, old in zip(others, unmoved, strict=True))


def test_without_weight_the_adapter_returns_and_with_much_it_does_nothing_on_general_texts(student):
    before = factors(student)
    for a, new in zip(before, move(student, 1e-9), strict=True):
        torch.testing.assert_close(new, a, rtol=1e-4, atol=1e-5)
    general = inputs_by_hand(student, GENERAL, "base")
    for a, new, x in zip(before, move(student, 1e6), general, strict=True):
        was, now = (float((x @ factor.double().T).norm()) for factor in (a, new))
        assert now < 0.05 * was


def test_the_start_does_not_depend_on_the_number_of_passes(student, monkeypatch):
    """A pass reads the inputs of tuned, although earlier passes have moved other layers of the student."""
    before = factors(student)
    one = move(student, 0.3)
    for layer, a in zip(student.adapted_layers("student"), before, strict=True):
        parts(layer, "student")[0].data.copy_(a)
    monkeypatch.setattr(start, "MEMORY", 1)
    assert all(torch.equal(a, b) for a, b in zip(one, move(student, 0.3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, before, strict=True))


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_a_recovery_starts_nearer_to_base_on_held_out_texts(backbone, changed_little, lmbda):
    """Whoever writes the completions that the steps learn from. Base would have all of the domain's KL."""
    first, *_ = run(backbone, changed_little, lmbda=lmbda)
    assert first["start"]["layers"] == 14
    assert first["start"]["general_kl"] < 0.75 * first["validation"]["general_kl"]
    assert first["validation"]["domain_kl"] == pytest.approx(0, abs=1e-5)
    assert first["start"]["domain_kl"] < 0.6 * first["base"]["domain_kl"]


def test_a_start_that_is_no_gain_is_taken_back(backbone, tuned):
    """So much weight starts at base. With this seed the domain loses more by that than is gained."""
    settings = {"lmbda": 0, "steps": 2, "learning_rate": 1e-12, "start_weight": 1e4, "seed": 1}
    first, *_ = run(backbone, tuned, **settings)
    assert first["base"]["domain_kl"] > first["validation"]["general_kl"]
    assert first["start"] == {"layers": 0} | {k: v for k, v in first["validation"].items() if k != "best"}
    before, after = (load_file(tuned / place / WEIGHTS) for place in ("tuned", "out/adapter"))
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-9)


def test_more_weight_starts_nearer_to_base(backbone, changed_little):
    distances = []
    for weight in (0.1, 0.3, 1.0):
        row, *_ = run(backbone, changed_little, lmbda=0, steps=2, validate_every=2, start_weight=weight)
        distances.append(row["start"]["general_kl"])
        shutil.rmtree(changed_little / "out")
    assert row["validation"]["general_kl"] > distances[0] > distances[1] > distances[2]


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_a_resumed_recovery_continues_from_its_start(backbone, changed_little, lmbda):
    first = {"teacher_first": 1} if lmbda else {}
    config = short_recovery(changed_little, lmbda=lmbda, save_steps=2, **first)
    whole, resumed = whole_and_resumed(backbone, changed_little, config, stop=3)
    for stage in (whole, resumed):
        assert read_jsonl(stage.metrics)[0]["start"]["layers"] == 14


@pytest.mark.parametrize(
    "settings",
    [
        {"start_weight": 0},
        {"method": "general"},
        {"general_per_domain": 0},
        {"general_teacher": {"kind": "tuned"}},
    ],
)
def test_some_recoveries_start_from_tuned(backbone, changed_little, settings):
    first, *_ = run(backbone, changed_little, lmbda=0, steps=2, **settings)
    assert first["start"] == {"layers": 0} | {k: v for k, v in first["validation"].items() if k != "best"}


def test_layers_with_row_norms_stay_and_are_counted(loaded, tuned):
    """An adapter with DoRA in every layer starts from tuned, and the console says so."""
    notes = []

    class Listening(Silent):
        def note(self, text):
            notes.append(text)

    folder = made_by_peft(loaded, tuned / "dora", r=4, use_dora=True, target_modules=["q_proj", "down_proj"])
    config = short_recovery(tuned, lmbda=0, steps=2)
    backbone = Backbone(loaded.causal_lm, loaded.tokenizer)
    try:
        source = read_recovery_source(config)
        recover(config, source, backbone, folder, StageDir(tuned / "out"), Listening())
    finally:
        backbone.drop_adapters()
    assert read_jsonl(tuned / "out" / "metrics.jsonl")[0]["start"]["layers"] == 0
    assert any("4 layers with experts or DoRA start as tuned's" in note for note in notes)
