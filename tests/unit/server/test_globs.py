"""Which files a glob names, and that no glob costs more than its length."""

from __future__ import annotations

import fnmatch
import random
import time

import pytest

from fusecache.base import errors
from fusecache.server.globs import NODES_MOST, PLACES_MOST, GlobError, Globs


def _names(glob: str, path: bytes) -> bool:
    return Globs([glob]).naming(path) == [glob]


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("train", b"train/n01/a.jpg", True),
        ("train/", b"train/a", True),
        ("train", b"training/a", False),
        ("train/*", b"train/a", True),
        ("train/*", b"train/n01/a.jpg", True),  # below a directory that the glob names
        ("*.jpg", b"a.jpg", True),
        ("*.jpg", b"n01/a.jpg", False),
        ("**/*.jpg", b"n01/deep/a.jpg", True),
        ("**/*.jpg", b"a.jpg", True),
        ("train/**", b"train/n01/a.jpg", True),
        ("n0?", b"n01/a", True),
        ("n0?", b"n012/a", False),
        ("n0[12]", b"n02/a", True),
        ("n0[!12]", b"n02/a", False),
        ("a.b", b"axb", False),
        ("a[", b"a[", True),
        ("f\udcff", b"f\xff", True),
        ("line*", b"line\nbreak", True),
        ("a[!b]c", b"a/c", False),
        ("[]a]x", b"]x", True),
        ("[!]]x", b"]x", False),
        ("[a-]x", b"-x", True),
        ("[\u00e9]?", "\u00e9\u00e8".encode(), True),
        ("a/**/b", b"a/b", True),
        ("a/**/b", b"a/x/y/b/c", True),
        ("a**/b", b"ab", True),
        ("***a", b"x/y/a", True),
        ("**/**/a", b"b/a", True),
        ("*", b"a", True),
        ("", b"a", False),
    ],
)
def test_globs(glob: str, path: bytes, matches: bool) -> None:
    assert _names(glob, path) is matches


def test_the_globs_that_name_a_path_are_told() -> None:
    globs = Globs(["a", "a/b", "*", "a/*", "**/c", "d*"])
    assert set(globs.naming(b"a/b")) == {"a", "a/b", "*", "a/*"}
    assert set(globs.naming(b"x/c")) == {"*", "**/c"}
    assert globs.naming(b"dd") == ["*", "d*"]


@pytest.mark.parametrize("seed", range(4))
def test_a_glob_without_slashes_is_that_of_fnmatch(seed: int) -> None:
    pick = random.Random(seed)
    tokens = ["a", "b", "*", "*", "?", "[ab]", "[!a]", "[a-b]", "[", "]", "-", "."]
    for _ in range(5000):
        glob = "".join(pick.choices(tokens, k=pick.randint(1, 7)))
        name = "".join(pick.choices("ab[]-.c", k=pick.randint(1, 7)))
        try:
            named = _names(glob, name.encode())
        except GlobError:
            continue  # fnmatch takes a range that ends before it begins for an empty one
        assert named is fnmatch.fnmatchcase(name, glob), (glob, name)


@pytest.mark.parametrize("seed", range(4))
def test_several_globs_name_what_each_names(seed: int) -> None:
    pick = random.Random(seed)
    tokens = ["a", "b", "*", "**", "/", "**/", "?", "[!a]"]
    for _ in range(500):
        globs = ["".join(pick.choices(tokens, k=pick.randint(1, 6))) for _ in range(4)]
        together = Globs(dict.fromkeys(globs))
        for _ in range(10):
            path = "".join(pick.choices("ab/", k=pick.randint(1, 8))).strip("/").encode()
            if path:
                alone = {glob for glob in globs if _names(glob, path)}
                assert set(together.naming(path)) == alone, (globs, path)


@pytest.mark.parametrize("glob", ["*a" * 30 + "b", "**/*a" * 30 + "b", "*?" * 30 + "b"])
def test_a_glob_of_many_stars_costs_no_more_than_its_length(glob: str) -> None:
    globs, path = Globs([glob]), b"a" * 255 + b"/" + b"a" * 255
    begun_s = time.thread_time()
    assert globs.naming(path) == []  # a regular expression takes longer than there is time
    assert time.thread_time() - begun_s < 5.0


def test_what_is_remembered_is_bounded() -> None:
    pick = random.Random(0)
    globs = Globs(["*a????????????b*"])  # has thousands of states
    for _ in range(300):
        globs.naming(bytes(pick.choices(b"abc", k=200)))
        assert len(globs._nodes) <= NODES_MOST


@pytest.mark.parametrize("glob", ["[z-a]", "x[!b-a]", "*[\u00e9-a]*"])
def test_a_range_that_ends_before_it_begins_is_refused(glob: str) -> None:
    with pytest.raises(GlobError, match="range that ends before it begins") as refused:
        Globs([glob])
    assert refused.value.exit_code == errors.EXIT_USAGE


def test_too_much_is_refused() -> None:
    with pytest.raises(GlobError, match="name directories instead"):
        Globs(["*" + "a" * PLACES_MOST])
    assert Globs(f"train/{number}.jpg" for number in range(PLACES_MOST)).naming(b"train/7.jpg")
