"""Arguments of `serve run`, as what Ray is asked for, without a cluster."""

import json
import os
import subprocess
from typing import Any

import yaml

from tests import ROOT
from tests.ray.cluster import PYTHON, skip_without_ray

PROGRAM = """
import json, sys
from app.config.error import ConfigError
from app.ray_serve import application
found = []
for args in json.loads(sys.argv[1]):
    try:
        deployment = application(args)._bound_deployment
        config = deployment._deployment_config
        found.append({
            "actor": deployment.ray_actor_options,
            "replicas": config.num_replicas,
            "scaling": config.autoscaling_config and json.loads(config.autoscaling_config.json()),
            "ongoing": config.max_ongoing_requests,
            "stop": config.graceful_shutdown_timeout_s,
        })
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def asked(*args: dict[str, Any], proxy: str = "1") -> list[Any]:
    """Return what is asked of Ray for each set of arguments, or why it is refused."""
    skip_without_ray()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_SERVE_ENABLE_HA_PROXY": proxy}
    command = [PYTHON, "-c", PROGRAM, json.dumps(args)]
    return list(json.loads(subprocess.check_output(command, env=environment, text=True).splitlines()[-1]))


def test_devices_scaling_bounds_and_the_drain_follow_the_settings():
    on_npus, on_gpus, scaled = asked(
        {"device": "npu", "tensor_parallel_size": "2", "num_replicas": "3", "shutdown_timeout": 90},
        {"device": "cuda", "num_cpus": 4, "max_num_seqs": 8},
        {"device": "cpu", "max_num_seqs": 8, "max_queue": 2, "max_replicas": 4},
    )
    assert {"num_cpus": 1, "resources": {"NPU": 2}}.items() <= on_npus["actor"].items()
    assert (on_npus["replicas"], on_npus["stop"]) == (3, 95)
    assert {"num_cpus": 4, "num_gpus": 1}.items() <= on_gpus["actor"].items() and "resources" not in on_gpus["actor"]
    assert on_gpus["ongoing"] > 8 + 4 * 8, "room for probes and refusals"
    assert 8 + 2 < scaled["ongoing"] < 8 + 4 * 8
    wanted = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 6}
    assert wanted.items() <= scaled["scaling"].items()


def test_the_file_of_the_manual_is_accepted_as_it_is():
    file = yaml.safe_load((ROOT / "docker" / "ray.yaml").read_text(encoding="utf-8"))
    (found,) = asked(*(app["args"] for app in file["applications"]))
    assert found["actor"]["resources"] == {"NPU": 1}


def test_rays_python_proxy_is_refused_unless_it_is_asked_for():
    refused, allowed = asked({"device": "cpu"}, {"device": "cpu", "allow_python_proxy": "true"}, proxy="0")
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in refused and "148 ms" in refused
    assert allowed["replicas"] == 1
