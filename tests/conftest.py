"""What all tests share: Hypothesis draws the same examples everywhere, and gives them all the time they take."""

import contextlib

with contextlib.suppress(ModuleNotFoundError):  # the NPU's environment goes without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "dflash",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("dflash")
