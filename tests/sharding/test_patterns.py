"""Regular expressions of paths: any that Python reads, but none that would search for ever."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from for_each import for_each
from refusals import refused

from fsdp_jax.errors import ConfigError
from fsdp_jax.sharding import patterns
from fsdp_jax.sharding.path_rules import matches, read_rules
from fsdp_jax.sharding.patterns import check_regexes, search, search_any

PATH = "a" * 60 + "/kernel"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)


@for_each("pattern", ["(a+)+$", "(?:a?){60}a{60}$", "(.*)*(.*)*(.*)*x"])
def test_repetitions_of_repetitions_are_searched_at_once(pattern):
    assert not search(pattern, PATH)


@for_each(
    "pattern",
    [
        "(a|aa)+$",
        "(?:a|aa|aaa)*$",
        "(a|a)" * 60 + "x",
    ],
)
def test_a_search_that_would_take_years_is_refused(impatient, pattern):
    with refused("takes longer than 0.05 s", error=ConfigError) as caught:
        search(pattern, PATH)
    assert caught.value.where.startswith("pattern '")
    with refused("takes longer than", error=ConfigError):  # at once, the second time
        search(pattern, f"{PATH}/0")


def test_slow_searches_of_one_pattern_are_counted_together(impatient, monkeypatch):
    monkeypatch.setattr(patterns, "SLOW", 1e-6)
    with refused("takes longer than", error=ConfigError):
        any(search("[b]+|c", f"{PATH}/{number}") for number in range(10**6))


def test_many_paths_share_the_time_of_a_pattern(impatient):
    """Each takes some milliseconds: all of them would take a hundred times what they may."""
    done = []
    paths = (done.append(number) or f"{'a' * 22}/{number}" for number in range(2000))
    with refused("takes longer than", error=ConfigError):
        any(search("(a|aa)+$", path) for path in paths)
    assert len(done) <= 50


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


def test_a_search_in_another_thread_ends_too(impatient):
    with ThreadPoolExecutor() as pool, refused("takes longer than", error=ConfigError):
        pool.submit(search, "(a|aa)+$", f"{PATH}/thread").result()


@for_each(
    ("pattern", "what"),
    [
        ("(", "not a regular expression: missing \\)"),
        ("a{1,99999999999}", "repeats too much"),
        (f"a{{{'9' * 1900}}}", "repeats too much"),
        (f"a{{{'0' * 30}999999}}", "repeats too much"),
        ("a{0}b{1000000}", "repeats too much"),
        ("(?x)a{ 1 000 000 }", "repeats too much"),
        ("(?x)a{100 # hundreds\n 0000}", "repeats too much"),
        ("(?:a{10000}b){10000,}", r"repeats too much(?s:.*)product is 100,000 at most"),
        ("(?:(?:(?:a{100}){100}){100}){100}", "repeats too much"),
        ("(" * 900 + ")" * 900, "not a regular expression: "),
        ("(?<=a", "not a regular expression: missing \\)"),
        ("a" * 3000, "too long\n.*\n  expected: 2000 characters at most"),
        (3, "not a regular expression\n.*\n  expected: text\n  got: +3"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, what):
    with pytest.raises(ConfigError, match=what):
        check_regexes([pattern], "here")
    with pytest.raises(ConfigError, match="where:    rule"):
        read_rules([((pattern,), ("data",))])
