"""Decoding on graphs: every family's numbers, the buckets, and a step that never waits for the device."""

import contextlib
import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from opdcl.config.model import LoraSection
from opdcl.model.architecture import architecture
from opdcl.sampling.decoder import COLUMNS, STEPS, Decoder, Layout, bucket, draw
from opdcl.sampling.sample import _KEPT, default_rows, graphs_agree, pick_engine, sample
from opdcl.train.checkpoints import save_adapter
from opdcl.words import Prompt

# What each family adds to the plain decoder: windows, norms of queries and keys, soft caps, biases, sinks.
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24, "attention_bias": True},
    "Gemma2": {"sliding_window": 9, "head_dim": 16, "initializer_range": 0.1},
    "Gemma3": {"sliding_window": 9, "head_dim": 16},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 9},
    "Granite": {},
    "GptOss": {"sliding_window": 9, "head_dim": 16, "num_local_experts": 4},
}
# The rarer ones add nothing that one of these does not have.
EACH_TIME = ("Llama", "Qwen3", "Gemma3", "GptOss")
EVERY_FAMILY = pytest.mark.parametrize(
    "family",
    [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
PROMPTS = [Prompt([1, 2, 3, 4 + i, *range(5, 5 + i * 5 % 23)]) for i in range(9)]


def build(family: str, dtype: torch.dtype = torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    special = {"max_position_embeddings": 999, "eos_token_id": 7, "bos_token_id": 1, "initializer_range": 0.3}
    config = getattr(transformers, f"{family}{'Text' * (family == 'Gemma3')}Config")(
        vocab_size=600, num_key_value_heads=2, **{**sizes, **special, **FAMILIES[family], **settings}
    )
    if family == "GptOss" and dtype == torch.float64:
        dtype = torch.float32  # its grouped products know no doubles
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype).eval()


def ids(rollouts) -> list[list[int]]:
    return [rollout.completion_ids for rollout in rollouts]


def give_adapter(backbone, layers=None):
    """Give the student an adapter that differs from base."""
    backbone.new_adapter(layers or LoraSection(r=2), seed=0)
    for layer in backbone.adapted_layers("student"):
        layer.lora_B["student"].weight.data.normal_()


def ready(model, columns):
    """Return a decoder whose slabs are there, without a prompt."""
    decoder, shape = Decoder(model, 4, columns, 0.9, in_buckets=True), architecture(model.config)
    part = torch.empty(4, shape.kv_heads, 1, shape.head_dim, dtype=model.dtype, device=model.device)
    for layer in decoder.cache.layers:
        layer.lazy_initialization(part, part)
    return decoder


@EVERY_FAMILY
def test_every_familys_draws_have_the_forward_passs_probabilities_with_and_without_buckets(family):
    model = build(family)
    for parameter in model.parameters():
        if (
            parameter.dim() == 1 and parameter.dtype == torch.float64
        ):  # norms and biases start at one and zero, which would hide errors
            parameter.data += 0.2 * torch.randn_like(parameter)
    assert pick_engine(model) == "slab"
    for temperature in (0, 0.9):
        options = {"max_new_tokens": 20, "eos_ids": [7, 9, 11], "temperature": temperature, "seed": 2}
        rollouts = sample(model, PROMPTS, engine="graph", **options)
        assert ids(rollouts) == ids(sample(model, PROMPTS, engine="slab", **options))
    for rollout in rollouts:
        with torch.no_grad():
            logits = model(torch.tensor([rollout.prompt_ids + rollout.completion_ids])).logits[0] / 0.9
        expected = logits.log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]
        drawn = expected.gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), drawn.double(), atol=1e-3, rtol=0)


def test_rows_leave_columns_grow_and_long_prompts_stay_exact():
    model = build("Qwen2")
    tails = [[5 + (7 * i + j) % 590 for j in range(3 + 37 * i)] for i in range(14)]
    prompts = [Prompt([1, 2, 3, *tail]) for tail in tails]
    free = sample(model, prompts, max_new_tokens=40, eos_ids=[], seed=3, engine="slab")
    # Ids that end about half of the sequences, at different steps.
    ends = [free[i].completion_ids[3 + 5 * i] for i in range(7)]
    options = {"max_new_tokens": 40, "eos_ids": ends, "seed": 3}
    seen = []
    step = Decoder.step

    def watched(self, model, rows, columns):
        seen.append((rows, columns))
        step(self, model, rows, columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "step", watched)
        rollouts = sample(model, prompts, engine="graph", **options)
    assert ids(rollouts) == ids(sample(model, prompts, engine="slab", **options))
    assert len({rows for rows, _ in seen}) > 2
    assert len({columns for _, columns in seen}) > 1
    assert all(rows == bucket(rows) and columns % COLUMNS == 0 for rows, columns in seen)


