"""Configuration: what a user writes, what takes effect, and what a mistake is answered with."""

import json
import re
import shutil
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import platformdirs
import psutil
import pytest
from pydantic import ValidationError

from tiered_cache import config
from tiered_cache.config import Config, ConfigError, format_size, parse_duration, parse_size, template


def disk(monkeypatch, total):
    asked: list[Path] = []

    def usage(path):
        asked.append(Path(path))
        return SimpleNamespace(total=total)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return asked


def memory(monkeypatch, *available):
    values = iter(available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=next(values)))


def write(directory, text, name="tiered-cache.toml"):
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(source):
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


@pytest.mark.parametrize(("parse", "kind", "values"), [
    (parse_size, int, {
        1: 1, "123B": 123, "123": 123, "8GB": 8 * 10**9, "8 gb": 8 * 10**9, "100kB": 10**5, "1TB": 10**12,
        "512MiB": 2**29, " 1.5 GiB ": 3 * 2**29, "2TiB": 2**41, "1.001MB": 1_001_000, "1.1TB": 11 * 10**11,
        2**63 - 1: 2**63 - 1}),
    (parse_duration, float, {
        0: 0, 2.5: 2.5, "500ms": 0.5, "10s": 10, "10": 10, "2M": 120, "1.5 h": 5400, "8760h": 8760 * 3600})])
def test_sizes_and_durations(parse, kind, values):
    assert {text: parse(text) for text in values} == values
    assert {type(parse(text)) for text in values} == {kind}


SIZE_HELP = "not a size; write bytes or a number with B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
DURATION_HELP = "not a duration; write seconds or a number with ms, s, m, h, d"


@pytest.mark.parametrize(("parse", "told", "texts"), [
    (parse_size, SIZE_HELP, ["8GX", "", "GB", "-1GB", "1e9", "1.GB", "1,5GB", "8 G B", "8GB!", 1.5, True, None, [1]]),
    (parse_size, f"must be from 1 to {2**63 - 1} bytes", [0, -5, "0GB", "0.4B", 2**63, "9" * 400 + "TB"]),
    (parse_duration, DURATION_HELP, ["10 days", "", "s", "-1s", True, None]),
    (parse_duration, "must be from 0 to 31536000 seconds", [-1, -0.1, float("inf"), float("nan"), 10**400, "8761h"])])
def test_what_is_no_size_and_no_duration(parse, told, texts):
    for text in texts:
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert str(caught.value).endswith(f": {told}"), text


@pytest.mark.parametrize(("size", "shown"), [
    (0, "0 B"), (512, "512 B"), (999, "999 B"), (1000, "1.0 kB"), (50 * 10**9, "50.0 GB"), (999_949, "999.9 kB"),
    (999_950, "1.0 MB"), (1536 * 10**9, "1.5 TB"), (2 * 10**15, "2000.0 TB")])
def test_sizes_for_people(size, shown):
    assert format_size(size) == shown


@pytest.mark.parametrize(("key", "values", "told"), [
    ("cache.block_tokens", [15, 4097, True, "256"], "must be a whole number >= 16 and <= 4096"),
    ("ram.max_memory", ["8GX", True], SIZE_HELP),
    ("ram.max_memory_percent", [0, 1.01, float("nan"), True], "must be a number > 0 and <= 1"),
    ("ram.max_entries", [0, 1.5], "must be a whole number >= 1"),
    ("ram.min_prefix_tokens", [0], "must be a whole number >= 1"),
    ("ram.kv_quantize", [1, "no"], "must be true or false"),
    ("ram.kv_bits", [1, 7, "8"], "must be 2 or 3 or 4 or 5 or 6 or 8"),
    ("ram.kv_group_size", [16], "must be 32 or 64 or 128"),
    ("ram.kv_min_quantize_tokens", [-1], "must be a whole number >= 0"),
    ("ssd.enabled", [1, "yes"], "must be true or false"),
    ("ssd.path", [7, "", " ", "a\0b"], "must be the path of a directory, as text"),
    ("ssd.path", ["$NO_ONE/kv", "~no-one/kv"], "no value is known for a ~ or $NAME in it; write the directory in full"),
    ("ssd.write", ["back"], 'must be "evict" or "through"'),
    ("ssd.compression", ["zstd:0", "zstd:20", "zstd:1\n", "zstd", 1], 'must be "none" or "zstd:1" to "zstd:19"'),
    ("ssd.durability", ["fsync"], 'must be "cache" or "batch" or "full"'),
    ("ssd.close_deadline", ["10 days"], DURATION_HELP),
    ("promotion.policy", ["Always"], 'must be "cost" or "always" or "never"')])
