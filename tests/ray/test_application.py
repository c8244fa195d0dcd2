"""Arguments of `serve run`, as what Ray is asked for, without a cluster."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from tests import ROOT
from tests.ray.cluster import PYTHON, skip_without_ray

PROGRAM = """
import json, sys
import click, ray
from app.ray_serve import application
ray.is_initialized, ray.cluster_resources = lambda: True, lambda: json.loads(sys.argv[2])
found = []
for args in json.loads(sys.argv[1]):
    try:
        deployment = application(args)._bound_deployment
        config = deployment._deployment_config
        found.append({
            "device": deployment.init_args[0].engine.device,
            "actor": deployment.ray_actor_options,
            "replicas": config.num_replicas,
            "scaling": config.autoscaling_config and json.loads(config.autoscaling_config.json()),
            "ongoing": config.max_ongoing_requests,
            "stop": config.graceful_shutdown_timeout_s,
        })
    except click.ClickException as error:
        found.append(str(error))
print(json.dumps(found))
"""


def asked(*args: dict[str, Any], proxy: str = "1", resources: Sequence[str] = ("CPU",)) -> list[Any]:
    """Return what is asked of Ray for each set of arguments, or why it is refused. The cluster has these resources, and
    the demo pair is served where no model is given."""
    skip_without_ray()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_SERVE_ENABLE_HA_PROXY": proxy}
    command = [
        PYTHON,
        "-c",
        PROGRAM,
        json.dumps([{"model": "demo"} | each for each in args]),
        json.dumps(dict.fromkeys(resources, 8)),
    ]
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


def test_without_a_device_replicas_take_what_the_cluster_has_and_two_kinds_are_ambiguous():
    (on_cpus,) = asked({"num_replicas": 2})
    assert on_cpus["actor"] == {"num_cpus": 1}
    (on_npus,) = asked({"tensor_parallel_size": 2}, resources=("CPU", "NPU"))
    assert on_npus["actor"]["resources"] == {"NPU": 2} and on_npus["device"] == "npu"
    (on_gpus,) = asked({}, resources=("CPU", "GPU", "accelerator_type:H100"))
    assert on_gpus["actor"]["num_gpus"] == 1 and "resources" not in on_gpus["actor"]
    refused, on_cpus = asked({}, {"device": "cpu"}, resources=("CPU", "GPU", "NPU"))
    assert refused == "the cluster has NPUs and GPUs: say device=npu, device=cuda or device=cpu"
    assert on_cpus["actor"] == {"num_cpus": 1}


def test_a_typo_is_told_with_the_nearest_name_of_either_kind_of_argument():
    found = asked({"num_replica": 2}, {"max-num-seq": 2}, {"nonsense": 2}, {"device": "cuda:1"})
    assert found[0] == "unknown key num_replica (did you mean num_replicas?)"
    assert found[1] == "unknown key max-num-seq (did you mean max_num_seqs?)"
    assert found[2].startswith("unknown key nonsense")
    assert found[3].startswith("device=cuda:1: say cpu, cuda or npu")


def test_serve_run_says_one_sentence_without_a_traceback():
    skip_without_ray()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    command = [PYTHON.with_name("serve"), "run", "app.ray_serve:application", "device=cpu", "max_num_seq=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: unknown key max_num_seq (did you mean max_num_seqs?)"
    assert "Traceback" not in done.stdout + done.stderr


def test_what_the_engine_refuses_is_refused_before_a_replica_starts():
    (refused,) = asked({"tensor_parallel_size": 3})
    assert "--tensor-parallel-size 3" in refused
