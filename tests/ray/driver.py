"""A Ray cluster of this machine with the application on it: `python driver.py PORT` in the environment of Ray.

It reads commands from stdin, one JSON object a line, and answers each with a line. The end of stdin ends the cluster.
"""

import json
import sys
from typing import Any

import click
import ray
from ray import serve

from app.ray_serve import application


def obey(command: dict[str, Any]) -> Any:
    """Deploy with these arguments, try an application that fails, or return the states of the replicas."""
    try:
        if "deploy" in command:
            serve.run(application(command["deploy"]), name="dflash", route_prefix="/")
        if "fail" in command:
            serve.run(application(command["fail"]), name="failing", route_prefix="/failing")
    except click.ClickException as error:
        return {"refused": str(error)}
    except RuntimeError as error:
        said = {"failed": str(error)}
        if (failing := serve.status().applications.get("failing")) is not None:
            said = {"failed": "".join(one.message for one in failing.deployments.values())}
            serve.delete("failing")
        return said
    deployments = serve.status().applications["dflash"].deployments.values()
    return {"states": {str(state): count for one in deployments for state, count in one.replica_states.items()}}


def start(attempts: int = 4) -> None:
    """Start Ray. It gives its own node 30 s to start, which a busy machine may exceed."""
    try:
        limits = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
        ray.init("local", **limits, include_dashboard=False, configure_logging=False)
    except Exception as error:
        if "timed out during startup" not in str(error) or attempts == 1:
            raise
        ray.shutdown()
        start(attempts - 1)


def main() -> None:
    start()
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print(json.dumps({"started": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
