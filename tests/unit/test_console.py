"""The console shows data as it is, and nothing in it takes effect."""

from opdcl.console import Output


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
