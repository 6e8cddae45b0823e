"""What the system or a library reports becomes a sentence that names the right path, and a hint."""

import contextlib
import errno
import os
import shutil

import pytest
import torch

from opdcl.errors import EnvironmentFault, OpdclError, UsageError, nearest_path
from opdcl.faults import translate
from opdcl.rundir.files import folder_appears_whole, write_atomic


def raised(action) -> OpdclError:
    """Return what a user reads when this fails."""
    try:
        action()
    except (OSError, RuntimeError) as fault:
        return translate(fault)
    raise AssertionError("nothing failed")


def test_every_error_of_the_system_about_a_file_is_a_sentence():
    for number, name in errno.errorcode.items():
        told = translate(OSError(number, os.strerror(number), "/runs/mine/metrics.jsonl"))
        assert "Errno" not in told.message, name
        assert not told.message.startswith(("OSError", "BlockingIOError")), name
        assert told.hint, name
        if not isinstance(told, EnvironmentFault):  # that one is about the machine
            assert told.exit_code in (1, 2), name


def test_a_path_through_a_file_is_named(tmp_path):
    (tmp_path / "note").write_text("mine")
    told = raised(lambda: write_atomic(tmp_path / "note" / "config.json", "{}"))
    assert isinstance(told, UsageError)
    assert str(tmp_path / "note") in told.message


def test_a_folder_in_the_way_of_a_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    told = raised(lambda: write_atomic(tmp_path / "config.json", "{}"))
    assert told.message == f"a folder is where a file should be: {tmp_path / 'config.json'}"


def test_a_copy_that_fails_names_the_new_file_by_its_own_name(tmp_path):
    (tmp_path / "weights").write_bytes(b"w" * 1000)

    def copy():
        with folder_appears_whole(tmp_path / "export") as folder:
            try:
                with open("/dev/full", "wb") as full:
                    full.write(b"w")
            except OSError as fault:  # as `shutil` reports a copy onto a full disk
                fault.filename, fault.filename2 = str(tmp_path / "weights"), str(folder / "weights")
                raise

    told = raised(copy)
    assert told.message == f"the disk or quota is full: {tmp_path / 'export' / 'weights'}"
    assert "free some space" in told.hint


def test_a_checkpoint_that_a_full_disk_cuts_off_is_a_sentence():
    full = open("/dev/full", "wb")  # noqa: SIM115
    told = raised(lambda: torch.save({"weights": torch.zeros(100_000)}, full))
    with contextlib.suppress(OSError):
        full.close()
    assert "full" in told.message
    assert "inline_container" not in told.message


def test_too_many_open_files_is_the_machines_fault():
    told = translate(OSError(errno.EMFILE, "Too many open files", "x"))
    assert isinstance(told, EnvironmentFault)
    assert "ulimit -n" in told.hint


def test_the_number_in_the_text_of_another_librarys_error_is_read():
    told = translate(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert told.message.startswith("the disk or quota is full")


def test_a_disk_that_fills_while_a_folder_is_copied_is_told_with_its_file(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "adapter.bin").touch()

    def fill(source, target, **_):
        raise OSError(errno.ENOSPC, "No space left on device", target)

    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "best", tmp_path / ".adapter.opdcl-7-abc", copy_function=fill)
    told = translate(caught.value)
    assert told.message == f"the disk or quota is full: {tmp_path / 'adapter' / 'adapter.bin'}"
    assert "free some space" in told.hint


def test_a_missing_file_is_compared_with_those_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("rows.jsonl", "runs/mine"):
        (tmp_path / name).touch()
    assert nearest_path("rows.json") == "rows.jsonl"
    assert nearest_path(str(tmp_path / "runs" / "mines")) == str(tmp_path / "runs" / "mine")
    assert [nearest_path(name) for name in ("prompts.csv", "nowhere/rows.jsonl", "a\0b")] == ["", "", ""]
