"""Probe of a host's compiler, for `dflash-server check --device cpu`. Importing this module loads no torch."""

from app.engine.device.probe import Finding, Probe, ok, warning


def probes(device: str) -> list[Probe]:
    """Return the probe. A probe "torch" comes before it."""
    return [Probe("compiler", compiler, ("torch",))]


def compiler() -> Finding:
    """Compile the operators of a CPU, unless an earlier start has kept them."""
    from app.engine.cpu import library, linear

    for dtype in library.DTYPES:
        if slower := linear.why_not_compiled(dtype):
            found, _, reason = slower.partition(", because ")
            return warning(found, reason)
    return ok(f"the operators are there, {library.made_by()}")
