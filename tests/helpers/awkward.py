"""Texts that break a line, or a text in quotes, in one language or another."""

# All that `str.splitlines` takes as the end of a line; YAML knows the last three and the first three.
BREAKS = ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
QUOTES = ("'", '"', "`", '"""', "'''", "\\", "$(x)", "\u201c", "{{x}}", "#", ": ")

AWKWARD = [f"a{mark}b: c" for mark in (*BREAKS, *QUOTES)]
AWKWARD += ["ends in '", 'ends in "', "in \\", '"""', "- a", "@file", "%x", "*x", "&x", "!x", "|", "null"]
