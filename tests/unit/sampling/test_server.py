"""A teacher on a server gives the local teacher's distribution, whatever the network does, or an error."""

import subprocess
import sys
import threading
import time

import httpx2
import pytest
import torch
from helpers.recovering import Silent, short_recovery, train
from helpers.serving import serving
from helpers.teaching import taught

from opdcl.config.evaluate import EvalConfig
from opdcl.config.model import SERVED_TOKENS, WHOLE_VOCABULARY, ModelConfig, ServerSection
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.suites import load_suite
from opdcl.errors import OpdclError, UsageError
from opdcl.measure.evaluate import Asking, write_answers
from opdcl.model.distributions import HiddenStates, TopTokens, join
from opdcl.model.load_backbone import load_backbone
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.sampling.server import KEY, _key_of, check_access
from opdcl.train.external_teachers import (
    RemoteTeacher,
    ServedStudent,
    make_teacher,
    reach_own_model,
    reach_server,
)
from opdcl.train.losses import ScoredTokens, token_logprobs, token_losses
from opdcl.train.teachers import Teacher
from opdcl.words import WHOLE, Loss, Prompt, Rollout

K = SERVED_TOKENS
ROLLOUTS = [
    Rollout(Prompt([1, 520, 3690, 198, 7 + i]), [*range(60 + 9 * i, 63 + 11 * i)], [], True) for i in range(5)
]


@pytest.fixture
def elsewhere(tiny_model):
    """A second copy of the model, as a server would hold it."""
    return load_backbone(ModelConfig(id=str(tiny_model), dtype="float32"))


