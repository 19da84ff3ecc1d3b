"""Fields that decoders of Hugging Face share: tied outputs, rotary positions, sliding windows."""

from collections.abc import Mapping
from typing import Any

from addnorm.config import MAX_DEPTH, ModelConfig
from addnorm.errors import ConfigError, SavedError
from addnorm.interop.mapping import ConfigJson, FieldValues, Names, Special, refuse

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layers that see everything, and layers that see a window, in `layer_types`."""


def ties(output: str, default: bool = True) -> Special:
    """Return the field of an output matrix that is the embedding, or stored by this name.

    Parameters
    ----------
    output : name of the output matrix.
    default : whether it is tied if config.json does not say.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        tied = settings.get("tie_word_embeddings", default)
        return {"tie_embeddings": "all" if tied is not False else "none"}

    return Special(read, lambda c: {"tie_word_embeddings": c.ties_output})


# ── Rotary positions ──────────────────────────────────────────────────────────────────────────────


def rotary(share: float | None = None) -> Special:
    """Return the field of rotary positions, in the form of transformers 5 and of earlier ones.

    Parameters
    ----------
    share : fraction of a head that is rotated if config.json does not say; None where transformers
        ignores `partial_rotary_factor` and rotates whole heads.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        rope = _object(settings, "rope_parameters") or _object(settings, "rope_scaling")
        if FULL in rope or SLIDING in rope:
            raise refuse("rope_parameters", rope, "here all layers have the same rotation.")
        return {"position_options": _read_rope(settings, rope, 10000.0, share)}

    def write(c: ModelConfig) -> FieldValues:
        rope = _write_rope(c.position_options)
        if share is not None:
            rope["partial_rotary_factor"] = c.position_options.get("share", 1.0)
        return {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}

    return Special(read, write)


def rotary_by_kind(alternate: int, pattern: str) -> Special:
    """Return the field of rotary positions with another base in layers with a window (Gemma 3).

    Parameters
    ----------
    alternate, pattern : as for `windows`.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        rope = _object(settings, "rope_parameters")
        far = _object(rope, FULL) | _object(settings, "rope_scaling")
        near = _object(rope, SLIDING)
        local = float(near.get("rope_theta") or settings.get("rope_local_base_freq", 10000.0))
        if near.get("rope_type", "default") != "default":
            raise refuse("rope_type", near["rope_type"], "windowed layers read default only.")
        kinds = set(_read_kinds(settings, alternate, pattern))
        if kinds == {SLIDING}:
            return {"position_options": {"base": local}}
        options = _read_rope(settings, far, 1e6, None)
        same = local == options["base"] and "stretch" not in options
        if kinds == {FULL} or same:
            return {"position_options": options}
        return {"position_options": options | {"window_base": local}}

    def write(c: ModelConfig) -> FieldValues:
        far = _write_rope(c.position_options)
        local = c.position_options.get("window_base") if c.full_every else None
        near = {"rope_type": "default", "rope_theta": local or far["rope_theta"]}
        return {"rope_parameters": {FULL: far, SLIDING: near}}

    return Special(read, write)


def _object(settings: ConfigJson, name: str) -> dict[str, Any]:
    """Return an object in config.json; an empty one if it has none."""
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise refuse(name, value, "it must be an object.")
    return value


