"""Configuration: TOML, or nested dicts, to typed and checked values that never change.

The four ``...Section`` classes are the one table of keys, defaults and explanations: checks, error messages, template
and effective values are all made from it. Sizes are ints in bytes, durations floats in seconds. Use from any thread.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import platformdirs
import psutil
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from ssd_tier import TierOptions

SIZE_UNITS: dict[str, float] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DURATION_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
DETECT = "detect"  # TOML has no null: this word, like a key left out, asks for the value that fits the machine


class ConfigError(ValueError):
    """A configuration that cannot be used: one line per problem, with the key, the value and what is allowed."""


class Setting(NamedTuple):
    """One key as it takes effect. ``value`` fits JSON (bytes, seconds); ``shown`` is the same for people."""
    key: str
    value: object
    shown: str
    origin: str  # "default", "detected" (computed from the machine), the file's name, or "argument"


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def _parse(value: object, what: str, plain: Any, units: Mapping[str, float], low: int, high: int) -> float:
    number: float | None = value if isinstance(value, plain) and not isinstance(value, bool) else None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value, re.I) if isinstance(value, str) else None
    factors = {"": 1} | {unit.lower(): factor for unit, factor in units.items()}
    if match and match[2].lower() in factors:
        number = float(match[1]) * factors[match[2].lower()]
    if number is None:
        raise ConfigError(f"{_toml(value)}: not a {what} or a number with {', '.join(units)}")
    if not low <= number <= high:
        raise ConfigError(f"{_toml(value)}: must be from {low} to {high} {what.split()[-1]}")
    return number


def parse_size(text: str | int) -> int:
    """Bytes of 123, "123", "8GB" (10**9), "1.5 GiB" (2**30), in any case. ConfigError if it is not a size above 0."""
    return round(_parse(text, "size; write bytes", int, SIZE_UNITS, 1, 2**63 - 1))


def parse_duration(text: str | float) -> float:
    """Seconds of 1.5, "500ms", "10s", "2m", "1h", "30d". ConfigError if not up to a year (waits overflow)."""
    return float(_parse(text, "duration; write seconds", int | float, DURATION_UNITS, 0, 8760 * 3600))


def format_size(n: int) -> str:
    """Bytes for people, in decimal units: "512 B", "50.0 GB"."""
    value, unit = n / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value >= 999.95:  # would be shown as 1000.0
            value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if n >= 1000 else f"{n} B"


def _absolute(value: Any, info: ValidationInfo) -> Path | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or text == DETECT:
        return None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{_toml(value)}: must be the path of a directory, as text")
    expanded = os.path.expanduser(os.path.expandvars(text))
    if expanded.startswith("~") or "$" in expanded or not expanded.strip():
        raise ConfigError(f"{_toml(text)}: no value is known for a ~ or $NAME in it; write the directory in full")
    return Path(os.path.abspath(os.path.join((info.context or {}).get("base", ""), expanded)))


# In a field's metadata, these three also tell how its value is shown.
SIZE = BeforeValidator(lambda value: None if value is None or value == DETECT else parse_size(value))
SIZE_OR_ZERO = BeforeValidator(lambda value: 0 if str(value) == "0" else parse_size(value))
DURATION = BeforeValidator(parse_duration)
DetectedSize = Annotated[int | None, SIZE]
DetectedPath = Annotated[Path | None, BeforeValidator(_absolute)]


def _key(default: Any, text: str, **more: Any) -> Any:
    """``title``: what is allowed, where type and bounds do not say it; ``examples``: what the template shows."""
    return Field(default=default, description=text, **more)


class _Frozen(BaseModel):
    model_config = {"frozen": True, "extra": "forbid", "strict": True}  # strict: true is no int, "256" no number


class CacheSection(_Frozen):
    block_tokens: int = _key(256, "Tokens per block, the unit that is stored and shared.", ge=16, le=4096)
    look_up_log: str = _key("", "File to append a line to for each look-up: hashes, for `simulate`. Empty: none.")


class RamSection(_Frozen):
    max_memory: DetectedSize = _key(None, 'RAM to use, like "8GB". Detected: max_memory_percent, at least 100 MiB.')
    max_memory_percent: float = _key(0.2, "Share of the available RAM. Set this or max_memory, not both.", gt=0, le=1)
    max_entries: int = _key(1000, "Most sequences to keep in RAM.", ge=1)
    min_prefix_tokens: int = _key(32, "Shorter sequences are neither stored nor matched.", ge=1)
    kv_quantize: bool = _key(False, "Store keys and values quantized: less RAM and disk, and answers may differ.")
    kv_bits: Literal[2, 3, 4, 5, 6, 8] = _key(8, "Bits per quantized value.")
    kv_group_size: Literal[32, 64, 128] = _key(64, "Quantized values that share one scale.")
    kv_min_quantize_tokens: int = _key(256, "Shorter sequences are not quantized.", ge=0)

    @model_validator(mode="after")
    def _one_limit(self) -> RamSection:
        if self.max_memory and "max_memory_percent" in self.model_fields_set:
            both = f"ram.max_memory = {self.max_memory} and ram.max_memory_percent = {self.max_memory_percent}"
            raise ConfigError(f"{both} exclude each other; remove one")
        return self


class SsdSection(_Frozen):
    enabled: bool = _key(True, "Keep on the SSD what RAM has no room for, also across restarts.")
    path: DetectedPath = _key(None, "Directory; ~ and $VARS work; relative to this file. Detected: the user's cache.")
    budget: DetectedSize = _key(
        None, "Most bytes of all files. Left out: 50 GB, at most 10 % of the disk.", examples=["50GB"])
    min_free: DetectedSize = _key(
        None, "Disk space to leave free. Left out: 5 GB, at most 2 % of it.", examples=["5GB"])
    write: Literal["evict", "through"] = _key("evict", "When to write: as blocks are about to leave RAM, or at once.")
    admission: Literal["second-touch", "all"] = _key(
        "second-touch", "What to write once the budget is full: only what came up before, or all.")
    compression: str = _key("zstd:1", "Higher levels are slower and hardly smaller.",
                            pattern=r"^(none|zstd:([1-9]|1[0-9]))$", title='"none" or "zstd:1" to "zstd:19"')
    durability: Literal["cache", "batch", "full"] = _key(
        "cache", "Power loss: cache, nothing was synced; batch, costs the last batch; full, nothing.")
    spill_queue: DetectedSize = _key(None, "RAM for what waits to be written. Detected: 1/8 of the limit, up to 1 GiB.")
    retention: Annotated[float, DURATION] = _key(0.0, 'Remove what was not used for so long, like "30d". 0: never.')
    daily_writes: Annotated[int, SIZE_OR_ZERO] = _key(
        0, 'Most bytes to write in a day (UTC), like "500GB", to spare the SSD. 0: any.')

    close_deadline: Annotated[float, DURATION] = _key(10.0, "Longest that closing may take to save what RAM holds.")

    @model_validator(mode="after")
    def _room_for_an_index(self) -> SsdSection:
        if self.budget is not None and self.budget < 4_000_000:
            raise ConfigError(f"ssd.budget = {self.budget}: must be 4 MB at least; the index alone takes half of that")
        return self


class PromotionSection(_Frozen):
    policy: Literal["cost", "always", "never"] = _key(
        "cost", "Bring back what only the SSD holds: where that is quicker than computing, or always.")
    deadline: Annotated[float, DURATION] = _key(
        30.0, "A promotion that takes longer ends with what has arrived. 0: no deadline.")


class Config(_Frozen):
    """All settings, frozen; build one with ``Config.load``. A size or path of None is detected: ask the methods.
    Plain construction works too, but raises pydantic's ValidationError."""
    cache: CacheSection = CacheSection()
    ram: RamSection = RamSection()
    ssd: SsdSection = SsdSection()
    promotion: PromotionSection = PromotionSection()
    _origin: str = "argument"

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Config:
        """From a TOML file's path, a nested mapping, None (the defaults), or a Config (as it is). A relative ssd.path
        starts at the file's directory, else at the current one. ConfigError for what is not readable or not allowed."""
        if isinstance(source, Config):
            return source
        prefix, origin, base = "", "argument", ""
        if isinstance(source, str | os.PathLike):
            path = Path(os.path.expanduser(source))
            prefix, origin, base = f"{path}: ", path.name, os.path.abspath(path.parent)
            source = _read(path)
        if not isinstance(source, Mapping | None):
            raise ConfigError(f"{source!r}: not a configuration; give a TOML file's path, a mapping, a Config or None")
        data = {key: dict(part) if isinstance(part, Mapping) else part for key, part in (source or {}).items()}
        try:
            config = cls.model_validate(data, context={"base": base})
        except ValidationError as error:
            raise ConfigError("\n".join(prefix + _sentence(problem) for problem in error.errors())) from None
        config._origin = origin
        return config

    @functools.cached_property
    def _available(self) -> int | None:  # measured once: the limit must not shrink while the cache fills the RAM
        try:
            return int(psutil.virtual_memory().available)
        except Exception:  # psutil raises many kinds where a system hides its memory
            return None

    def ram_limit(self) -> int:
        """Bytes of RAM to use. Measured at the first call; later calls on the same Config agree with it."""
        share = self.ram.max_memory_percent
        detected = int(8 * 2**30 * share) if self._available is None else max(int(self._available * share), 100 * 2**20)
        return self.ram.max_memory or detected

    def ssd_path(self) -> Path:
        """The SSD tier's directory, absolute. It need not exist."""
        return self.ssd.path or Path(os.path.abspath(platformdirs.user_cache_path("tiered-cache")))

    def ssd_budget(self) -> int:
        """Bytes that the SSD tier may use."""
        return self.ssd.budget or min(50 * 10**9, self._disk_bytes() // 10)

    def min_free(self) -> int:
        """Bytes to leave free on the disk."""
        return self.ssd.min_free or min(5 * 10**9, self._disk_bytes() // 50)

    def spill_queue(self) -> int:
        """Bytes of RAM, part of ram_limit(), for what waits to be written."""
        return self.ssd.spill_queue or min(2**30, self.ram_limit() // 8)

    def tier_options(self) -> TierOptions:
        """All that the SSD tier is told."""
        ssd = self.ssd
        return TierOptions(
            path=self.ssd_path(),
            budget=self.ssd_budget(),
            min_free=self.min_free(),
            spill_queue=self.spill_queue(),
            level=None if ssd.compression == "none" else int(ssd.compression.split(":")[1]),
            durability=ssd.durability,
            retention=ssd.retention,
            daily=ssd.daily_writes,
            admission=ssd.admission,
        )

    def _disk_bytes(self) -> int:
        path = self.ssd_path()  # need not exist yet; what it will be made in is on the same disk
        return shutil.disk_usage(next(p for p in (path, *path.parents) if os.path.exists(p))).total

    def effective(self) -> list[Setting]:
        """Every key in file order, with the value that takes effect and where it comes from."""
        detect = {"max_memory": self.ram_limit, "path": self.ssd_path, "budget": self.ssd_budget,
                  "min_free": self.min_free, "spill_queue": self.spill_queue}
        settings = []
        for key, field in FIELDS.items():
            section, name = key.split(".")
            part = getattr(self, section)
            value: Any = getattr(part, name)
            origin = "detected" if value is None else self._origin if name in part.model_fields_set else "default"
            value = detect[name]() if value is None else value
            settings.append(Setting(key, str(value) if name == "path" else value, _shown(field, value), origin))
        return settings


FIELDS: dict[str, FieldInfo] = {f"{section}.{name}": field for section, part in Config.model_fields.items()
                                for name, field in type(part.default).model_fields.items()}


def template() -> str:
    """A TOML file with every key explained and its default commented out."""
    lines = ["# Settings of tiered-cache. To change one, remove the # before it. Sizes: bytes, or 8GB, 8GiB and the",
             '# like in quotes; durations: seconds, or "500ms", "10s", "2m", "9d". "detect": what fits the machine.']
    for key, field in FIELDS.items():
        section, name = key.split(".")
        lines += [] if f"[{section}]" in lines else ["", f"[{section}]"]
        value = field.examples[0] if field.examples else DETECT if field.default is None else field.default
        value = _shown(field, value) if DURATION in field.metadata else value
        lines += [f"# {field.description} ({_allowed(field)})".removesuffix(" ()"), f"# {name} = {_toml(value)}"]
    return "\n".join(lines) + "\n"


def _shown(field: FieldInfo, value: Any) -> str:
    words = f"{value:.10g}s" if DURATION in field.metadata else _toml(value)
    words = str(value) if isinstance(value, str | Path) else words
    return format_size(value) if {SIZE, SIZE_OR_ZERO} & {*field.metadata} else words


def _allowed(field: FieldInfo) -> str:  # empty for keys whose own check says it
    if field.title or get_origin(field.annotation) is Literal:
        return field.title or " or ".join(map(_toml, get_args(field.annotation)))
    kinds: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
    signs = {"gt": ">", "ge": ">=", "le": "<="}
    bounds = [f"{signs[k]} {getattr(m, k)}" for m in field.metadata for k in signs if hasattr(m, k)]
    return "" if DURATION in field.metadata else f"{kinds.get(field.annotation, '')} {' and '.join(bounds)}".strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        hint = f"; `tiered-cache config init {path}` writes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML in UTF-8 (sizes and durations need quotes): {error}") from None


def _sentence(problem: Any) -> str:
    loc, got = problem["loc"], _toml(problem["input"])
    key = ".".join(map(str, loc))
    section, _, name = key.rpartition(".")
    if error := problem.get("ctx", {}).get("error"):
        return f"{key} = {error}" if key in FIELDS else str(error)
    if key in FIELDS:
        return f"{key} = {got}: must be {_allowed(FIELDS[key]) if len(loc) > 1 else f'{name} in a section [{section}]'}"
    if key in Config.model_fields:
        return f"{key} = {got}: must be a section, [{key}], with keys of its own"
    every = {known.partition(".")[2]: known for known in FIELDS}
    own = {n: k for n, k in every.items() if k.startswith(f"{section}.")} or {n: n for n in Config.model_fields}
    near = difflib.get_close_matches(name.lower(), own, 1) or difflib.get_close_matches(name.lower(), every, 1)
    hint = f"did you mean {(every | own)[near[0]]}?" if near else f"known are {', '.join(own)}"
    return f"{key} is not a known {'key' if section else 'section'}; {hint}"
