"""Settings from defaults, file, -o and flags; limits; what cannot be mounted."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.base import errors, mounts, processes
from fusecache.base.errors import EXIT_FAILED, ConfigError, UserError
from fusecache.config import building, options
from fusecache.config import places as places_module
from fusecache.config.settings import RAM_BYTES_MIN, Config

GIB = 1 << 30


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").touch()
    (tmp_path / "mnt").mkdir()
    return {
        "source": str(tmp_path / "source"),
        "mountpoint": str(tmp_path / "mnt"),
        "cache_dir": str(tmp_path / "cache"),
    }


def line_of(action: Callable[[], object]) -> str:
    """The one line of the user error that the action ends with."""
    with pytest.raises(UserError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---- defaults -----------------------------------------------------------------------------------


def test_defaults_need_no_thought(places: dict[str, Any]) -> None:
    made = building.build(places)
    disk = os.statvfs(places["source"])
    assert made.keep_free_bytes == int(disk.f_blocks * disk.f_frsize * 0.05)
    assert made.ssd_bytes <= disk.f_blocks * disk.f_frsize - made.keep_free_bytes
    assert RAM_BYTES_MIN <= made.ram_bytes <= processes.total_memory_bytes() // 4
    assert (made.policy, made.digest, made.revalidate_s) == ("reuse", "xxh3-128", 60.0)
    assert made.layout == "static"
    assert made.zero_open
    assert not made.allow_other


def test_one_place_is_mounted_over_itself(places: dict[str, Any]) -> None:
    del places["source"]
    assert building.build(places).source == places["mountpoint"]


def test_default_ssd_counts_what_the_cache_already_has(places: dict[str, Any]) -> None:
    segments = Path(places["cache_dir"]) / "segments"
    segments.mkdir(parents=True)
    (segments / "00000001.seg").write_bytes(os.urandom(8 << 20))
    (Path(places["cache_dir"]) / "other").write_bytes(os.urandom(1 << 20))
    assert building._stored_bytes(places["cache_dir"]) == 8 << 20


def test_cache_directory_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert building.default_cache_dir() == "/x/cache/fusecache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert building.default_cache_dir() == "/home/me/.cache/fusecache"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert building.default_cache_dir() == "/var/cache/fusecache"


@pytest.mark.parametrize(
    ("listing", "limit_file", "content", "limits"),
    [
        ("0::/a/b\n", "a/memory.max", "1000\n", [1000]),
        ("0::/a/b\n", "a/b/memory.max", "max\n", []),
        ("4:memory:/job\n0::/\n", "memory/job/memory.limit_in_bytes", "4096\n", [4096]),
        ("4:cpu,memory:/\n", "memory/memory.limit_in_bytes", "77\n", [77]),
        ("0::/../other\n", "memory.max", "5\n", [5]),
    ],
)
def test_memory_limits_of_cgroups(
    tmp_path: Path, listing: str, limit_file: str, content: str, limits: list[int]
) -> None:
    (tmp_path / "listing").write_text(listing)
    path = tmp_path / "root" / limit_file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert processes._cgroup_limits(str(tmp_path / "listing"), str(tmp_path / "root")) == limits


# ---- where settings come from -------------------------------------------------------------------


def test_file_has_the_names_of_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        'ssd = "2G"\nram = 1073741824\nkeep-free = "1%"\nallow_other = true\nno-zero-open = true\n'
        'revalidate = "never"\norigin-timeout = 2.5\nsource = "/s"\nmountpoint = "/m"\n'
        'prefetch-bandwidth = "100M"\n'
    )
    assert options.read_file(str(file)) == {
        "ssd": 2 * GIB,
        "ram": GIB,
        "keep_free": "1%",
        "allow_other": True,
        "zero_open": False,
        "revalidate": None,
        "origin_timeout": 2.5,
        "source": "/s",
        "mountpoint": "/m",
        "prefetch_bandwidth": 100 << 20,
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sdd = 1", "sdd: unknown setting"),
        ("no-ssd = true", "no-ssd: unknown setting"),
        ("ssd =", "Invalid value"),
        ('allow-other = "perhaps"', "allow-other: 'perhaps' is neither true nor false"),
        ('allow-other = "yes"', "allow-other: 'yes' is text: write true or false, unquoted"),
        ('allow-other = ""', "allow-other: '' is text: write true or false, unquoted"),
        ('no-zero-open = "false"', "no-zero-open: 'false' is text: write true or false, unquoted"),
        ("allow-other = 1", "allow-other: 1 is neither true nor false"),
        ('revalidate = "60"', "revalidate: '60' is text: write 60, unquoted"),
        ('origin-timeout = "2.5"', "origin-timeout: '2.5' is text: write 2.5, unquoted"),
        ('origin-threads = "8"', "origin-threads: '8' is text: write 8, unquoted"),
        ("origin-threads = true", "origin-threads: True is not a whole number between 1 and "),
        ('prefetch-depth = ["8"]', "prefetch-depth: ['8'] is not a whole number between 1 and "),
        ("prefetch-depth = nan", "prefetch-depth: nan is not a whole number between 1 and 256"),
        ("policy = 1", "policy: 1 is not one of reuse, lrf, keep"),
        ("ssd = 1.5", "ssd: 1.5 is not a size"),
        ("keep-free = 0.05", "keep-free: 0.05 is not a size"),
        ("ssd = true", "ssd: True is not a size"),
        ("ram = true", 'ram: True is not a size; write for example "500G" or 1048576'),
        ("ram = 64", 'ram: 64 is 64 B: at least 16 MiB; write for example "64G"'),
        ('ssd = "1M"', "ssd: '1M' is 1 MiB: at least 16 MiB; write for example \"500G\""),
        ('keep-free = "x%"', "keep-free: 'x%' is not between 0% and 100%"),
        ("keep-free = true", "True is not a size; write for example"),
        ('ram = "1G"\nram = "2G"', "Cannot overwrite a value"),
        ('keep-free = "1%"\nkeep_free = "2%"', "keep_free: keep-free is set twice"),
        ("zero-open = true\nno-zero-open = true", "no-zero-open: zero-open is set twice"),
        (f"ram = {'9' * 5000}", "4300 digits"),
        (f"ssd = {'9' * 4000}", "99 is not a size: at most 1024 PiB"),
        (f"keep-free = -{'9' * 4000}", "99 is not a size: at most 1024 PiB"),
        (f"ram = '{'9' * 400}P'", "P' is not a size: at most 1024 PiB"),
        (f"ram = {'[' * 3000}", "nested too deep"),
        ("source = 7", "source: 7 is not a path"),
        ("ssd = 10G", 'sizes are in quotes, as ssd = "10G"'),
        ("[mount]\nssd = 1", "mount: unknown setting"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    line = line_of(lambda: options.read_file(str(file)))
    assert part in line
    assert str(file) in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in line_of(lambda: options.read_file(str(tmp_path / "none.toml")))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml" in line_of(lambda: options.read_file(str(tmp_path / "bytes.toml")))


def test_options_of_fstab() -> None:
    assert options.read_options(
        [
            "rw,noatime,user,_netdev,x-systemd.automount,nofail",
            r"ssd=1G,cache-dir=/a\,b,allow_other",
        ]
    ) == {"ssd": GIB, "cache_dir": "/a,b", "allow_other": True}
    assert options.read_options(["no_zero_open,noexec,revalidate=never"]) == {
        "zero_open": False,
        "noexec": True,
        "revalidate": None,
    }


def test_options_may_name_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('ssd = "2G"\nram = "1G"\n')
    found = options.read_options([f"ssd=3G,config={file}"])
    assert found == {"ssd": 3 * GIB, "ram": GIB}


@pytest.mark.parametrize(
    ("text", "part"),
    [("foo", "-o foo: unknown"), ("ssd", "-o ssd: needs a value"), ("ssd=x", "-o ssd: 'x' is not")],
)
def test_mistakes_in_options_are_named(text: str, part: str) -> None:
    assert part in line_of(lambda: options.read_options([text]))


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("prefetch-bandwidth", "100M", "prefetch_bytes_per_s", 100 << 20),
        ("prefetch-bandwidth", 0, "prefetch_bytes_per_s", None),
        ("prefetch-bandwidth", "none", "prefetch_bytes_per_s", None),
        ("prefetch-depth", "256", "prefetch_depth", 256),
        ("hintsd", "none", "hintsd", "none"),
        ("manifest", "none", "manifest", "none"),
        ("manifest", "/a/manifest", "manifest", "/a/manifest"),
        ("hintsd", "/run/a.sock", "hintsd", "/run/a.sock"),
    ],
)
def test_settings_of_hints_and_the_manifest(
    places: dict[str, Any], name: str, value: Any, field: str, expected: Any
) -> None:
    canonical, parsed = options.parse_setting(name, value, name)
    made = building.build({**places, canonical: parsed})
    assert getattr(made, field) == expected
    assert Config.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        *(
            ("prefetch-bandwidth", value, f"{value!r} is {said} a second: at least 1 KiB, or ")
            for value, said in (("100", "100 B"), (100, "100 B"), (-5, "-5 B"), ("0.5K", "512 B"))
        ),
        *(
            ("keep-free", value, f"{value!r} is {said}: 0, or at least 1 MiB; write for example ")
            for value, said in (("5", "5 B"), (5, "5 B"), (-5, "-5 B"), ("900K", "900 KiB"))
        ),
    ],
)
def test_a_size_whose_unit_was_forgotten_is_refused(name: str, value: Any, line: str) -> None:
    found = line_of(lambda: options.parse_setting(name, value, name))
    assert found.startswith(f"{name}: {line}")
    assert ('"100M"' if name == "prefetch-bandwidth" else '"5%"') in found


@pytest.mark.parametrize(
    ("value", "kept"), [("0", "0"), (0, "0"), ("0%", "0%"), ("1M", "1048576"), (1 << 20, "1048576")]
)
def test_little_or_nothing_may_be_kept_free(value: Any, kept: str) -> None:
    assert options.parse_setting("keep-free", value, "x") == ("keep_free", kept)


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssd", "5X"),
        ("ssd", "1M"),
        ("ram", "-1"),
        ("ram", "64"),
        ("keep-free", "100%"),
        ("keep-free", "x%"),
        ("policy", "lru"),
        ("digest", "md5"),
        ("layout", "sorted"),
        ("revalidate", "0"),
        ("revalidate", "nan"),
        ("revalidate", "soon"),
        ("origin-timeout", "never"),
        ("origin-timeout", "inf"),
        ("origin-threads", "0"),
        ("origin-threads", "1.5"),
        ("origin-threads", "9999"),
        ("prefetch-depth", "0"),
        ("prefetch-depth", "257"),
        ("prefetch-depth", "nan"),
        ("prefetch-bandwidth", "fast"),
        ("prefetch-bandwidth", "-1"),
        ("hintsd", ""),
        ("hintsd", "yes"),
        ("manifest", "yes"),
        ("hintsd", False),
        ("cache-dir", ""),
        ("cache-dir", "/a\0b"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: str) -> None:
    line = line_of(lambda: options.parse_setting(name, value, f"--{name}"))
    assert line.startswith(f"--{name}: ")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"ssd": 1 << 60}, "exceeds the disk"),
        ({"ram": 1 << 60}, "exceeds the memory"),
        ({"keep_free": str(1 << 60)}, "leaves nothing"),
        ({"cache_dir": "/proc/none"}, "stores nothing"),
    ],
)
def test_sizes_have_limits(places: dict[str, Any], settings: dict[str, Any], part: str) -> None:
    assert part in line_of(lambda: building.build({**places, **settings}))


def test_ssd_leaves_what_is_to_be_kept_free(places: dict[str, Any]) -> None:
    disk = os.statvfs(places["source"])
    size = disk.f_blocks * disk.f_frsize
    fits = building.build({**places, "keep_free": "50%", "ssd": size // 2 - (1 << 20)})
    assert fits.ssd_bytes == size // 2 - (1 << 20)
    with pytest.raises(ConfigError, match="exceeds the disk"):
        building.build({**places, "keep_free": "50%", "ssd": size // 2 + (1 << 20)})


def test_a_restart_keeps_what_is_not_given(places: dict[str, Any]) -> None:
    first = building.build({**places, "ssd": GIB, "ram": GIB, "revalidate": None})
    second = building.build({"ram": 2 * GIB, "policy": "keep"}, first)
    assert (second.ssd_bytes, second.ram_bytes, second.policy) == (GIB, 2 * GIB, "keep")
    assert second.revalidate_s is None
    assert second.keep_free_bytes == first.keep_free_bytes


# ---- several cache directories ------------------------------------------------------------------


def test_several_cache_directories(tmp_path: Path, places: dict[str, Any]) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    given = options.read_options([f"cache-dir={paths[0]},ssd=1G", f"cache-dir={paths[1]}"])
    assert given["cache_dir"] == (paths[0], paths[1])
    assert options.parse_setting("cache-dir", paths[:1], "x") == ("cache_dir", paths[0])
    assert options.parse_setting("cache-dir", paths[:1] * 2, "x") == ("cache_dir", paths[0])
    made = building.build({**places, "cache_dir": tuple(paths)})
    assert made.cache_dirs == tuple(paths)
    assert Config.from_json(made.to_json()) == made
    disk = os.statvfs(tmp_path)
    assert made.ssd_bytes <= disk.f_blocks * disk.f_frsize, "they are on one disk"
    fewer = building.build({"cache_dir": paths[2]}, base=made)
    assert fewer.cache_dirs == (paths[2],)
    assert building.build({"ram": 64 << 20}, base=made).cache_dirs == tuple(paths)


def test_a_full_disk_among_several(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, other = str(tmp_path / "full"), str(tmp_path / "other")
    real = os.mkdir

    def mkdir(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if path == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    made = places_module.check_places(building.build({**places, "cache_dir": (full, other)}))
    assert made.cache_dirs == (full, other)
    with pytest.raises(UserError, match="not writable"):
        places_module.check_places(building.build({**places, "cache_dir": full}))


def test_places_of_several_cache_directories(tmp_path: Path, places: dict[str, Any]) -> None:
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    made = places_module.check_places(building.build({**places, "cache_dir": paths}))
    assert made.cache_dirs == paths
    assert all(Path(path).is_dir() for path in paths)
    nested = (paths[0], f"{paths[0]}/inside")
    with pytest.raises(UserError, match="inside another one"):
        places_module.check_places(building.build({**places, "cache_dir": nested}))


# ---- as JSON ------------------------------------------------------------------------------------


@given(path=st.binary(min_size=1, max_size=40).filter(lambda b: b"\0" not in b))
def test_any_path_survives_json(path: bytes) -> None:
    name = os.fsdecode(b"/" + path)
    made = Config(
        source=name, mountpoint=name, cache_dir=name, ssd_bytes=1, ram_bytes=1, keep_free_bytes=1
    )
    text = made.to_json()
    assert text.isascii()
    assert Config.from_json(text) == made
    assert os.fsencode(Config.from_json(text).source) == b"/" + path


def test_fields_of_other_versions_are_left_out(places: dict[str, Any]) -> None:
    made = building.build(places)
    fields = {**json.loads(made.to_json()), "from_the_future": 1}
    del fields["noexec"]
    assert Config.from_json(json.dumps(fields)) == made


# ---- places -------------------------------------------------------------------------------------


def test_good_places_pass_and_links_are_resolved(tmp_path: Path, places: dict[str, Any]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "source")
    made = places_module.check_places(building.build({**places, "source": str(tmp_path / "link")}))
    assert made.source == str((tmp_path / "source").resolve())
    assert Path(made.cache_dir).stat().st_mode & 0o777 == 0o700
    assert list(Path(made.cache_dir).iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"source": "none"}, "source {}/none does not exist"),
        ({"source": "file"}, "source {}/file is not a directory"),
        ({"mountpoint": "none"}, "mount point {}/none does not exist"),
        ({"mountpoint": "file"}, "mount point {}/file is not a directory"),
        ({"mountpoint": "source/below"}, "lies inside the source"),
        ({"mountpoint": "mnt", "source": "mnt/below"}, "would hide the source"),
        ({"cache_dir": "foreign"}, "cache directory {}/foreign holds other files"),
        ({"cache_dir": "source/cache"}, "lies inside the source"),
        ({"cache_dir": "mnt/cache"}, "lies inside the mount point"),
        ({"cache_dir": "file"}, "cache directory {}/file is, or lies below, a file"),
        ({"cache_dir": "file/cache"}, "cache directory {}/file/cache is, or lies below, a file"),
    ],
)
def test_a_place_that_cannot_be_is_named(
    tmp_path: Path, places: dict[str, Any], settings: dict[str, str], part: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "source" / "below").mkdir()
    (tmp_path / "mnt" / "below").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "mine.txt").touch()
    changed = {name: str(tmp_path / value) for name, value in settings.items()}
    made = building.build({**places, **changed})
    assert part.format(tmp_path) in line_of(lambda: places_module.check_places(made))


def test_a_source_whose_file_system_is_not_mounted_is_refused(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, table = tmp_path / "source", [mounts.Mount(1, "0:1", "/", "ext4", "/dev/vda")]
    monkeypatch.setattr(mounts, "mounts", lambda: table)
    required = building.build({**places, "require_mounted": True})
    line = f"source {source} lies on the file system of /: mount its own first (--require-mounted)"
    assert line_of(lambda: places_module.check_places(required)) == line
    table.append(mounts.Mount(2, "0:2", str(tmp_path), "nfs4", "server:/export", parent_id=1))
    assert places_module.check_places(required).require_mounted
    (source / "file").unlink()
    with pytest.raises(UserError) as refused:
        places_module.check_places(required)
    assert str(refused.value).startswith(f"source {source} is empty: mount its file system first")
    assert refused.value.exit_code == EXIT_FAILED, "a service is to try again"
    empty = building.build({**places, "allow_empty": True})
    assert places_module.check_places(empty).source == str(source)


def test_of_a_cache_directory_only_the_last_component_is_made(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistyped = tmp_path / "sdd" / "my cache" / "fusecache"
    made = building.build({**places, "cache_dir": str(mistyped)})
    line = line_of(lambda: places_module.check_places(made))
    assert f"cache directory {mistyped} is not made: {mistyped.parent} does not exist" in line
    assert line.endswith(f"(mkdir -p '{mistyped.parent}')")
    both = building.build({**places, "cache_dir": (places["cache_dir"], str(mistyped))})
    assert "is not made" in line_of(lambda: places_module.check_places(both))
    assert not (tmp_path / "sdd").exists()
    monkeypatch.setattr(places_module, "default_cache_dir", lambda: str(mistyped))
    places_module.check_places(made)
    assert mistyped.is_dir(), "of the default all is made"


@pytest.mark.parametrize("link", ["fusecache", "of mine"], ids=["itself", "above it"])
def test_a_link_to_a_disk_that_is_not_mounted_is_named(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    disk, cache_dir = tmp_path / "disk", tmp_path / "of mine" / "fusecache"
    default = cache_dir if link == cache_dir.name else cache_dir.parent
    default.parent.mkdir(exist_ok=True)
    default.symlink_to(disk / "my cache")
    for module in (building, places_module):
        monkeypatch.setattr(module, "default_cache_dir", lambda: str(cache_dir))
    del places["cache_dir"]
    line = line_of(lambda: building.build({**places, "ssd": 1 << 60}))
    assert line == (
        f"cache directory {cache_dir}: {default} is a link to {disk}/my cache, which does not"
        f" exist: mount its disk, or make it (mkdir -p '{disk}/my cache'), or choose another with"
        " --cache-dir"
    )
    assert not disk.exists()
    (disk / "my cache").mkdir(parents=True)
    made = places_module.check_places(building.build(places))
    assert made.cache_dir == os.path.realpath(cache_dir)
    assert Path(made.cache_dir).is_dir()


def test_what_is_odd_is_said(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = building.build({**places, "ssd": 64 << 20})
    assert places_module.warnings_of(made) == []
    (tmp_path / "mnt" / "file").touch()
    over_itself = building.build({**places, "mountpoint": places["source"]})
    (line,) = places_module.warnings_of(made)
    assert "its 1 entry is hidden" in line
    assert places_module.warnings_of(over_itself) == []
    (tmp_path / "mnt" / "file").unlink()

    around = mounts.Mount(1, "0:1", str(tmp_path), mounts.FILESYSTEM_TYPE, "/s")
    monkeypatch.setattr(mounts, "mounts", lambda: [around])
    for config_there in (made, over_itself):
        (line,) = places_module.warnings_of(config_there)
        assert line == (
            f"source {tmp_path}/source lies on the fusecache mount {tmp_path}: files are cached "
            f"twice; {tmp_path} serves source already"
        )
    other = mounts.Mount(1, "0:1", "/data/a", mounts.FILESYSTEM_TYPE, "/s")
    record = {"config": {"cache_dir": made.cache_dir, "ssd_bytes": 32 << 20}}
    monkeypatch.setattr(mounts, "mounts", lambda: [other])
    monkeypatch.setattr(mounts, "runtime_directory", lambda mount: "/run")
    monkeypatch.setattr(mounts, "keeper_record", lambda directory: record)
    (line,) = places_module.warnings_of(made)
    assert "/data/a" in line
    assert "32 MiB, not 64 MiB" in line
    record["config"]["ssd_bytes"] = 64 << 20
    assert places_module.warnings_of(made) == []
    assert places_module.users_of_more(made) == []
    record["config"]["further_cache_dirs"] = ["/ssd2"]
    assert places_module.users_of_more(made) == [f"/data/a uses {made.cache_dir}, /ssd2"]


def test_a_mount_point_that_is_a_fusecache_is_not_looked_up(
    places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = mounts.Mount(1, "0:1", places["mountpoint"], mounts.FILESYSTEM_TYPE, "/s")
    monkeypatch.setattr(mounts, "mounts", lambda: [taken])
    monkeypatch.setattr(os, "stat", lambda *_: pytest.fail("a stuck mount would hang here"))
    with pytest.raises(UserError, match="already a fusecache") as caught:
        places_module.check_places(Config.from_json(json.dumps({**places, **_SIZES})))
    assert caught.value.exit_code == errors.EXIT_BUSY


_SIZES = {"ssd_bytes": GIB, "ram_bytes": GIB, "keep_free_bytes": 0}


def test_missing_fuse_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    with pytest.raises(UserError, match="/dev/fuse does not exist"):
        places_module.check_fuse(allow_other=False)


def test_an_ordinary_user_needs_fusermount3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="fusermount3 is not installed"):
        places_module.check_fuse(allow_other=False)


@pytest.mark.parametrize(
    ("text", "allowed"), [("user_allow_other\n", True), ("#user_allow_other", False)]
)
def test_user_allow_other(tmp_path: Path, text: str, allowed: bool) -> None:
    (tmp_path / "fuse.conf").write_text(f"# comment\n{text}")
    assert places_module._is_user_allow_other(str(tmp_path / "fuse.conf")) is allowed


def test_text_on_the_command_line_that_is_no_count_is_told_the_bounds() -> None:
    line = line_of(lambda: options.parse_setting("prefetch-depth", "x", "--prefetch-depth"))
    assert line == "--prefetch-depth: 'x' is not a whole number between 1 and 256"
