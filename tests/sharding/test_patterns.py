"""Regular expressions of paths: any that Python reads."""

import pytest
from for_each import for_each

from fsdp_jax.errors import ConfigError
from fsdp_jax.sharding.path_rules import matches, read_rules
from fsdp_jax.sharding.patterns import check_regexes, search, search_any


def test_counts_of_paths_are_searched():
    pattern = r"layer_\d{1,3}/(?:\w{4,}/){2}kernel{1}"
    check_regexes([pattern], "here")
    assert search(pattern, "layer_12/block/attn/kernel")


def test_patterns_of_pythons_syntax_are_searched():
    assert search(r"(?<!q)kernel(?=$)", "mlp/kernel")
    assert search(r"(a)\1/", "aa/b")
    assert search_any(["b$", "c"], "a/b")
    assert not search_any([], "a/b")
    assert matches(("a|b", "kernel"), "a/kernel")
    assert not matches(("a", "kern"), "a/kernel")


@for_each(
    ("pattern", "what"),
    [
        ("(", "not a regular expression: missing \\)"),
        ("(" * 900 + ")" * 900, "not a regular expression: "),
        ("(?<=a", "not a regular expression: missing \\)"),
        ("a{1,99999999999}", "not a regular expression: the repetition number is too large"),
        (3, "not a regular expression\n.*\n  expected: text\n  got: +3"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, what):
    with pytest.raises(ConfigError, match=what):
        check_regexes([pattern], "here")
    with pytest.raises(ConfigError, match="where:    rule"):
        read_rules([((pattern,), ("data",))])