def test_buffers_serve_later_calls_until_the_weights_move(backbone):
    give_adapter(backbone)
    # Greedy: in float32 the rounding of two engines can move a draw to the next token.
    options = {"max_new_tokens": 6, "eos_ids": [2], "temperature": 0}
    with backbone.merged("base") as model:
        base = ids(sample(model, PROMPTS, engine="graph", **options))
        first = _KEPT[model]
        assert ids(sample(model, PROMPTS[:4], engine="graph", **options)) == base[:4]
        assert _KEPT[model] is first
    with backbone.merged("student") as model:
        tuned = ids(sample(model, PROMPTS, engine="graph", **options))
        assert tuned == ids(sample(model, PROMPTS, engine="slab", **options)) != base
        assert _KEPT[model] is not first


def test_an_adapter_that_is_switched_on_is_not_left_out(backbone):
    give_adapter(backbone)
    options = {"max_new_tokens": 6, "eos_ids": [2], "temperature": 0}
    with backbone.state("bare") as model:
        bare = ids(sample(model, PROMPTS, engine="graph", **options))
    adapted = ids(sample(backbone.causal_lm, PROMPTS, engine="graph", **options))
    assert adapted == ids(sample(backbone.causal_lm, PROMPTS, engine="slab", **options)) != bare


def test_kept_sums_stay_where_a_graph_expects_them(backbone):
    backbone.new_adapter(LoraSection(r=2), seed=0)
    backbone.merged_weights = []
    fingerprint, places = backbone.fingerprint(), []
    for state in ("student", "base", "student"):
        for layer in backbone.adapted_layers("student"):
            layer.lora_B["student"].weight.data.normal_()
        with backbone.merged(state) as model:
            kept = sample(model, PROMPTS, max_new_tokens=6, eos_ids=[2], temperature=0, engine="graph")
            places.append(_KEPT[model])
        backbone.merged_weights, sums = None, backbone.merged_weights
        with backbone.merged(state) as model:
            fresh = sample(model, PROMPTS, max_new_tokens=6, eos_ids=[2], temperature=0, engine="slab")
        backbone.merged_weights = sums
        assert ids(kept) == ids(fresh)
    assert places[0] is places[1] is places[2]
    assert backbone.fingerprint() == fingerprint


def test_kept_sums_serve_adapters_of_different_layers(backbone, tmp_path):
    narrow = LoraSection(r=2, target_modules=["v_proj", "up_proj"])
    for layers, folder in ((narrow, tmp_path / "narrow"), (LoraSection(r=2), tmp_path / "wide")):
        backbone.drop_adapters()
        give_adapter(backbone, layers)
        save_adapter(backbone, folder)
    backbone.load_adapter(tmp_path / "narrow", "teacher")
    ids_1T, found = torch.tensor([PROMPTS[5].ids]), {}
    for backbone.merged_weights in (None, []):
        for state in ("student", "teacher", "base"):
            with backbone.merged(state) as model, torch.no_grad():
                found.setdefault(state, []).append(model(ids_1T).logits)
    for fresh, kept in found.values():
        assert torch.equal(fresh, kept)
    assert not torch.equal(found["student"][0], found["teacher"][0])


class RecordedGraph:
    """What a CUDA graph does, on a CPU: capturing changes no value, replaying repeats the step in place."""

    def __init__(self, decoder: Decoder, model):
        self.decoder, self.model = decoder, model

    @contextlib.contextmanager
    def capture(self, *args, **options):
        kept = [(tensor, tensor.clone()) for tensor in self.tensors()]
        yield
        for tensor, value in kept:
            tensor.copy_(value)

    def replay(self) -> None:
        before = [tensor.data_ptr() for tensor in self.tensors()]
        self.decoder.step(self.model, 4, COLUMNS)
        assert [tensor.data_ptr() for tensor in self.tensors()] == before

    def tensors(self) -> list[torch.Tensor]:
        slabs = [slab for layer in self.decoder.cache.layers for slab in (layer.keys, layer.values)]
        return [value for value in vars(self.decoder).values() if isinstance(value, torch.Tensor)] + slabs


