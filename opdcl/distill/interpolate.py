"""The alpha-curve: scale the tuned adapter instead of training it."""

from __future__ import annotations

import json

from opdcl.distill.validation import Validation, describe_kl, kl_score, stream_kl
from opdcl.distill.work import SCALES
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import StageDir
from opdcl.training import save_adapter


def interpolate(validation: Validation, backbone: Backbone, out: StageDir) -> None:
    """Keep the point of the alpha-curve with the least held-out KL, or the one that `recover.alpha` names.

    It costs no training, so recovery must beat it (arXiv 2203.05482, 2212.04089).
    """
    validation.write_held_out()
    alpha = validation.config.alpha
    scales = [1.0, alpha] if alpha else SCALES
    curve: list[dict[str, float]] = []
    for done, scale in enumerate(scales, 1):
        with backbone.scaled(scale):
            curve.append({"alpha": scale, **validation.held_out_kl()})
        validation.callback.report.progress(done, len(scales))
    chosen = curve[-1] if alpha else min(curve, key=kl_score)
    backbone.shrink(chosen["alpha"])
    save_adapter(backbone, validation.best_adapter)
    seal(validation.best_adapter)
    interpolation = {"alpha": chosen["alpha"], "curve": curve}
    rows = [
        {"step": 0, "validation": stream_kl(curve[0]), "interpolation": interpolation},
        {"step": 1, "validation": {**stream_kl(chosen), "best": True}},
    ]
    write_atomic(out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    reason = "" if alpha else ", where held-out KL is least"
    validation.callback.report.note(f"the adapter times {chosen['alpha']:g}{reason}: {describe_kl(chosen)}")
