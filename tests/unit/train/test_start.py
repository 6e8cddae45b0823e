"""Where a recovery starts: the closed form beside least squares, its moments beside a plain pass."""

import pytest
import torch
from helpers.recovering import PROMPT

from opdcl.config.recover import RecoverConfig
from opdcl.console import Output
from opdcl.model.lora import adapter_weights
from opdcl.train import start
from opdcl.train.learner import Learner
from opdcl.train.start import WEIGHTS_OF_GENERAL, Ends, choose, input_moments, project_factor, put_at_start
from opdcl.train.teachers import Teacher

QUIET = Output("quiet").stage("recover")


def texts(seed, count=5, opening=PROMPT):
    """Return texts of several lengths that begin with the same ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, 400, (3 + 2 * i,), generator=generator).tolist() for i in range(count)]
    return [opening + row for row in rows]


def inputs_of(backbone, state, layer, ids):
    """Return a layer's inputs for one text, `(T, K)`, by a pass of that text alone."""
    found = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
    with backbone.state(state) as model, torch.no_grad():
        model(input_ids=torch.tensor([ids], device=backbone.device))
    hook.remove()
    return found[0].double()


@pytest.mark.parametrize("mu", WEIGHTS_OF_GENERAL)
def test_a_projected_factor_is_the_least_squares_compromise(mu, monkeypatch):
    monkeypatch.setattr(start, "SHRUNK", 0.0)
    generator = torch.Generator().manual_seed(0)
    a_RK, b_NR = torch.randn(3, 8, generator=generator), torch.randn(6, 3, generator=generator)
    domain_MK, general_MK = torch.randn(40, 8, generator=generator), torch.randn(50, 8, generator=generator)
    found_RK = project_factor(a_RK, domain_MK.T @ domain_MK, general_MK.T @ general_MK)[mu]
    # B A' x should be B A x on domain inputs and 0 on general ones, whose squares count mu times.
    inputs = torch.cat([domain_MK, general_MK * mu**0.5])
    wanted = torch.cat([domain_MK @ a_RK.T @ b_NR.T, torch.zeros(50, 6)])
    left_NK = torch.linalg.lstsq(inputs, wanted).solution.T
    torch.testing.assert_close(b_NR @ found_RK, left_NK, atol=2e-3, rtol=2e-3)


def test_what_only_one_kind_of_text_excites_is_kept_or_left_out():
    a_RK, domain_KK, general_KK = torch.randn(4, 6), torch.zeros(6, 6), torch.zeros(6, 6)
    domain_KK[0, 0] = domain_KK[1, 1] = general_KK[2, 2] = general_KK[3, 3] = 1.0
    for found_RK in project_factor(a_RK, domain_KK, general_KK).values():
        torch.testing.assert_close(found_RK[:, :2], a_RK[:, :2], rtol=1e-3, atol=1e-4)
        assert found_RK[:, 2:].abs().max() == 0  # neither base's inputs nor those that nothing excites


@pytest.mark.parametrize("tokens", [16, 4096])
def test_moments_are_those_of_a_plain_pass_of_each_text(backbone, tuned, tokens):
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    read, passes = [*zip(texts(0), range(5), strict=True)], []
    layers = backbone.adapted_layers("student")
    for state in ("base", "tuned"):
        moments = input_moments(backbone, state, layers, read, tokens, passes.extend)
        assert sorted(passes[-5:]) == [0, 1, 2, 3, 4]
        assert len({*map(id, moments)}) < len(moments)  # layers that read the same are measured once
        for layer, found_KK in zip(layers, moments, strict=True):
            expected_KK = torch.zeros_like(found_KK, dtype=torch.float64)
            for ids, skip in read:
                x_TK = inputs_of(backbone, state, layer, ids)[skip:]
                expected_KK += x_TK.T @ x_TK / len(x_TK) / len(read)
            torch.testing.assert_close(found_KK.double(), expected_KK, rtol=1e-3, atol=1e-4)
    backbone.drop_adapters()


def test_a_model_larger_than_the_room_for_moments_is_projected_alike(backbone, tuned, monkeypatch):
    def projected():
        backbone.load_adapter(tuned / "tuned", "student", trainable=True)
        backbone.load_adapter(tuned / "tuned", "tuned")
        found = start.project(backbone, texts(0), texts(1), 4096, QUIET)
        backbone.drop_adapters()
        return found

    whole = projected()
    monkeypatch.setattr(start, "MOMENTS", 1)  # a layer at a time
    for mu, factors in projected().items():
        for factor, expected in zip(factors, whole[mu], strict=True):
            torch.testing.assert_close(factor, expected, rtol=1e-3, atol=1e-5)


def test_the_shared_opening_is_the_longest_with_any_text():
    known = [[1, 2, 3, 9], [1, 2, 4, 4, 4, 4], [7, 7]]
    cases = {(1, 2, 4, 4, 5, 5): 4, (1, 2, 3, 8, 8): 3, (5, 5, 5): 0, (1, 2, 3, 9): 3, (7, 8, 9): 1}
    for ids, expected in cases.items():
        assert start.shared_opening(list(ids), sorted(known)) == expected


def test_the_place_is_where_least_is_lost_of_both_streams_whatever_their_units():
    ends = Ends({"general": 3.0, "domain": 0.0}, {"general": 0.0, "domain": 12.0})
    places = {0.1: (1.5, 0.3), 0.3: (0.6, 1.2), 1.0: (0.3, 4.0)}
    best, measured = choose(
        [*places], lambda p: dict(zip(("general", "domain"), places[p], strict=True)), ends
    )
    assert (best, [*measured]) == (0.3, [*places])
    assert ends.lost(ends.tuned) == ends.lost(ends.base) == 1


def test_where_every_place_loses_more_than_tuned_the_student_stays_there():
    ends = Ends({"general": 1.0, "domain": 0.0}, {"general": 0.0, "domain": 1.0})
    assert choose([0.1, 0.3], lambda _: {"general": 0.9, "domain": 0.9}, ends)[0] is None


@pytest.mark.parametrize("best", [None, *WEIGHTS_OF_GENERAL])
def test_the_student_is_put_at_the_place_that_is_chosen(backbone, tuned, best):
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    config = RecoverConfig(general="general.jsonl", domain="domain.jsonl", micro_batch_tokens=2048)
    teachers = {s: {"": Teacher(backbone, t)} for s, t in (("general", "base"), ("domain", "tuned"))}
    learner = Learner(backbone, teachers, "recover.max_new_tokens")

    def measure(doing):
        kl = 0.1 if best and doing.endswith(f" {best:g}") else 0.9
        return {"general": kl, "domain": kl}

    ends = Ends({"general": 1.0, "domain": 0.0}, {"general": 0.0, "domain": 1.0})
    found = put_at_start(config, learner, ends, measure, lambda: (texts(0), texts(1)), QUIET)
    assert found.mu == best
    for layer in backbone.adapted_layers("student"):
        a_RK, b_NR = adapter_weights(layer, "student")
        tuned_a_RK, tuned_b_NR = adapter_weights(layer, "tuned")
        assert torch.equal(b_NR, tuned_b_NR)
        if best is None:
            assert torch.equal(a_RK, tuned_a_RK)
        else:
            assert not torch.equal(a_RK, tuned_a_RK)
    backbone.drop_adapters()
