"""Text tables that fit a window, and lines beside them."""

from fsdp_jax.tables import fitted_table, wrapped

ROWS = [("blocks/0", "1 KiB", "██", "P('data')"), ("head", "22 KiB", "█·", "P()")]


def test_columns_are_left_out_until_a_table_fits():
    columns = ("path", "", "share", "spec")
    whole, left_out = fitted_table(columns, ROWS, width=None, optional=("share", ""))
    assert left_out == []
    assert whole.splitlines()[2].split() == ["blocks/0", "1", "KiB", "██", "P('data')"]
    narrow, left_out = fitted_table(columns, ROWS, width=30, optional=("share", ""))
    assert left_out == ["share"]
    assert narrow.splitlines()[2].split() == ["blocks/0", "1", "KiB", "P('data')"]
    assert fitted_table(columns, ROWS, width=5, optional=("share", ""))[1] == ["share", ""]


def test_lines_wrap_at_words_and_rows_of_tables_do_not():
    row = "a  " * 20
    assert wrapped(f"one two three four\n{row}", 10) == f"one two\n  three\n  four\n{row}"
