"""The three verbs: fine-tune, recover, evaluate. They talk through the run directory and know nothing of one another's order."""