@pytest.fixture
def server(elsewhere):
    with serving(elsewhere) as started:
        yield started


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Return a function that sets how long a client waits: seconds for an answer, and for the server."""

    def limits(timeout=5.0, patience=20.0):
        monkeypatch.setattr("opdcl.sampling.server.TIMEOUT", timeout)
        monkeypatch.setattr("opdcl.sampling.server.PATIENCE", patience)

    limits()
    return limits


def teacher_of(server, backbone, named=K, model=None):
    client = reach_server(server.url, backbone, lambda text: None, named, model)
    return RemoteTeacher(backbone, client)


def tokens_of(rollouts):
    return torch.tensor([t for r in rollouts for t in r.completion_ids])


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "policy_gradient"},
        {"kind": "top_k", "k": K},
        {"kind": "top_k", "k": 5},
        {"kind": "top_k", "k": 60},
        {"kind": "forward_kl"},
        {"kind": "reverse_kl"},
        {"kind": "jsd", "beta": 0.1},
    ],
    ids=["sampled token", "top 20", "top 5", "top 60", "whole forward", "whole reverse", "whole jsd"],
)
def test_loss_and_gradient_equal_those_of_the_same_model_locally(backbone, server, impatient, loss):
    impatient(timeout=60)
    local = Teacher(backbone, "base")
    tokens, head = tokens_of(ROLLOUTS), local.head_VH
    student = local.states(ROLLOUTS) + 0.3 * torch.randn(
        len(tokens), head.shape[1], generator=torch.Generator().manual_seed(0)
    )
    graded = HiddenStates(student, head).log_probs(slice(0, len(tokens)), len(head))
    sampler = graded.gather(1, tokens[:, None])[:, 0] - 0.1
    server.most_logprobs = -1
    remote = teacher_of(server, backbone, named=RecoverConfig(loss=loss).served_tokens)
    results = []
    for distribution in (local.distribution(ROLLOUTS), remote.distribution(ROLLOUTS)):
        states = student.clone().requires_grad_()
        graded = ScoredTokens(tokens, sampler, torch.zeros(len(tokens)))
        losses = token_losses(HiddenStates(states, head), distribution, graded, Loss(**loss))
        losses.loss.sum().backward()
        results.append((losses.loss.detach(), states.grad, losses.logprob))
        if loss["kind"] in WHOLE:
            results[-1] += (losses.kl, losses.teacher_entropy)
    remote.close()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert float(results[0][0].abs().max()) > 0.01


def test_top_tokens_are_a_distribution_with_the_exact_named_probabilities():
    torch.manual_seed(0)
    whole = (3 * torch.randn(40, 200)).log_softmax(-1)
    token = torch.randint(200, (40,))
    top = whole.topk(K)
    known = TopTokens(token, whole.gather(1, token[:, None])[:, 0], top.indices, top.values)
    log_q = known.log_probs(slice(0, 40), 200)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(40), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_q.gather(1, top.indices), top.values)
    torch.testing.assert_close(log_q.gather(1, token[:, None])[:, 0], known.logprob_N)
    everywhere = slice(0, 40)
    assert (known.entropy(everywhere, log_q) <= -(whole.exp() * whole).sum(1) + 1e-4).all()
    student = (3 * torch.randn(40, 200)).log_softmax(-1)
    assert (known.kl(everywhere, student, log_q) <= (student.exp() * (student - whole)).sum(1) + 1e-4).all()
    assert float(known.kl(everywhere, student, log_q).min()) > 0
    torch.testing.assert_close(known.kl(everywhere, whole, log_q), torch.zeros(40), atol=1e-5, rtol=0)
    even = torch.full((1, 200), 1 / 200).log()
    unsure = TopTokens(token[:1], even[:, 0], torch.arange(K)[None], even[:, :K])
    assert float(unsure.entropy(slice(0, 1), unsure.log_probs(slice(0, 1), 200))) == pytest.approx(
        float(torch.tensor(200).log()), rel=1e-4
    )
    lengths = [10, 0, 25, 5]
    again = join(known.split(lengths))
    torch.testing.assert_close(again.log_probs(slice(0, 40), 200), log_q)


# What a server may do wrong -> what the error says of one that does nothing else.
FAULTS = {
    500: "no answer from the server.*status 500",
    503: "no answer from the server.*status 503",
    429: "no answer from the server.*status 429",
    "slow": "no answer from the server",
    "truncated": "server",
    "short": "does not answer as it should: log-probabilities of",
    "other tokens": "read other tokens",
    "nan": "nan is no log-probability",
    "few": "are named where 20",
    "no choice": "cannot be read",
    "certain of everything": "a probability of",
    "beyond": "is none of",
}
REFUSALS = {400: "refuses: status 400.*this is a 400", 401: "refuses: status 401"}


@pytest.mark.parametrize(("fault", "message"), (FAULTS | REFUSALS).items(), ids=str)
def test_a_bad_answer_is_requested_again_and_a_server_that_gives_no_other_is_an_error_with_the_reason(
    backbone, server, impatient, fault, message
):
    impatient(timeout=0.4 if fault == "slow" else 5, patience=1)
    remote = teacher_of(server, backbone)
    if fault in FAULTS:
        good = remote.distribution(ROLLOUTS[:2])
        remote.server._scored.cache_clear()
        before, server.faults = len(server.seen), [fault]
        again = remote.distribution(ROLLOUTS[:2])
        assert len(server.seen) == before + 3  # one of two requests was sent twice
        assert torch.equal(again.logprob_N, good.logprob_N)
        assert torch.equal(again.top_logprob_NK, good.top_logprob_NK)
    server.faults = [fault] * 60
    with pytest.raises(OpdclError, match=message) as caught:
        remote.distribution(ROLLOUTS[2:3])
    remote.close()
    assert caught.value.hint
    assert (KEY in caught.value.hint) == (fault == 401)
    assert server.url in caught.value.message


def test_an_unreachable_server_is_waited_for(backbone, elsewhere):
    messages = []
    with serving(elsewhere) as server:
        port = server.server_address[1]
        client = reach_server(server.url, backbone, messages.append)
        remote = RemoteTeacher(backbone, client)
        good = remote.distribution(ROLLOUTS)
        remote.server._scored.cache_clear()

    def restart():
        time.sleep(1)
        with serving(elsewhere, port):
            done.wait(20)

    done = threading.Event()
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        again = remote.distribution(ROLLOUTS)
    finally:
        done.set()
        thread.join()
        remote.close()
    assert torch.equal(again.top_logprob_NK, good.top_logprob_NK)
    assert len(messages) == 1
    assert "waiting for the server at http://127.0.0.1" in messages[0]


def test_an_outage_does_not_count_as_an_invalid_answer(backbone, server):
    remote = teacher_of(server, backbone)
    server.faults = [503, 503, "nan"]
    assert len(remote.distribution(ROLLOUTS[:1]).logprob_N) == len(ROLLOUTS[0].completion_ids)
    server.faults = ["aborted"]
    (rollout,) = remote.complete([ROLLOUTS[0].prompt], max_new_tokens=5, seed=1)
    remote.close()
    assert len(rollout.completion_ids) == 5 or rollout.finished


def test_a_process_exits_without_waiting_for_an_answer(server):
    script = (
        "import sys, time\n"
        "from opdcl.sampling.server import Server\n"
        "server = Server(sys.argv[1], 49152, model='teacher')\n"
        "server.score([1, 2], [3])\ntime.sleep(1)\nserver.close()\nprint('closed', flush=True)\n"
    )
    server.slow, server.faults = 60, ["slow"]
    process = subprocess.Popen([sys.executable, "-c", script, server.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "closed\n"
    process.wait(timeout=30)
    assert process.returncode == 0


def test_a_server_with_another_model_is_refused(backbone, elsewhere, server):
    reach_own_model(server.url, backbone, print).close()
    with torch.no_grad():
        elsewhere.causal_lm.model.layers[0].mlp.up_proj.weight.mul_(-1)
    with pytest.raises(UsageError, match="serves another model as teacher"):
        reach_own_model(server.url, backbone, print)


def test_close_ends_pending_requests(backbone, elsewhere, impatient):
    impatient(patience=600)
    with serving(elsewhere) as server:
        remote = teacher_of(server, backbone)
    future = remote.server.score([1, 2], [3])
    time.sleep(0.3)
    started = time.monotonic()
    remote.close()
    with pytest.raises(OpdclError):
        future.get(timeout=10)
    assert time.monotonic() - started < 10


def test_identical_requests_are_sent_once(backbone, server):
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


@pytest.mark.parametrize(
    ("owner", "gets_it"),
    [
        (None, True),  # a server on this machine
        ("{url}/v1/", True),
        ("http://127.0.0.1:1", False),
        ("https://127.0.0.1", False),
        ("http://localhost:{port}", False),
    ],
)
def test_the_key_goes_to_one_server_and_never_in_a_dry_run(server, monkeypatch, owner, gets_it):
    monkeypatch.setenv(KEY, " s3cret-key ")
    if owner:
        monkeypatch.setenv("OPDCL_SERVER_URL", owner.format(url=server.url, port=server.server_port))
    check_access(server.url, 1, "teacher")
    check_access(server.url, 1, "teacher", sends_key=False)
    keys = [key for _, _, key in server.seen]
    assert keys == ["Bearer s3cret-key" if gets_it else None, None]
    server.faults = [401]
    if gets_it:
        check_access(server.url, sends_key=False)  # the run will send it
        server.faults = [401]
        with pytest.raises(UsageError, match="status 401") as caught:
            check_access(server.url)
        assert "s3cret" not in caught.value.message + caught.value.hint
        return
    with pytest.raises(UsageError, match="status 401") as caught:
        check_access(server.url, sends_key=False)
    assert f"OPDCL_SERVER_URL={server.url}" in caught.value.hint


@pytest.mark.parametrize("host", ["teacher", "10.0.0.1", "127.0.0.1.evil.example", "evil.example"])
def test_without_its_server_the_key_stays_on_this_machine(monkeypatch, host):
    monkeypatch.setenv(KEY, "s3cret-key")
    assert _key_of(httpx2.URL(f"http://{host}:8000/v1")) == ""
    monkeypatch.setenv("OPDCL_SERVER_URL", f"http://{host}:8000")
    assert _key_of(httpx2.URL(f"http://{host}:8000/v1/")) == "s3cret-key"
    for other in (f"https://{host}:8000", f"http://{host}", "http://127.0.0.1:8000", f"http://{host}.x:8000"):
        assert _key_of(httpx2.URL(other)) == ""
    monkeypatch.setenv("OPDCL_SERVER_URL", "http://[::")
    with pytest.raises(UsageError, match="OPDCL_SERVER_URL is no address"):
        _key_of(httpx2.URL("http://a"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://user:word@host/v1", "http://"])
def test_an_invalid_url_or_one_with_a_password_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        ServerSection(url=url)


def test_another_tokenizer_or_an_ambiguous_model_is_refused(backbone, server):
    server.extra_ids = [5]
    with pytest.raises(UsageError, match="another tokenizer"):
        teacher_of(server, backbone)
    server.extra_ids, server.names = [], ["one", "two"]
    with pytest.raises(UsageError, match="serves one, two"):
        teacher_of(server, backbone)
    assert teacher_of(server, backbone, model="two").server.model == "two"


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        ({"kind": "forward_kl"}, 20),
        ({"kind": "jsd"}, 100),
        ({"kind": "top_k", "k": 101}, 100),
        ({"kind": "top_k", "k": 20}, 20),
        ({"kind": "policy_gradient"}, 20),
    ],
)
def test_a_loss_that_needs_more_than_a_server_sends_is_refused_at_the_start(backbone, server, loss, most):
    server.most_logprobs = most
    section = TeacherSection(kind="remote", server={"url": server.url, "model": "teacher"})
    config = RecoverConfig(loss=loss, **taught(section, "general"))

    def reach():
        # As a dry run does.
        check_access(section.server.url, config.served_tokens, section.server.model)
        make_teacher(section, backbone, named=config.served_tokens).close()

    if loss in ({"kind": "top_k", "k": 20}, {"kind": "policy_gradient"}):
        reach()
        return
    for attempt in (lambda: make_teacher(section, backbone, named=config.served_tokens), reach):
        with pytest.raises(UsageError, match="greater than max allowed") as caught:
            attempt()
        assert "--max-logprobs -1" in caught.value.hint
        assert "top_k with recover.loss.k at most 20" in caught.value.hint


@pytest.mark.parametrize("fault", ["few", "certain of everything", "nan"])
def test_a_whole_distribution_that_is_none_is_requested_again(backbone, server, impatient, fault):
    impatient(timeout=60)
    server.most_logprobs = -1
    remote = teacher_of(server, backbone, named=WHOLE_VOCABULARY)
    good = remote.distribution(ROLLOUTS[:1])
    remote.server._scored.cache_clear()
    server.faults = [fault]
    again = remote.distribution(ROLLOUTS[:1])
    assert server.faults == []
    assert torch.equal(again.log_q_NV, good.log_q_NV)
    assert good.log_q_NV.shape == (len(ROLLOUTS[0].completion_ids), len(backbone.tokenizer))
    before = len(server.seen)
    remote.prefetch(ROLLOUTS)  # whole ones are large: none is requested before it is needed
    time.sleep(0.1)
    assert len(server.seen) == before
    remote.close()


def spoil(weight, by):
    with torch.no_grad():
        weight.mul_(by)


@pytest.mark.parametrize(
    ("named", "most", "sends"), [(K, 20, "the 20 likeliest tokens"), (-1, -1, "whole distributions")]
)
def test_a_served_teacher_is_compared_with_base_first(
    backbone, elsewhere, server, impatient, named, most, sends
):
    impatient(timeout=60)
    server.most_logprobs = most
    section, said = TeacherSection(kind="remote", server={"url": server.url}), []

    def reach():
        make_teacher(section, backbone, notify=said.append, named=named).close()

    reach()
    spoil(elsewhere.causal_lm.model.layers[0].mlp.up_proj.weight, -1)
    reach()
    same, other = said
    assert f"sends {sends}; it is base: on a text" in same
    assert f"sends {sends}; it is another model than base: on a text" in other
    spoil(elsewhere.causal_lm.model.norm.weight, 40)
    with pytest.raises(UsageError, match="nats per token less than base does") as caught:
        reach()
    assert "--dtype" in caught.value.hint


def test_remote_needs_a_server():
    with pytest.raises(ValueError, match="kind remote needs server"):
        TeacherSection(kind="remote")


def recovery(backbone, tuned, name, general_teacher, loss, **settings):
    config = short_recovery(
        tuned,
        **taught(general_teacher, "general"),
        loss=loss,
        steps=4,
        health=False,  # a random model may trip a limit
        lmbda=1.0,
        sample_ahead=2,
        validate_every=2,
        **settings,
    )
    return read_jsonl(train(backbone, tuned, name, config).metrics)


@pytest.fixture
def no_thread_left():
    """Fail if a thread of the test outlives it, except tqdm's monitor, which lives as long as the process."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 20
    while left := [t for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.usefixtures("no_thread_left")
def test_a_recovery_with_a_remote_base_takes_the_steps_of_a_local_one(backbone, tuned, server):
    loss = {"kind": "top_k", "k": K}
    section = {"kind": "remote", "server": {"url": server.url}}
    # Each bad answer goes to a different request.
    server.faults = [None, 500, None, "nan", None, None, "truncated"]
    remote = recovery(backbone, tuned, "remote", section, loss)
    rows = [r for r in remote if "loss" in r]
    assert [r["stream"] for r in rows] == ["general", "domain"] * 2
    assert all(r["kl"] > 0 for r in rows if r["stream"] == "general")
    local = [r for r in recovery(backbone, tuned, "local", {"kind": "base"}, loss) if "loss" in r]
    assert rows[0]["grad_norm"] > 0
    assert len(local) == len(rows)


def student_of(backbone, tuned):
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)