def test_a_bad_value_is_told_with_key_value_and_what_is_allowed(key, values, told):
    section, name = key.split(".")
    for value in values:
        shown = json.dumps(value).replace("NaN", "nan")
        assert refusal({section: {name: value}}) == f"{key} = {shown}: {told}"


def test_values_at_the_edge_are_taken():
    edges: dict[str, list[object]] = {
        "cache.block_tokens": [16, 4096], "ram.max_memory_percent": [1, 0.001], "ram.kv_bits": [2, 8],
        "ssd.compression": ["none", "zstd:1", "zstd:19"], "ssd.close_deadline": [0, 0.5]}
    for key, values in edges.items():
        section, name = key.split(".")
        loaded = [Config.load({section: {name: value}}).effective() for value in values]
        assert [s.value for settings in loaded for s in settings if s.key == key] == values


@pytest.mark.parametrize(("source", "told"), [
    ({"ssd": {"budgte": 1}}, "ssd.budgte is not a known key; did you mean ssd.budget?"),
    ({"ssd": {"BUDGET": 1}}, "ssd.BUDGET is not a known key; did you mean ssd.budget?"),
    ({"cache": {"budget": 1}}, "cache.budget is not a known key; did you mean ssd.budget?"),
    ({"max_memory": 1}, "max_memory is not a known section; did you mean ram.max_memory?"),
    ({"sdd": {}}, "sdd is not a known section; did you mean ssd?"),
    ({"promotion": {"xyzzy": 1}}, "promotion.xyzzy is not a known key; known are policy, deadline"),
    ({"xyzzy": 1}, "xyzzy is not a known section; known are cache, ram, ssd, promotion"),
    ({"ssd": {1: 1}}, "ssd.1 is not a known key; known are enabled, path"),
    ({"ram": 3}, "ram = 3: must be a section, [ram], with keys of its own"),
    ({"ssd.budget": 3}, "ssd.budget = 3: must be budget in a section [ssd]"),
    (5, "5: not a configuration; give a TOML file's path, a mapping, a Config or None")])
def test_a_wrong_shape_is_told_with_the_way_out(source, told):
    assert refusal(source).startswith(told)


def test_two_memory_limits_are_refused_even_if_one_is_the_default():
    message = refusal({"ram": {"max_memory": 10**9, "max_memory_percent": 0.2}})
    assert message == "ram.max_memory = 1000000000 and ram.max_memory_percent = 0.2 exclude each other; remove one"


def test_all_problems_of_a_file_are_told_at_once_each_with_the_file(tmp_path):
    path = write(tmp_path, '[ssd]\nbudgte = 1\nwrite = "x"\n[ram]\nmax_memory = "8GX"\n')
    lines = refusal(path).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path)] * 3
    assert {re.split(" |: ", line)[1] for line in lines} == {"ssd.budgte", "ssd.write", "ram.max_memory"}


@pytest.mark.parametrize(("content", "told"), [
    (b"[ssd]\nbudget = 8GB\n", "line 2"), (b"[ssd]\n[ssd]\n", "line 2"), (b"[ssd]\n# \xff\n", "position 8")])
