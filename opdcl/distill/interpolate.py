"""The alpha-curve: scale the tuned adapter instead of training it."""

from __future__ import annotations

import json

from opdcl.distill.validation import Validation, describe_kl, kl_score, stream_kl
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import StageDir
from opdcl.training import save_adapter

# The scales that `interpolate` tries: the same for every layer, then rising or falling with depth.
SCALES = [(i / 20, 0.0) for i in range(20, 0, -1)] + [
    (i / 10, tilt) for tilt in (-1.0, -0.5, 0.5, 1.0) for i in range(8, 1, -1)
]


def interpolate(validation: Validation, backbone: Backbone, out: StageDir) -> None:
    """Keep the point of the alpha-curve with the least held-out KL: what recovery must beat, as it costs no training.

    Scaling the lower and the upper layers differently is the curve's stronger form (arXiv 2203.05482, 2212.04089 scale all
    alike), so it is tried as well. Where `recover.alpha` says which point, it is that one.
    """
    validation.write_texts()
    curve, given = [], validation.config.alpha
    scales = [(1.0, 0.0), (given, 0.0)] if given else SCALES
    for done, (alpha, tilt) in enumerate(scales, 1):
        with backbone.scaled(alpha, tilt):
            curve.append({"alpha": alpha, "tilt": tilt, **validation.held_out_kl()})
        validation.callback.report.progress(done, len(scales))
    best = curve[-1] if given else min(curve, key=kl_score)
    backbone.shrink(best["alpha"], best["tilt"])
    save_adapter(backbone, validation.best_adapter)
    chosen = {"alpha": best["alpha"], "tilt": best["tilt"], "curve": curve}
    rows = [
        {"step": 0, "validation": stream_kl(curve[0]), "interpolation": chosen},
        {"step": 1, "validation": {**stream_kl(best), "best": True}},
    ]
    write_atomic(out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    slope = f", tilted by {best['tilt']:+g} with depth" if best["tilt"] else ""
    validation.callback.report.note(
        f"the adapter times {best['alpha']:g}{slope}{'' if given else ', where held-out KL is least'}: {describe_kl(best)}"
    )
