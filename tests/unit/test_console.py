"""The console shows data as it is, and nothing in it takes effect."""

import io
import itertools
import re
import sys

from rich.cells import cell_len
from rich.console import Console

from opdcl.console import Output, quiet_libraries
from opdcl.errors import UsageError


def test_brackets_in_cells_and_titles_are_shown(capsys):
    Output().table("Dear [name]", ["state", "answer"], [["base", "Dear [name], [/nope] [bold]x[/bold]"]], {})
    shown = capsys.readouterr().out
    assert "Dear [name]\n" in shown
    assert "Dear [name], [/nope] [bold]x[/bold]" in shown


def test_escapes_in_data_do_not_reach_the_terminal(capsys):
    output = Output()
    output.table("\x1b[1m", ["\x1b[31ma[/b]"], [["\x1b[31mred\u202e"]], {})
    output.note("note \x1b]0;title\x07")
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\u202e" not in captured.out


def test_off_a_terminal_no_cell_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    Output().table("", ["key", "value"], [["a" * 60, "b" * 300]], {})
    assert capsys.readouterr().out.splitlines()[1].split() == ["a" * 60, "b" * 300]


def test_json_mode_prints_one_document_and_no_notes(capsys):
    output = Output("json")
    output.note("working")
    output.table("t", ["a"], [["b"]], {"a": "b"})
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == '{\n  "a": "b"\n}\n'


TERMINAL = {"TERM": "xterm"}


def on_a_terminal() -> tuple[Output, io.StringIO]:
    output, screen = Output(), io.StringIO()
    output._err = Console(file=screen, force_terminal=True, width=100, soft_wrap=True, _environ=TERMINAL)
    return output, screen


def test_the_bars_of_libraries_do_not_reach_the_terminal(tmp_path):
    output, screen = on_a_terminal()
    with quiet_libraries(tmp_path / "log"), output.stage("eval instructions base") as line:
        line.progress(1, 8)
        print("  0%|          | 0/8", file=sys.stderr)
        print("library chatter")
        line.progress(8, 8)
    assert "8/8" in screen.getvalue()
    assert "0%|" not in screen.getvalue()
    assert (tmp_path / "log").read_text() == "  0%|          | 0/8\nlibrary chatter\n"


def test_a_log_without_content_is_not_left_behind(tmp_path):
    with quiet_libraries(tmp_path / "logs" / "attempt_1.log"):
        pass
    assert [*(tmp_path / "logs").iterdir()] == []


def test_several_faults_have_a_line_each(capsys):
    Output().error(UsageError("one is wrong\ntwo is wrong", "do this"))
    assert capsys.readouterr().err == "error: one is wrong\nerror: two is wrong\nhint: do this\n"


def test_a_fault_is_red_on_a_terminal_and_a_note_is_not(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    output, screen = Output(), io.StringIO()
    output._err = Console(file=screen, force_terminal=True, color_system="standard", highlight=False)
    output.remarks(["weights [changed]"], ["60 prompts"])
    assert screen.getvalue() == "\x1b[31mfault: weights [changed]\x1b[0m\nnote: 60 prompts\n"


def test_a_terminal_shows_a_growing_text_as_it_is_when_drawn():
    output, screen = on_a_terminal()
    times = itertools.count()
    with output.busy("loading the model") as say:
        say(lambda: f"base: [b]{'and ' * next(times)}\x1b")
    # Neither markup nor control characters act.
    assert re.search("base: \\[b](and )*\u241b", screen.getvalue())


def test_no_spinner_off_a_terminal(capsys):
    with Output().busy("loading the model") as say:
        say("base is answering")
    assert capsys.readouterr() == ("", "")


def test_a_line_ends_with_the_time_left_by_the_mean_of_the_steps_since_the_first(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Output().stage("recover") as line:
        for done, now in ((4, 100), (5, 220), (6, 228), (7, 310), (9, 400)):  # resumed from step 3
            clock[0] = now
            line.progress(done, 9)
    assert capsys.readouterr().err.splitlines() == [
        "recover 4/9",
        "recover 5/9 left 8 min",
        "recover 7/9 left 2 min",
        "recover 9/9",
    ]


def test_a_terminal_breaks_prose_at_words_and_keeps_commands_and_intervals_whole():
    output, screen = on_a_terminal()
    width = output._err.width
    command = "next: opdcl run " + "a-very-long-name/" * 10
    output.note("word " * 60 + "R = 0.77 [0.46, 1.15]")
    output.note(command)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())  # colours
    prose, _, last = shown.rpartition("next: ")
    lines = [line for line in prose.splitlines() if line]
    assert len(lines) > 2
    assert all(len(line) <= width for line in lines)
    assert any("R = 0.77 [0.46, 1.15]" in line for line in lines)
    assert last.replace("\n", "") == command.removeprefix("next: ")


def shown_text(screen: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_a_part_of_a_stage_has_a_bar_of_its_own_until_the_next_step():
    output, screen = on_a_terminal()
    with output.stage("recover") as line:
        line.part("teachers answer", 0, 24)
        line.part("teachers answer", 7, 24)
        line._live.refresh()
        assert re.search("teachers answer +[━╸╺ ]* +7/24", shown_text(screen))
        line.progress(1, 8, "general prompts: loss 0.500")
        screen.truncate(0)
        line._live.refresh()
        last = shown_text(screen)
    assert "teachers answer" not in last
    assert "1/8" in last
    assert "general prompts: loss 0.500" in last


def test_the_time_of_a_stage_is_no_less_than_its_parts_counts_down_and_runs_over(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    output, _ = on_a_terminal()
    with output.stage("recover") as line:

        def left(seconds):
            clock[0] += seconds
            return line._left(line._pace, line._part)

        line.progress(1, 4)
        clock[0] += 60
        line.progress(2, 4)
        assert [left(0), left(60), left(60), left(60)] == [
            "left 2 min",
            "left 60 s",
            "left 10 s",
            "over 60 s already",
        ]
        line.part("answers", 0, 10)
        clock[0] += 100
        line.part("answers", 1, 10)
        assert left(0) == left(0) == "left 15 min"


def test_a_part_has_a_line_every_few_seconds_off_a_terminal(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Output().stage("recover") as line:
        for done in (0, 3, 6, 9):
            line.part("validate", done, 24)
            clock[0] += 10
            line.texts({"prompt": "a text is no progress"})
    assert capsys.readouterr().err.splitlines() == [
        "recover: validate 0/24",
        "recover: validate 6/24 left 60 s",
    ]


def test_texts_have_one_line_of_the_terminal_each():
    output, screen = on_a_terminal()
    with output.stage("recover") as line:
        line.texts({"prompt": "two\nlines\x1b[1m [b]", "base": "漢字" * 60})
    lines = [row.rstrip() for row in shown_text(screen).splitlines()]
    assert "  prompt  two lines\u241b[1m [b]" in lines
    (cut,) = [row for row in lines if row.startswith("  base")]
    assert cut.endswith("…")
    assert 98 <= cell_len(cut) <= 100


def test_a_dumb_terminal_has_lines_of_progress():
    output, screen = Output(), io.StringIO()
    output._err = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "dumb"})
    with output.stage("recover") as line:
        line.part("validate", 0, 24)
        line.progress(8, 8)
    assert screen.getvalue() == "recover: validate 0/24\nrecover 8/8\n"


def test_ctrl_c_at_a_prompt_ends_the_input(monkeypatch):
    class Interrupted(io.StringIO):
        def isatty(self):
            return True

        def readline(self, size=-1):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    output, screen = on_a_terminal()
    assert output.ask() == ""
    assert screen.getvalue() == "> \n"
