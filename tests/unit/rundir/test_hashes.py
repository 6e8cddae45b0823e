"""Hashes of values and files: what they depend on, and what not."""

import hashlib

import pytest

from opdcl.errors import UsageError
from opdcl.rundir.hashes import SEAL, damage, file_hash, hash_files, hash_value, read_seal, seal, write_seal


def test_the_order_of_keys_does_not_change_a_values_hash_and_its_values_do():
    assert hash_value({"a": 1, "b": [2, 3]}) == hash_value({"b": [2, 3], "a": 1})
    assert hash_value({"a": 1, "b": [2, 3]}) != hash_value({"a": 1, "b": [3, 2]})
    assert len(hash_value("a")) == 16  # as recorded in every run directory


def test_a_hash_of_files_depends_on_names_contents_and_order(tmp_path):
    one, two, same = (tmp_path / name for name in ("one", "two", "same"))
    for file, text in ((one, "first"), (two, "second"), (same, "first")):
        file.write_text(text)
    hashes = [hash_files(files) for files in ([one, two], [two, one], [one, same], [one], [same])]
    assert len(set(hashes)) == 5
    assert hash_files([one, two]) == hashes[0]
    two.write_text("third")
    assert hash_files([one, two]) != hashes[0]


def test_a_files_hash_is_the_one_that_sha256sum_prints(tmp_path):
    (tmp_path / "file").write_bytes(b"weights")
    assert file_hash(tmp_path / "file") == hashlib.sha256(b"weights").hexdigest()


def test_a_seal_that_was_changed_together_with_a_file_is_seen(tmp_path):
    (tmp_path / "weights").write_text("as they were made")
    seal(tmp_path)
    assert damage(tmp_path) == ""
    before = file_hash(tmp_path / "weights")
    (tmp_path / "weights").write_text("as somebody would have them")
    text = (tmp_path / SEAL).read_text()
    (tmp_path / SEAL).write_text(text.replace(before, file_hash(tmp_path / "weights")))
    assert damage(tmp_path) == "its seal is missing or unreadable"


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "link", "\0"])
def test_a_seal_tells_nothing_of_files_elsewhere(tmp_path, name):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link").symlink_to("../secret")
    (folder / "own").write_text("y")
    write_seal(folder, {"own": file_hash(folder / "own")})
    assert damage(folder) == ""
    for digest in ("0", file_hash(tmp_path / "secret")):
        write_seal(folder, {"own": file_hash(folder / "own"), name: digest})
        with pytest.raises(UsageError, match="cannot vouch"):
            read_seal(folder)
        assert damage(folder) == "its seal is missing or unreadable"
