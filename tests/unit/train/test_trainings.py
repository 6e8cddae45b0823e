"""Every training as its streams: as the page shows them, and as the steps are planned."""

import pytest
from helpers.command import ROOT
from helpers.trainings import table

from opdcl.config.finetune import FinetuneConfig, ReplaySection
from opdcl.config.recover import RecoverConfig
from opdcl.train.finetune import finetune_streams, planned_steps
from opdcl.train.rollouts import plan_steps

SHARES = [{}, {"general_per_domain": 3}, {"general_per_domain": 0}, {"domain": None}, {"method": "general"}]
WRITERS = [
    {"lmbda": 1.0},
    {"lmbda": 0.0},
    {"lmbda": 0.5, "on_policy": {"domain": True}},
    {"lmbda": 0.0, "loss": {"kind": "cross_entropy"}},
]


def test_the_first_table_of_the_page_has_the_streams_of_every_training():
    lines = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    shown = lines[first : lines.index("", first)]
    assert shown == [*table()]


@pytest.mark.parametrize("settings", [*SHARES, *WRITERS])
def test_a_recoverys_streams_have_their_share_of_the_steps_and_their_authors(settings):
    reverse = {"on_policy": settings.get("on_policy", {}) | {"reverse": 0.25}}
    config = RecoverConfig(**{"domain": "rows.jsonl", "steps": 24, "rollouts": 4} | settings | reverse)
    steps = plan_steps(config, 9, 9 if config.domain and config.method != "general" else 0)
    for name, stream in config.streams().items():
        own = [step for step in steps if step.stream == name]
        assert len(own) == stream.share * len(steps)
        by_student = {step.on_policy for step in own}
        if own:
            assert (True in by_student) == ("student" in stream.author)
            assert (False in by_student) == (stream.author != "student")
        assert bool(stream.loss.reverse) == ("student" in stream.author)


@pytest.mark.parametrize("share", [0, 0.3, 0.7])
def test_a_fine_tunes_streams_have_their_share_of_the_steps(share):
    config = FinetuneConfig(data="d", batch_size=4, replay=ReplaySection(share=share))
    streams = finetune_streams(config)
    domain, replayed = planned_steps(config, 84)
    assert streams["general"].share == pytest.approx(replayed / (domain + replayed), abs=0.005)
    assert sum(stream.share for stream in streams.values()) == pytest.approx(1)