def test_a_server_samples_the_student_with_its_current_adapter(backbone, tuned, server):
    student_of(backbone, tuned)
    prompts = [r.prompt for r in ROLLOUTS]
    local = Teacher(backbone, "student")
    served = ServedStudent(backbone, reach_server(server.url, backbone, print), tuned / "served")
    ended = []
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    first = served.complete(prompts, **options, on_finished=ended.extend)
    with torch.no_grad():
        for layer in backbone.adapted_layers():
            layer.lora_B["student"].weight.mul_(0.2)
    second = served.complete(prompts, **options)
    greedy = [writer.complete(prompts, max_new_tokens=6, temperature=0.0) for writer in (served, local)]
    assert server.adapters == {}
    served.close()
    assert sorted(r.prompt_ids for r in ended) == sorted(p.ids for p in prompts)
    assert [r.completion_ids for r in first] != [r.completion_ids for r in second]
    assert [r.completion_ids for r in greedy[0]] == [r.completion_ids for r in greedy[1]]
    assert [r.prompt for r in second] == prompts
    assert all(r.finished == (r.completion_ids[-1] in backbone.eos_ids) for r in second)
    tokens = tokens_of(second)
    local_N = token_logprobs(local.distribution(second), tokens, len(local.head_VH))
    server_N = torch.tensor([x for r in second for x in r.logprobs])
    torch.testing.assert_close(local_N, server_N, atol=1e-4, rtol=1e-4)


