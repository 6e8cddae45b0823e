"""Random sequences of commands: 4 of them here, 300 with `make walk`."""

import os

import pytest
from helpers.walk import Walk, make_world

pytestmark = pytest.mark.nightly

SEQUENCES = int(os.environ.get("OPDCL_WALK", "4"))


@pytest.fixture(scope="module")
def world(tiny_model, tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("walk") / "world", tiny_model)


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_every_command_ends_cleanly_and_its_hint_leads_on(seed, world, tiny_model, tmp_path):
    walk = Walk(seed, world, tiny_model, tmp_path / "walk")
    try:
        walk.go()
    except BaseException as fault:
        fault.add_note("\n".join(walk.story))
        raise