@torch.no_grad()
def test_a_captured_step_repeats_itself_at_the_addresses_that_it_was_captured_with(backbone, monkeypatch):
    model, layout = backbone.causal_lm, Layout([], [prompt.ids for prompt in PROMPTS[:3]])
    uniform = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    plain, captured = (Decoder(model, 4, COLUMNS, 0.9, in_buckets=True) for _ in range(2))
    for decoder in (plain, captured):
        decoder.start(model, layout, uniform)
    plain.run(model, 5, 4, COLUMNS)
    graph, stream = RecordedGraph(captured, model), SimpleNamespace(wait_stream=lambda other: None)
    for name, double in {
        **{"device": contextlib.nullcontext, "stream": contextlib.nullcontext, "graph": graph.capture},
        **{"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": lambda: graph},
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    captured._capture(model, 4, COLUMNS)
    for _ in range(5):
        captured.graphs[4, COLUMNS].replay()
    assert captured.tokens_RT[:3, :6].tolist() == plain.tokens_RT[:3, :6].tolist()


def test_a_broken_batch_leaves_nothing_to_the_next(backbone):
    model = backbone.causal_lm
    options = {"max_new_tokens": 6, "eos_ids": [2], "seed": 1}
    sound = ids(sample(model, PROMPTS, engine="graph", **options))
    for layer in _KEPT[model].cache.layers:
        layer.keys.fill_(torch.nan)
    assert ids(sample(model, PROMPTS, engine="graph", **options)) == sound


@EVERY_FAMILY
def test_a_step_neither_waits_for_the_device_nor_depends_on_a_value(family):
    with FakeTensorMode():
        # Under fake tensors there are no values: whatever asks for one, a shape or a branch, fails.
        model = build(family, torch.bfloat16)
        decoder = ready(model, 2 * COLUMNS)
        with torch.no_grad():
            decoder.step(model, 4, COLUMNS)
            decoder.step(model, 2, 2 * COLUMNS)


class Kernels(TorchDispatchMode):
    """Count what a GPU would launch: one for each norm and attention, none for views and empty tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not (function.is_view or "empty" in str(function) or "_unsafe_view" in str(function))
        return function(*args, **(kwargs or {}))

    def once(self, function):
        def call(*args, **kwargs):
            before = self.count
            found = function(*args, **kwargs)
            self.count = before + 1
            return found

        return call


@pytest.mark.parametrize(("family", "together"), [("Llama", True), ("Qwen3", True), ("Llama", False)])
def test_a_layer_takes_few_kernels_on_a_gpu(monkeypatch, family, together):
    counts = []
    with torch.no_grad():
        for layers in (2, 4):
            model = build(family, torch.bfloat16, num_hidden_layers=layers, attention_bias=False).to("meta")
            if together:  # as `Backbone.merged` puts the sums
                for layer in model.model.layers:
                    weights = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
                    whole = weights[0].weight.new_empty(sum(m.weight.numel() for m in weights))
                    for m, part in zip(
                        weights, whole.split([m.weight.numel() for m in weights]), strict=True
                    ):
                        m.weight.data = part.view_as(m.weight)
            decoder = ready(model, COLUMNS)
            with Kernels() as kernels:
                for name in ("rms_norm", "scaled_dot_product_attention"):
                    function = getattr(torch.nn.functional, name)
                    monkeypatch.setattr(torch.nn.functional, name, kernels.once(function))
                decoder.step(model, 4, COLUMNS)
            counts.append(kernels.count)
            monkeypatch.undo()
    per_layer = (counts[1] - counts[0]) / 2
    assert per_layer == {("Llama", True): 15, ("Qwen3", True): 17, ("Llama", False): 19}[family, together]


def test_fake_tensors_notice_a_step_that_asks_for_a_value():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        int(torch.zeros(1, dtype=torch.long))


def test_buckets_are_few_and_waste_at_most_a_third():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 33, 48, 49, 64, 65, 200)] == [
        *(1, 2, 3, 4, 6, 8, 48, 48, 64, 64, 96, 256)
    ]
    assert all(n <= bucket(n) < 1.5 * n or n < 3 for n in range(1, 400))


def test_steps_past_the_last_token_are_never_read(backbone):
    rollouts = sample(backbone.causal_lm, PROMPTS, max_new_tokens=STEPS + 3, eos_ids=[], engine="graph")
    assert {len(r.completion_ids) for r in rollouts} == {STEPS + 3}


@pytest.fixture
def unchecked(monkeypatch):
    """Forget which models' graphs were checked."""
    monkeypatch.setattr("opdcl.sampling.sample._GRAPHS_AGREE", weakref.WeakKeyDictionary())


@pytest.mark.usefixtures("unchecked")
def test_graphs_that_do_what_the_forward_pass_does_are_used(backbone, caplog):
    assert graphs_agree(backbone.causal_lm, PROMPTS)
    assert caplog.text == ""


@pytest.mark.usefixtures("unchecked")
def test_graphs_that_repeat_their_last_token_are_found_out_and_checked_once(backbone, monkeypatch, caplog):
    # As an empty graph does: it computes nothing and stores what was there.
    def stale(self, model, count, rows, columns):
        for _ in range(count):
            self.tokens_RT[:rows].index_copy_(1, self.step_1, self.token_R[:rows, None])
            self.step_1 += 1

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "run", stale)
        assert not graphs_agree(backbone.causal_lm, PROMPTS)
    assert "CUDA graphs do not work here" in caplog.text
    assert "nats" in caplog.text
    assert not graphs_agree(backbone.causal_lm, PROMPTS)


