"""A teacher on a server: its opinion is the local one, whatever the network does, or there is none."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.recovering import Silent, train
from helpers.serving import serving

from opdcl.config.evaluate import EvalConfig
from opdcl.config.loss import LossSection
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.server import ServerSection
from opdcl.config.teacher import TeacherSection
from opdcl.data.suites import load_suite
from opdcl.distill.losses import token_losses
from opdcl.distill.teachers import (
    RemoteTeacher,
    ServedStudent,
    Teacher,
    make_teacher,
    reach_own_model,
    reach_server,
)
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates, TopTokens, join
from opdcl.rundir.files import read_jsonl
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.server import KEY, Server
from opdcl.stages.evaluate import BackboneLM

K = 12
ROLLOUTS = [
    Rollout([1, 520, 9690, 198, 7 + i], list(range(60 + 9 * i, 63 + 11 * i)), [], True) for i in range(5)
]


@pytest.fixture
def elsewhere(tiny_model):
    """The same model in another place, as a server would hold it."""
    return Backbone.load(ModelConfig(id=str(tiny_model), dtype="float32"))


def teacher_of(server, backbone, **settings):
    config = ServerSection(url=server.url, **{"top_k": K, "timeout": 5, "patience": 20, **settings})
    return RemoteTeacher(backbone, reach_server(config, backbone, lambda text: None))


def tokens_of(rollouts):
    return torch.tensor([t for r in rollouts for t in r.completion_ids])


@pytest.mark.parametrize(
    "loss",
    [{"kind": "policy_gradient"}, {"kind": "top_k", "k": K}, {"kind": "top_k", "k": 5}],
    ids=["sampled token", "top 12", "top 5"],
)
def test_loss_and_gradient_are_those_of_the_same_model_at_hand(backbone, elsewhere, loss):
    local = Teacher(backbone, "base")
    tokens, head = tokens_of(ROLLOUTS), local.head_VH
    student = local.states(ROLLOUTS) + 0.3 * torch.randn(
        len(tokens), head.shape[1], generator=torch.Generator().manual_seed(0)
    )
    sampler = (
        HiddenStates(student, head)
        .log_probs(slice(0, len(tokens)), len(head), 1.0)
        .gather(1, tokens[:, None])[:, 0]
        - 0.1
    )
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
        found = []
        for opinion in (local.distribution(ROLLOUTS), remote.distribution(ROLLOUTS)):
            states = student.clone().requires_grad_()
            losses = token_losses(states, head, opinion, tokens, sampler, 1.0, LossSection(**loss))
            losses.loss.sum().backward()
            found.append((losses.loss.detach(), states.grad, losses.logprob))
        remote.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert float(found[0][0].abs().max()) > 0.1


def test_what_is_told_of_a_distribution_is_a_distribution():
    torch.manual_seed(0)
    whole = (3 * torch.randn(40, 200)).log_softmax(-1)
    token = torch.randint(200, (40,))
    top = whole.topk(K)
    told = TopTokens(token, whole.gather(1, token[:, None])[:, 0], top.indices, top.values)
    found = told.log_probs(slice(0, 40), 200, 1.0)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(40), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.gather(1, top.indices), top.values)
    torch.testing.assert_close(found.gather(1, token[:, None])[:, 0], told.logprob_N)
    everywhere = slice(0, 40)
    assert (told.entropy(everywhere, found) <= -(whole.exp() * whole).sum(1) + 1e-4).all()
    student = (3 * torch.randn(40, 200)).log_softmax(-1)
    assert (told.kl(everywhere, student, found) <= (student.exp() * (student - whole)).sum(1) + 1e-4).all()
    assert float(told.kl(everywhere, student, found).min()) > 0
    torch.testing.assert_close(told.kl(everywhere, whole, found), torch.zeros(40), atol=1e-5, rtol=0)
    even = torch.full((1, 200), 1 / 200).log()
    unsure = TopTokens(token[:1], even[:, 0], torch.arange(K)[None], even[:, :K])
    assert float(unsure.entropy(slice(0, 1), unsure.log_probs(slice(0, 1), 200, 1.0))) == pytest.approx(
        float(torch.tensor(200).log()), rel=1e-4
    )
    lengths = [10, 0, 25, 5]
    again = join(told.split(lengths))
    torch.testing.assert_close(again.log_probs(slice(0, 40), 200, 1.0), found)
    with pytest.raises(ValueError, match="temperature 1"):
        told.log_probs(slice(0, 40), 200, 0.7)


FAULTS = [
    500,
    503,
    429,
    "slow",
    "truncated",
    "short",
    "other tokens",
    "nan",
    "certain of everything",
    "few",
    "beyond",
    "no choice",
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_one_bad_answer_costs_time_and_changes_nothing(backbone, elsewhere, fault):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone, timeout=0.5 if fault == "slow" else 5)
        good = remote.distribution(ROLLOUTS[:2])
        remote.server._asked.clear()
        asked = len(server.seen)
        server.faults = [fault]
        again = remote.distribution(ROLLOUTS[:2])
        assert len(server.seen) == asked + 3  # one question was asked twice
        assert torch.equal(again.logprob_N, good.logprob_N)
        assert torch.equal(again.top_logprob_NK, good.top_logprob_NK)
        remote.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (500, "no answer from the server.*status 500"),
        ("slow", "no answer from the server"),
        ("truncated", "server"),
        ("short", "does not answer as it should: log-probabilities of"),
        ("other tokens", "reads other tokens"),
        ("nan", "nan is no log-probability"),
        ("few", "are named where 12"),
        ("no choice", "cannot be read"),
        ("certain of everything", "a probability of"),
        ("beyond", "is none of"),
        (400, "refuses: status 400.*this is a 400"),
        (401, "refuses: status 401"),
    ],
    ids=str,
)
def test_a_server_that_never_answers_well_ends_in_an_error_with_its_reason(backbone, elsewhere, fault, said):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone, timeout=0.3 if fault == "slow" else 5, patience=1)
        server.faults = [fault] * 60
        with pytest.raises(OpdclError, match=said) as caught:
            remote.distribution(ROLLOUTS[:1])
        remote.close()
    assert caught.value.hint
    assert (KEY in caught.value.hint) == (fault == 401)
    assert server.url in caught.value.message


def test_a_server_that_is_gone_is_waited_for(backbone, elsewhere):
    told = []
    with serving(elsewhere) as server:
        port = server.server_address[1]
        remote = RemoteTeacher(
            backbone,
            reach_server(
                ServerSection(url=server.url, top_k=K, patience=30, timeout=5), backbone, told.append
            ),
        )
        good = remote.distribution(ROLLOUTS)
        remote.server._asked.clear()

    def back():
        time.sleep(1)
        with serving(elsewhere, port):
            done.wait(20)

    done = threading.Event()
    thread = threading.Thread(target=back)
    thread.start()
    try:
        again = remote.distribution(ROLLOUTS)
    finally:
        done.set()
        thread.join()
        remote.close()
    assert torch.equal(again.top_logprob_NK, good.top_logprob_NK)
    assert len(told) == 1
    assert "waiting for the server at http://127.0.0.1" in told[0]


def test_a_bad_answer_after_an_outage_is_the_first_one(backbone, elsewhere):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
        server.faults = [503, 503, "nan"]
        assert len(remote.distribution(ROLLOUTS[:1]).logprob_N) == len(ROLLOUTS[0].completion_ids)
        remote.close()


def test_a_completion_that_broke_off_is_written_again(backbone, elsewhere):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone, concurrency=1)
        server.faults = ["aborted"]
        (written,) = remote.complete([ROLLOUTS[0].prompt_ids], RecoverConfig(), 5, seed=1)
        remote.close()
    assert len(written.completion_ids) == 5 or written.finished


def test_a_process_that_leaves_does_not_wait_for_an_answer(elsewhere, tmp_path):
    script = (
        "import sys, time\nfrom opdcl.config.server import ServerSection\nfrom opdcl.sampling.server import Server\n"
        f"server = Server(ServerSection(url=sys.argv[1], model='teacher', top_k={K}), 49152)\n"
        "server.ask([1, 2], [3])\ntime.sleep(1)\nserver.close()\nprint('left', flush=True)\n"
    )
    with serving(elsewhere) as server:
        server.slow, server.faults = 60, ["slow"]
        process = subprocess.Popen(
            [sys.executable, "-c", script, server.url], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "left\n"
        process.wait(timeout=30)
    assert process.returncode == 0


def test_a_server_with_another_model_is_no_place_to_sample_or_evaluate(backbone, elsewhere):
    with serving(elsewhere) as server:
        config = ServerSection(url=server.url, top_k=K)
        reach_own_model(config, backbone, print).close()
        with torch.no_grad():
            elsewhere.causal_lm.model.layers[0].mlp.up_proj.weight.mul_(-1)
        with pytest.raises(UsageError, match="serves another model as teacher"):
            reach_own_model(config, backbone, print)


def test_a_temperature_that_a_servers_log_probabilities_are_not_for_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        RecoverConfig(server={"url": "http://127.0.0.1:1/v1"}, temperature=0.7)


def test_what_is_given_up_does_not_keep_the_process_waiting(backbone, elsewhere):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone, patience=600)
    asked = remote.server.ask([1, 2], [3])
    time.sleep(0.3)
    started = time.monotonic()
    remote.close()
    with pytest.raises(OpdclError):
        asked.result(timeout=10)
    assert time.monotonic() - started < 10


def test_questions_are_asked_together_once_and_over_kept_connections(backbone, elsewhere):
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
        before = len(server.seen)
        remote.prefetch(ROLLOUTS)
        remote.prefetch(ROLLOUTS)
        remote.distribution(ROLLOUTS)
        graded = server.seen[before:]
        assert len(graded) == len(ROLLOUTS)
        assert {tuple(body["prompt"]) for _, body, _ in graded} == {
            (*r.prompt_ids, *r.completion_ids) for r in ROLLOUTS
        }
        assert all(body["prompt_logprobs"] == K for _, body, _ in graded)
        remote.close()


def test_the_key_comes_from_the_environment_and_goes_to_the_server_alone(backbone, elsewhere, monkeypatch):
    monkeypatch.setenv(KEY, "s3cret-key")
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
        assert {key for _, _, key in server.seen} == {"Bearer s3cret-key"}
        server.faults = [401] * 9
        with pytest.raises(UsageError) as caught:
            remote.distribution(ROLLOUTS[:1])
        remote.close()
    assert "s3cret" not in caught.value.message + caught.value.hint


def test_a_server_that_refuses_us_is_known_before_anything_runs(backbone, elsewhere, tmp_path):
    from opdcl.config.workflow import Workflow
    from opdcl.pipeline.dry_run import describe
    from opdcl.rundir.layout import RunDir

    with serving(elsewhere) as server:
        workflow = Workflow(
            finetune={"data": "handbook"},
            recover={
                "general": "everyday",
                "general_teacher": {"kind": "remote", "server": {"url": server.url}},
                "loss": {"kind": "policy_gradient"},
            },
        )
        describe(workflow, RunDir(tmp_path / "run"))
        server.faults = [401]
        with pytest.raises(UsageError, match="refuses: status 401") as caught:
            describe(workflow, RunDir(tmp_path / "run"))
        assert KEY in caught.value.hint
    describe(workflow, RunDir(tmp_path / "run"))  # gone: it may come back until it is needed


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://user:word@host/v1", "http://"])
def test_a_place_that_is_none_or_that_holds_a_secret_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        ServerSection(url=url)


def test_another_tokenizer_or_an_unclear_model_is_refused(backbone, elsewhere):
    with serving(elsewhere) as server:
        server.extra_ids = [5]
        with pytest.raises(UsageError, match="another tokenizer"):
            teacher_of(server, backbone)
        server.extra_ids, server.names = [], ["one", "two"]
        with pytest.raises(UsageError, match="serves one, two"):
            teacher_of(server, backbone)
        assert teacher_of(server, backbone, model="two").server.model == "two"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": {"kind": "reverse_kl"}}, False),
        ({"loss": {"kind": "top_k", "k": 21}}, False),
        ({"loss": {"kind": "top_k", "k": 20}}, True),
        ({"loss": {"kind": "policy_gradient"}}, True),
        ({"loss": {"kind": "policy_gradient"}, "temperature": 0.7}, False),
    ],
)
def test_a_loss_that_needs_more_than_a_server_tells_is_refused(settings, told):
    teacher = {"kind": "remote", "server": {"url": "http://127.0.0.1:1/v1"}}
    if told:
        assert RecoverConfig(general_teacher=teacher, **settings).general_teacher.server.top_k == 20
    else:
        with pytest.raises(ValueError, match="a server tells"):
            RecoverConfig(general_teacher=teacher, **settings)


def test_remote_and_a_server_go_together():
    with pytest.raises(ValueError, match="go together"):
        TeacherSection(kind="remote")
    with pytest.raises(ValueError, match="go together"):
        TeacherSection(kind="base", server={"url": "http://127.0.0.1:1/v1"})


def test_it_writes_what_the_model_at_hand_would_write(backbone, elsewhere):
    config = RecoverConfig(temperature=1.0)
    prompts = [r.prompt_ids for r in ROLLOUTS]
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
        written = remote.complete(prompts, config, 6, seed=3)
        remote.close()
    local = Teacher(backbone, "base").distribution(written)
    tokens = tokens_of(written)
    theirs = torch.tensor([x for r in written for x in r.logprobs])
    mine = local.log_probs(slice(0, len(tokens)), len(local.head_VH), 1.0).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert [r.prompt_ids for r in written] == prompts
    assert all(r.finished == (r.completion_ids[-1] in backbone.eos_ids) for r in written)


def recovery(backbone, tuned, name, general_teacher, loss, **settings):
    config = RecoverConfig(
        general=str(tuned / "general.jsonl"),
        domain=str(tuned / "domain.jsonl"),
        general_teacher=general_teacher,
        loss=loss,
        steps=4,
        teacher_first=1,
        rollouts=4,
        sample_ahead=2,
        max_new_tokens=6,
        validate_every=2,
        validation_prompts=2,
        learning_rate=5e-3,
        save_steps=2,
        **settings,
    )
    return read_jsonl(train(backbone, tuned, name, config).metrics)


def behind(before):
    """Threads that came since; a progress bar's own, which lives as long as the process, is nobody's."""
    return [t for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]


def test_a_recovery_with_a_remote_base_goes_as_with_the_one_at_hand(backbone, tuned, elsewhere):
    loss = {"kind": "top_k", "k": K}
    before = set(threading.enumerate())
    with serving(elsewhere) as server:
        far = {"kind": "remote", "server": {"url": server.url, "top_k": K}}
        # Each bad answer falls on a different question.
        server.faults = [None, 500, None, "nan", None, None, "truncated"]
        remote = recovery(backbone, tuned, "remote", far, loss)
    deadline = time.monotonic() + 60
    while (left := behind(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    rows = [r for r in remote if "loss" in r]
    assert [r["stream"] for r in rows] == ["general", "domain"] * 2
    assert all(r["kl"] > 0 for r in rows if r["stream"] == "general")
    local = [r for r in recovery(backbone, tuned, "local", {"kind": "base"}, loss) if "loss" in r]
    # The first domain step is sampled from the same student in both; base's own answers differ by its sampler.
    assert rows[0]["grad_norm"] > 0
    assert len(local) == len(rows)


def test_hidden_states_and_a_remote_opinion_agree_on_the_tokens_that_both_consider(backbone, elsewhere):
    from opdcl.distill.losses import top_k_overlap

    local = Teacher(backbone, "base")
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone, top_k=16)
        found = top_k_overlap(
            HiddenStates(local.states(ROLLOUTS), local.head_VH), remote.distribution(ROLLOUTS), k=16
        )
        remote.close()
    assert float(found.mean()) > 0.99


def student_of(backbone, tuned):
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)


def test_the_student_is_sampled_on_a_server_with_its_adapter_as_it_is_now(backbone, tuned, elsewhere):
    student_of(backbone, tuned)
    config, prompts = RecoverConfig(), [r.prompt_ids for r in ROLLOUTS]
    local = Teacher(backbone, "student")
    with serving(elsewhere) as server:
        served = ServedStudent(
            backbone, reach_server(ServerSection(url=server.url), backbone, print), tuned / "served"
        )
        ended = []
        first = served.complete(prompts, config, 6, seed=3, on_finished=ended.extend)
        with torch.no_grad():
            for layer in backbone.adapted_layers():
                layer.lora_B["student"].weight.mul_(0.2)
        second = served.complete(prompts, config, 6, seed=3)
        assert server.adapters == {}  # nothing is left behind
        served.close()
    assert sorted(r.prompt_ids for r in ended) == sorted(prompts)
    assert [r.completion_ids for r in first] != [r.completion_ids for r in second]
    tokens = tokens_of(second)
    mine = (
        local.distribution(second)
        .log_probs(slice(0, len(tokens)), len(local.head_VH), 1.0)
        .gather(1, tokens[:, None])[:, 0]
    )
    torch.testing.assert_close(
        mine.detach(), torch.tensor([x for r in second for x in r.logprobs]), atol=1e-4, rtol=1e-4
    )


def test_a_server_that_was_started_anew_gets_the_adapter_again(backbone, tuned, elsewhere):
    student_of(backbone, tuned)
    prompts = [r.prompt_ids for r in ROLLOUTS]
    with serving(elsewhere) as server:
        client = reach_server(
            ServerSection(url=server.url), backbone, print
        )  # many requests in flight miss it at once
        with client.adapter(tuned / "tuned") as name:
            before = client.complete(prompts, 4, backbone.eos_ids, temperature=0, model=name)
            server.adapters.clear()
            again = client.complete(prompts, 4, backbone.eos_ids, temperature=0, model=name)
        client.close()
    assert before == again


def test_a_server_that_takes_no_adapters_is_told_how_to(backbone, tuned, elsewhere):
    with serving(elsewhere) as server:
        server.takes_adapters = False
        client = reach_server(ServerSection(url=server.url), backbone, print)
        with pytest.raises(UsageError, match="status 404") as caught, client.adapter(tuned / "tuned"):
            pass
        client.close()
    assert "opdcl serve" in caught.value.hint


def test_a_recovery_that_samples_on_a_server_trains_and_masks_nothing(backbone, tuned, elsewhere):
    with serving(elsewhere) as server:
        rows = [
            r
            for r in recovery(
                backbone,
                tuned,
                "served",
                {"kind": "base"},
                {"kind": "reverse_kl"},
                server={"url": server.url},
            )
            if "loss" in r
        ]
    assert len(rows) == 4
    assert [r["mismatch"] for r in rows if "mismatch" in r] == [0.0] * sum("mismatch" in r for r in rows)
    assert any("mismatch" in r for r in rows)


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "an adapter"])
def test_an_evaluation_on_a_server_gives_the_answers_of_one_at_hand(backbone, tuned, elsewhere, adapted):
    student_of(backbone, tuned)
    task = load_suite("instructions").task
    answers = []
    with serving(elsewhere) as server:
        for place in (None, {"url": server.url}):
            config = EvalConfig(max_new_tokens=8, server=place)
            lm = BackboneLM(
                backbone,
                "student" if adapted else "base",
                config,
                tuned / f"partial-{place is None}",
                Silent(),
                tuned / "tuned" if adapted else None,
            )
            task.build_all_requests(limit=5, apply_chat_template=True, chat_template=lm.apply_chat_template)
            answers.append(lm.generate_until(task.instances))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_the_factory_reaches_the_server_that_the_settings_name(backbone, elsewhere):
    with serving(elsewhere) as server:
        section = TeacherSection(kind="remote", server={"url": server.url})
        teacher = make_teacher(section, backbone)
        assert isinstance(teacher, RemoteTeacher)
        assert isinstance(teacher.server, Server)
        assert not teacher.is_dynamic
        assert teacher.frozen_copy("base") is teacher
        teacher.close()