def test_a_file_that_cannot_be_read(tmp_path, content, told):
    path = write(tmp_path, content)
    assert re.match(f"{re.escape(str(path))}: not valid TOML in UTF-8 .*{told}", refusal(path))
    none = tmp_path / "none.toml"
    told = f"{none}: cannot be read: No such file or directory; `tiered-cache config init {none}` writes one"
    assert refusal(none) == told
    assert refusal(str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_file_takes_effect_and_every_key_tells_its_origin(tmp_path, monkeypatch):
    disk(monkeypatch, 10**12)
    memory(monkeypatch, 40 * 2**30)
    text = '\ufeff[ram]\r\nmax_memory_percent = 1\r\n[ssd]\nbudget = "1.5 GiB"\npath = "kv"\nclose_deadline = "2m"\n'
    settings = {s.key: s for s in Config.load(write(tmp_path, text, "mine.toml")).effective()}
    assert settings["ssd.budget"] == ("ssd.budget", 3 * 2**29, "1.6 GB", "mine.toml")
    assert settings["ssd.path"] == ("ssd.path", str(tmp_path / "kv"), str(tmp_path / "kv"), "mine.toml")
    assert settings["ssd.close_deadline"] == ("ssd.close_deadline", 120.0, "120s", "mine.toml")
    assert settings["ssd.min_free"] == ("ssd.min_free", 5 * 10**9, "5.0 GB", "detected")
    assert settings["ssd.write"] == ("ssd.write", "evict", "evict", "default")
    assert settings["ram.max_memory"] == ("ram.max_memory", 40 * 2**30, "42.9 GB", "detected")
    assert settings["ssd.enabled"][1:3] == (True, "true")
    assert json.loads(json.dumps([s.value for s in settings.values()])) == [s.value for s in settings.values()]


def test_a_mapping_is_an_argument_and_its_ram_limit_is_measured_once(monkeypatch):
    memory(monkeypatch, 20 * 2**30, 2**30)
    loaded = Config.load(MappingProxyType({"ram": MappingProxyType({"max_memory": None, "max_memory_percent": 0.1})}))
    assert [loaded.ram_limit(), loaded.ram_limit(), loaded.spill_queue()] == [2 * 2**30, 2 * 2**30, 2**28]
    origins = {s.key: s.origin for s in loaded.effective()}
    assert (origins["ram.max_memory"], origins["ram.max_memory_percent"]) == ("detected", "argument")
    assert Config.load(loaded) is loaded


@pytest.mark.parametrize(("available", "limit", "queue"), [
    (2**20, 100 * 2**20, 100 * 2**17), (10**12, 2 * 10**11, 2**30), (None, 2**33 // 5, 2**33 // 40)])
def test_the_ram_limit_of_small_large_and_silent_machines(monkeypatch, available, limit, queue):
    memory(monkeypatch, *([] if available is None else [available]))  # without a value, asking raises
    assert (Config.load().ram_limit(), Config.load({"ram": {"max_memory": limit}}).spill_queue()) == (limit, queue)


@pytest.mark.parametrize(("total", "budget", "free"), [(10**12, 50 * 10**9, 5 * 10**9), (10**10, 10**9, 2 * 10**8)])
def test_disk_defaults_shrink_with_the_disk_that_will_hold_the_path(tmp_path, monkeypatch, total, budget, free):
    asked = disk(monkeypatch, total)
    loaded = Config.load({"ssd": {"path": tmp_path / "not" / "yet"}})
    assert (loaded.ssd_budget(), loaded.min_free()) == (budget, free)
    assert set(asked) == {tmp_path}


def test_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("TC_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda app: tmp_path / "caches" / app)
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    file = Path("conf/tiered-cache.toml")
    for text, path in {"../kv": "kv", "kv": "conf/kv", "${TC_DISK}/kv": "disk/kv", "~/kv": "home/kv",
                       "detect": "caches/tiered-cache"}.items():
        file.write_text(f'[ssd]\npath = "{text}"\n')
        assert Config.load(file).ssd_path() == tmp_path / path
    assert Config.load({"ssd": {"path": "kv"}}).ssd_path() == tmp_path / "kv"
    monkeypatch.setenv("TC_DISK", "")
    assert "no value is known" in refusal({"ssd": {"path": "$TC_DISK"}})


def test_the_template_is_the_defaults_commented_out_or_not(tmp_path, monkeypatch):
    disk(monkeypatch, 10**12)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**10))
    plain = Config.load().effective()
    assert Config.load(write(tmp_path, template())).effective() == plain
    uncommented, count = re.subn(r"(?m)^# (\w+ = )", r"\1", template())
    assert count == len(plain) == 24
    assert [s[:3] for s in Config.load(write(tmp_path, uncommented)).effective()] == [s[:3] for s in plain]
    explanations = re.findall(r"(?m)^(.*)\n# \w+ = ", template())
    assert [line for line in explanations if not re.match(r"# [A-Z\"].{8,117}(\.|[^(]\))$", line)] == []


def test_values_never_change_and_direct_construction_is_checked():
    direct = Config(ssd=config.SsdSection(budget=parse_size("1GB")))
    assert direct.ssd_budget() == 10**9
    for part, key in [(direct, "ssd"), (direct.ssd, "budget")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, key, None)
    with pytest.raises(ValidationError, match="exclude each other"):
        Config(ram=config.RamSection(max_memory=1, max_memory_percent=0.5))