@pytest.mark.usefixtures("unchecked")
def test_a_fault_of_the_capture_is_told_and_avoided(backbone, monkeypatch, caplog):
    def fault(self, model, count, rows, columns):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Decoder, "run", fault)
    assert not graphs_agree(backbone.causal_lm, PROMPTS)
    assert "(CUDA error: operation not permitted when stream is capturing)" in caplog.text


@pytest.mark.parametrize(
    ("rope", "engine"),
    [
        ({"rope_type": "default"}, "graph"),
        ({"rope_type": "dynamic", "factor": 2.0}, "slab"),
        (
            {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}},
            "slab",
        ),
    ],
)
def test_on_a_gpu_graphs_decode_unless_positions_move(backbone, rope, engine):
    config = copy.deepcopy(backbone.causal_lm.config)
    config.rope_parameters = rope
    # Only the device and the config are read.
    on_gpu = SimpleNamespace(config=config, device=torch.device("cuda", 1))
    assert pick_engine(on_gpu) == engine
    assert pick_engine(SimpleNamespace(config=config, device=torch.device("cpu"))) == "slab"


@pytest.mark.parametrize("engine", ["graph", "slab"])
@pytest.mark.parametrize("at", [1, 7])
def test_out_of_memory_halves_the_rows_and_changes_no_token(backbone, monkeypatch, caplog, engine, at):
    how = {"max_new_tokens": 12, "eos_ids": backbone.eos_ids, "seed": 3, "engine": engine}
    expected = sample(backbone.causal_lm, PROMPTS, **how)
    steps = []

    def scarce(logits_BV, temperature, uniform_B):
        steps.append(len(logits_BV))
        if len(logits_BV) > 4 and len(steps) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(logits_BV, temperature, uniform_B)

    monkeypatch.setattr("opdcl.sampling.decoder.draw", scarce)
    found = sample(backbone.causal_lm, PROMPTS, **how)
    assert ids(found) == ids(expected)
    assert "out of memory while sampling: 4 sequences at once instead of 9" in caplog.text
    if engine == "graph":  # buffers for nine are not kept
        assert _KEPT[backbone.causal_lm].rows < 9


def test_one_sequence_that_does_not_fit_is_a_fault(backbone, monkeypatch):
    def scarce(logits_BV, temperature, uniform_B):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("opdcl.sampling.decoder.draw", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        sample(backbone.causal_lm, PROMPTS, max_new_tokens=4, eos_ids=backbone.eos_ids, engine="slab")


def test_a_gpu_decodes_as_many_rows_as_half_of_its_free_memory_holds(backbone, monkeypatch):
    shape = architecture(backbone.causal_lm.config)
    token = 2 * shape.layers * shape.key_width * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 300 * token * 50, 10**12))
    on_gpu = SimpleNamespace(
        config=backbone.causal_lm.config, device=torch.device("cuda"), dtype=torch.float32
    )
    assert default_rows(on_gpu, 300) == 50
    assert default_rows(on_gpu, 3) == 512
    assert default_rows(on_gpu, 10**6) == 1
    assert default_rows(backbone.causal_lm, 300) == 96
