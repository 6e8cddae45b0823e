"""The modules whose faults the unit tests must find, and the test files (patterns) that belong to each."""

TARGETS = {
    "distill/trainer": [
        "distill/test_grading",
        "distill/test_trainer",
        "distill/test_teachers",
        "distill/test_routes",
    ],
    "distill/rollout_queue": ["distill/test_rollout_queue", "distill/test_trainer", "distill/test_reward"],
    "distill/grading": ["distill/test_grading", "distill/test_trainer", "distill/test_reward"],
    "distill/losses": ["distill/test_losses", "distill/test_reward"],
    "distill/teachers": ["distill/test_teachers", "distill/test_routes", "sampling/test_server"],
    "distill/schedule": ["distill/test_schedule", "stages/test_recover", "distill/test_reward"],
    "distill/validation": ["distill/test_validation", "stages/test_recover", "distill/test_health"],
    "distill/health": ["distill/test_health"],
    "sampling/sample": ["sampling/test_sample"],
    "sampling/decode": ["sampling/test_sample"],
    "sampling/rollout": ["sampling/test_sample", "distill/test_health"],
    "stages/finetune": ["stages/test_finetune*"],
    "stages/recover": [
        "stages/test_recover*",
        "distill/test_teachers",
        "distill/test_routes",
        "distill/test_health",
    ],
    "stages/evaluate": ["stages/test_evaluat*", "distill/test_reward"],
    "results/stats": ["results/test_stats*"],
    "results/intervals": ["results/test_stats*"],
    "results/summary": ["results/test_summary*", "results/test_report"],
    "rundir/hashes": ["rundir/test_hashes", "rundir/test_verify"],
    "rundir/verify": ["rundir/test_verify"],
    "pipeline/plan": ["pipeline/test_plan*"],
}
