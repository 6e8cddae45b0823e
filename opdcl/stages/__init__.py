"""The three stages: fine-tune, recover, evaluate. Each knows only its run directory, not the others."""
