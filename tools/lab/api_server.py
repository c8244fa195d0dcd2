"""The server whose engine is scripted, in a process of its own: `python -m tools.lab.api_server CORES ENGINE_ARGUMENTS
serve --host HOST --port PORT ...`. The first two are JSON lists; of the flags only these two mean something here."""

import argparse
import json
import sys

from app.api.server import run
from app.config.checkpoint import DEMO
from app.config.sources import GivenSetting, load_config
from tools.lab.api_cpu import stay_on


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cores", type=json.loads)
    parser.add_argument("engine", type=json.loads)
    parser.add_argument("--host")
    parser.add_argument("--port")
    given, _ = parser.parse_known_args()
    stay_on(given.cores)
    said = [GivenSetting(f"--{name}", name, getattr(given, name)) for name in ("host", "port")]
    config = load_config([*said, GivenSetting("--log-level", "log_level", "warning")])
    command = (sys.executable, "-P", "-m", "tools.lab.api_engine", *given.engine)
    return run(config, DEMO / "target", None, command)


if __name__ == "__main__":
    sys.exit(main())
