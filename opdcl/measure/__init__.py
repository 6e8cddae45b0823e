"""The evaluation: what base, tuned and recovered answer, and how that is scored."""
