"""The three stages: fine-tune, recover, evaluate. They share results through the run directory only."""