def test_a_restarted_server_gets_the_adapter_again(backbone, tuned, server):
    student_of(backbone, tuned)
    prompts = [r.prompt for r in ROLLOUTS]
    client = reach_server(server.url, backbone, print)
    with client.adapter(tuned / "tuned") as name:
        before = client.complete(prompts, 4, backbone.eos_ids, temperature=0, model=name)
        server.adapters.clear()  # many requests in flight miss it at once
        again = client.complete(prompts, 4, backbone.eos_ids, temperature=0, model=name)
    client.close()
    assert before == again


def test_a_server_without_adapters_is_refused_with_a_hint(backbone, tuned, server):
    server.takes_adapters = False
    client = reach_server(server.url, backbone, print)
    with pytest.raises(UsageError, match="status 404") as caught, client.adapter(tuned / "tuned"):
        pass
    client.close()
    assert "opdcl serve" in caught.value.hint


@pytest.mark.usefixtures("no_thread_left")
def test_a_recovery_that_samples_on_a_server_has_no_mismatch(backbone, tuned, server):
    place, loss = {"url": server.url}, {"kind": "reverse_kl"}
    rows = recovery(backbone, tuned, "served", {"kind": "base"}, loss, server=place)
    rows = [r for r in rows if "loss" in r]
    assert len(rows) == 4
    assert [r["mismatch"] for r in rows if "mismatch" in r] == [0.0] * sum("mismatch" in r for r in rows)
    assert any("mismatch" in r for r in rows)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "an adapter"])
