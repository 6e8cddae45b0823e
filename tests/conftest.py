"""A two-layer model with the real tokenizer, made once per session."""

import os
from pathlib import Path

os.environ.setdefault("TERM", "dumb")
os.environ.pop("FORCE_COLOR", None)
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from helpers.tiny import make_model


def pytest_configure(config: pytest.Config) -> None:
    """Unpack the embedded model once, before several workers want it."""
    if not hasattr(config, "workerinput"):
        from opdcl.model.embedded import embedded_folder

        embedded_folder()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model, see `tiny`."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def backbone(tiny_model: Path):
    """The tiny model, loaded anew."""
    from opdcl.config.model import ModelConfig
    from opdcl.model.backbone import Backbone

    return Backbone.load(ModelConfig(id=str(tiny_model), dtype="float32"))
