"""The alpha-curve: scale the tuned adapter instead of training it."""

from __future__ import annotations

import json

from opdcl.distill.validation import Validation, describe_kl, kl_score, stream_kl
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import StageDir
from opdcl.training import save_adapter

# The scales that `interpolate` tries.
SCALES = [i / 20 for i in range(20, 0, -1)]


def interpolate(validation: Validation, backbone: Backbone, out: StageDir) -> None:
    """Keep the point of the alpha-curve with the least held-out KL: what recovery must beat, as it costs no training.

    `recover.alpha` picks a point instead (arXiv 2203.05482, 2212.04089).
    """
    validation.write_texts()
    curve, given = [], validation.config.alpha
    scales = [1.0, given] if given else SCALES
    for done, alpha in enumerate(scales, 1):
        with backbone.scaled(alpha):
            curve.append({"alpha": alpha, **validation.held_out_kl()})
        validation.callback.report.progress(done, len(scales))
    best = curve[-1] if given else min(curve, key=kl_score)
    backbone.shrink(best["alpha"])
    save_adapter(backbone, validation.best_adapter)
    chosen = {"alpha": best["alpha"], "curve": curve}
    rows = [
        {"step": 0, "validation": stream_kl(curve[0]), "interpolation": chosen},
        {"step": 1, "validation": {**stream_kl(best), "best": True}},
    ]
    write_atomic(out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    validation.callback.report.note(
        f"the adapter times {best['alpha']:g}{'' if given else ', where held-out KL is least'}: {describe_kl(best)}"
    )