def test_an_evaluation_on_a_server_gives_the_local_answers(backbone, tuned, server, adapted):
    student_of(backbone, tuned)
    requests = load_suite("instructions").requests(5, backbone.tokenizer)
    answers = []
    for place in (None, {"url": server.url}):
        config = EvalConfig(max_new_tokens=8, server=place, batch_size=320)
        run, adapter = RunDir(tuned / f"run-{place is None}"), tuned / "tuned" if adapted else None
        asking = Asking(config, backbone, run, "state", "suite", Silent(), adapter)
        answers.append([answer["response"] for answer in write_answers(asking, requests)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


@pytest.mark.usefixtures("no_thread_left")
def test_a_sampled_evaluation_on_a_server_draws_the_same_again_also_after_an_interrupt(
    backbone, tuned, server, monkeypatch
):
    monkeypatch.setattr("opdcl.measure.ask.SAMPLING_BATCH", 2)
    drawn, greedy = (load_suite(name) for name in ("instructions_sampled", "instructions"))

    def written(suite, name, kept=0):
        asking = Asking(config, backbone, RunDir(tuned), "base", name, Silent())
        lines = asking.file.read_text().splitlines(keepends=True)[:kept] if kept else []
        write_atomic(asking.file, "".join(lines))
        found = write_answers(asking, suite.requests(5, backbone.tokenizer))
        return [answer["response"] for answer in found]

    config = EvalConfig(max_new_tokens=8, server={"url": server.url}, batch_size=320)
    answers = [written(drawn, *kept) for kept in (("a", 0), ("b", 0), ("a", 3))]
    assert written(greedy, "c") != answers[0]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1