def _read_rope(
    settings: ConfigJson, rope: Mapping[str, Any], base: float, share: float | None
) -> FieldValues:
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", settings.get("rope_theta", settings.get("rotary_emb_base")))
    options: FieldValues = {"base": float(base if theta is None else theta)}
    part = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if share is not None:
        part = settings.get("rotary_pct", share) if part is None else part
        options |= {"share": float(part)} if part != 1.0 else {}
    elif part not in (None, 1.0) and kind != "default":
        raise refuse("partial_rotary_factor", part, "stretched positions rotate whole heads here.")
    if kind == "default":
        return options
    if kind == "linear":
        return options | {"stretch": float(rope["factor"])}
    if kind == "llama3":
        length = float(rope["original_max_position_embeddings"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        limits = {"stretch_from": length / high, "stretch_full": length / low}
        return options | {"stretch": float(rope["factor"]), **limits}
    raise refuse("rope_type", kind, "addnorm stretches rotary positions as linear or llama3.")


def _write_rope(options: Mapping[str, Any]) -> FieldValues:
    if options.get("layout", "halves") != "halves":
        raise ConfigError("Hugging Face's rotary positions pair i with i + head_width/2 (halves).")
    rope: FieldValues = {"rope_type": "default", "rope_theta": options.get("base", 10000.0)}
    stretch, full = options.get("stretch", 1.0), options.get("stretch_full", 0.0)
    if stretch != 1.0 and full:
        high = full / options["stretch_from"]
        rope |= {"rope_type": "llama3", "factor": stretch, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": high, "original_max_position_embeddings": round(full)}
    elif stretch != 1.0:
        rope |= {"rope_type": "linear", "factor": stretch}
    return rope


# ── Sliding windows ───────────────────────────────────────────────────────────────────────────────


def windows(
    default: int,
    *,
    alternate: int = 0,
    pattern: str | None = None,
    listed: bool = True,
    opt_in: bool = False,
) -> Special:
    """Return the field of sliding windows.

    Parameters
    ----------
    default : window if config.json has none.
    alternate : every n-th layer has no window, if config.json does not list the layers.
    pattern : key of config.json for another n; None where transformers reads none.
    listed : whether `layer_types` lists the layers; if not, transformers ignores it.
    opt_in : whether windows need `use_sliding_window`, and begin at `max_window_layers` (Qwen).
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        window = settings.get("sliding_window", default)
        if window is None or (opt_in and not settings.get("use_sliding_window", False)):
            return {}
        if not listed:
            return {"window": window}
        full = [kind == FULL for kind in _read_kinds(settings, alternate, pattern, opt_in=opt_in)]
        if all(full):
            return {}
        if not any(full):
            return {"window": window}
        every = full.index(True) + 1
        if full != [(layer + 1) % every == 0 for layer in range(len(full))]:
            missing = f"{FULL} must be at equal distances, in layers n, 2n, 3n … for some n."
            raise refuse("layer_types", settings.get("layer_types"), missing)
        return {"window": window, "full_every": every}

    def write(c: ModelConfig) -> FieldValues:
        settings: FieldValues = {"sliding_window": c.window}
        if opt_in:
            settings |= {"use_sliding_window": c.window is not None, "max_window_layers": 0}
        if listed:
            is_full = [
                c.window is None or (c.full_every and (layer + 1) % c.full_every == 0)
                for layer in range(c.depth)
            ]
            settings["layer_types"] = [FULL if full else SLIDING for full in is_full]
        return settings

    return Special(read, write)


def _read_kinds(
    settings: ConfigJson, alternate: int, pattern: str | None, *, opt_in: bool = False
) -> list[str]:
    """Return the kind of each layer, as listed or by the rule of the architecture."""
    depth = settings.get("num_hidden_layers")
    if not isinstance(depth, int):
        raise SavedError(f"config.json must have a num_hidden_layers: got {depth!r}.")
    kinds = settings.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != depth or not {*kinds} <= {FULL, SLIDING}:
            missing = f"it must name {FULL} or {SLIDING} for each of the {depth} layers."
            raise refuse("layer_types", kinds, missing)
        return kinds
    layers = range(min(depth, MAX_DEPTH))
    if opt_in:
        first = settings.get("max_window_layers", 28)
        return [SLIDING if layer >= first else FULL for layer in layers]
    every = alternate if pattern is None else settings.get(pattern, alternate)
    return [FULL if every and (layer + 1) % every == 0 else SLIDING for layer in layers]
