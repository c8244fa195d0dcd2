"""Probes of an Ascend host, for `dflash-server check --device npu`.

Importing this module loads neither torch nor torch_npu, so a host without them still gets a report.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import pwd
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path

from app.engine.device.probe import Finding, Probe, failed, ok, warning
from app.engine.npu.error_codes import explain
from app.engine.npu.torch_build import CPU_INDEX

DOCUMENTED = {
    "9.1.0": "2.12.0 2.11.0 2.10.0.post4 2.9.0.post6 2.7.1.post8",
    "9.0.0": "2.10.0.post2 2.9.0.post2 2.8.0.post4 2.7.1.post4",
}
"""CANN -> the versions of torch_npu that are documented with it (COMPATIBILITY.md and README of Ascend/pytorch)."""

BEST_SET = "torch 2.10.0, torch_npu 2.10.0.post4 and CANN 9.1.0"
OLDEST_CANN = "9.0.0"
"""8.5 wants numpy below 2, which the images have above it, and its attention refuses heads of 256 and null lengths."""
GRAPH_DRIVER = "25.5.1"
"""HDK from which graph captures do not run out of streams ("Alloc sq cq fail")."""
CHIPS = ("Ascend910B", "Ascend910_93")
"""Names that A2 and A3 cards report. Other chips have other operators."""

OPERATORS = {
    "npu_fused_infer_attention_score": "query key value atten_mask actual_seq_lengths actual_seq_lengths_kv "
    "block_table num_heads num_key_value_heads scale pre_tokens next_tokens input_layout sparse_mode block_size",
    "npu_fused_infer_attention_score_v2": "query key value atten_mask actual_seq_qlen actual_seq_kvlen block_table "
    "learnable_sink num_query_heads num_key_value_heads softmax_scale pre_tokens next_tokens input_layout sparse_mode "
    "block_size",
    "npu_scatter_pa_kv_cache": "key value key_cache value_cache slot_mapping cache_mode",
    "npu_scatter_nd_update_": "input indices updates",
    "npu_rms_norm": "input gamma epsilon",
    "npu_add_rms_norm": "x1 x2 gamma epsilon",
    "npu_rotary_mul": "input r1 r2",
    "npu_apply_rotary_pos_emb": "query key cos sin layout",
    "npu_swiglu": "input",
    "npu_clipped_swiglu": "x alpha limit bias interleaved",
    "npu_moe_gating_top_k_softmax_v2": "x k renorm",
    "npu_moe_init_routing_v2": "x expert_idx active_num expert_num expert_tokens_num_type expert_tokens_num_flag "
    "active_expert_range quant_mode",
    "npu_grouped_matmul": "x weight bias group_list split_item group_type group_list_type scale per_token_scale "
    "output_dtype",
    "npu_grouped_matmul_swiglu_quant_v2": "x weight weight_scale x_scale group_list dequant_dtype group_list_type",
    "npu_moe_token_unpermute": "permuted_tokens sorted_indices probs",
    "npu_dynamic_quant": "input",
    "npu_add_rms_norm_dynamic_quant": "x1 x2 gamma epsilon output_mask",
    "npu_format_cast": "input acl_format",
    "npu_quant_matmul": "x1 x2 scale pertoken_scale bias output_dtype",
    "npu_recurrent_gated_delta_rule": "query key value state beta g scale actual_seq_lengths ssm_state_indices",
}
"""Operators that NpuBackend calls, with the arguments that it passes."""

CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_ROOT = Path("/")
_SMI = ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi")
_SET_ENV = ("usr/local/Ascend/ascend-toolkit/set_env.sh", "usr/local/Ascend/cann/set_env.sh")
_INSTALL_CANN = "install CANN 9.1.0 (toolkit, and the ops package of this chip)"


def probes(device: str, ranks: int = 1) -> list[Probe]:
    """Return the probes, each after the ones that it needs. A probe "torch" comes before these."""
    return [
        Probe("driver", partial(driver, _ROOT), without="the driver is missing"),
        Probe("device files", partial(device_files, _ROOT)),
        *([Probe("user", user)] if ranks > 1 else []),
        Probe("CANN", partial(cann, os.environ, _ROOT)),
        Probe("torch_npu", torch_npu, ("torch",), "torch_npu cannot be loaded"),
        Probe("versions", partial(versions, os.environ), ("torch",)),
        Probe("devices", partial(devices, device, os.environ, _ROOT), ("torch_npu",), "the device does not exist"),
        Probe("chip", partial(chip, device), ("devices",)),
        Probe("graphs", partial(graphs, _ROOT), ("driver",)),
        Probe("operators", operators, ("torch_npu",), "operators are missing"),
    ]


def driver(root: Path) -> Finding:
    version, folder = driver_version(root), _driver_folder(root)
    smi = next((root / place for place in _SMI if (root / place).exists()), None) or shutil.which("npu-smi")
    where = f"npu-smi is {smi}" if smi else "no npu-smi"
    if version is not None:
        return ok(f"driver {version}, {where}")
    if smi or (folder / "lib64").is_dir():
        hint = "in a container mount /usr/local/Ascend/driver/version.info and /etc/ascend_install.info"
        return warning(f"{folder / 'version.info'} cannot be read, {where}", hint)
    return failed(
        f"no driver: neither {folder / 'version.info'} nor npu-smi is here",
        f"install the Ascend HDK (driver and firmware), {GRAPH_DRIVER} or later; in a container mount "
        "/usr/local/Ascend/driver/lib64, /usr/local/Ascend/driver/version.info and /usr/local/bin/npu-smi",
    )


def device_files(root: Path) -> Finding:
    """Check that this user may read and write all of /dev/davinciN, and three files that every process needs."""
    numbered = _numbered(root)
    needed = [root / "dev" / name for name in ("davinci_manager", "devmm_svm", "hisi_hdc")]
    missing = [str(path) for path in needed if not path.exists()] + ([] if numbered else [str(root / "dev/davinciN")])
    if missing:
        hint = (
            "on the host load the driver (`npu-smi info`); in a container pass --device for each card and for "
            "/dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc, or use the Ascend Docker runtime"
        )
        return failed(f"missing: {', '.join(missing)}", hint)
    closed = [str(path) for path in (*numbered, *needed) if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        hint = "`usermod -aG GROUP USER` with the group that `ls -l /dev/davinci*` shows (HwHiAiUser), and log in again"
        return failed(f"this user may not read and write {', '.join(closed)}", hint)
    return ok(f"{len(numbered)} of /dev/davinciN, and davinci_manager, devmm_svm, hisi_hdc")


def user() -> Finding:
    """Check that this user has an entry in passwd. HCCL looks it up where ranks meet."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return failed(
            f"user {os.getuid()} has no entry in /etc/passwd: HCCL fails with error 19, ra init failed",
            "in a container run as the image's user, or mount a passwd file with this user: "
            "--mount type=bind,source=/etc/passwd,target=/etc/passwd,readonly",
        )
    return ok(f"user {os.getuid()} has an entry in /etc/passwd, which HCCL wants")


def cann(environ: Mapping[str, str], root: Path) -> Finding:
    name = next((name for name in CANN_HOMES if environ.get(name)), None)
    scripts = [str(root / place) for place in _SET_ENV if (root / place).exists()]
    source = f"run `source {scripts[0]}`" if scripts else f"{_INSTALL_CANN} and source its set_env.sh"
    if name is None:
        return failed(f"set_env.sh is not sourced: neither {' nor '.join(CANN_HOMES)} is set", source)
    home = Path(environ[name])
    if not home.is_dir():
        return failed(f"{name} is {home}, which is not a folder", source)
    if not environ.get("ASCEND_OPP_PATH"):
        return failed(f"{name} is set and ASCEND_OPP_PATH, where kernels are looked for, is not", source)
    version = cann_version(environ)
    if version is None:
        return warning(f"CANN of unknown version in {home}", "no ascend_*_install.info is below it: is this CANN?")
    if _numbers(version) < _numbers(OLDEST_CANN):
        return failed(f"CANN {version} in {home} is older than {OLDEST_CANN}", f"{_INSTALL_CANN}, with {BEST_SET}")
    return ok(f"CANN {version} in {home}")


def torch_npu() -> Finding:
    """Load torch_npu. torch must have been loaded with TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    if importlib.util.find_spec("torch_npu") is None:
        hint = f"pip install '.[npu]' in the source tree, on x86 with --extra-index-url {CPU_INDEX}"
        return failed("torch_npu is not installed", hint)
    try:
        module = importlib.import_module("torch_npu")
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        return failed(f"torch_npu cannot be loaded: {reason[0]}", explain(str(error)) or f"install {BEST_SET}")
    return ok(f"torch_npu {module.__version__}")


def versions(environ: Mapping[str, str]) -> Finding:
    """Check that torch, torch_npu and CANN belong together."""
    try:
        ours, npu = (importlib.metadata.version(name) for name in ("torch", "torch_npu"))
    except importlib.metadata.PackageNotFoundError as error:
        return Finding("not tried", f"{error.name} is not installed")
    return matched(ours, npu, cann_version(environ))


def matched(ours: str, npu: str, toolkit: str | None) -> Finding:
    """Check versions of torch, torch_npu and CANN. An undocumented set is a warning."""
    found = f"torch {ours}, torch_npu {npu}, CANN {toolkit or 'unknown'}"
    if _numbers(ours) != _numbers(npu):
        base = ".".join(str(number) for number in _numbers(npu))
        return failed(f"{found}: torch_npu {npu} belongs to torch {base}", f"install {BEST_SET}, or torch {base}")
    documented = next((cann for cann, known in DOCUMENTED.items() if npu.partition("+")[0] in known.split()), None)
    if documented is None:
        return warning(f"{found}: nothing is known of this set", f"known is {BEST_SET}; see the operators below")
    if toolkit is None or _numbers(toolkit) != _numbers(documented):
        hint = f"install CANN {documented}; see the operators below"
        return warning(f"{found}: torch_npu {npu} is documented with CANN {documented}", hint)
    return ok(f"{found}: a documented set")


def devices(device: str, environ: Mapping[str, str], root: Path) -> Finding:
    import torch_npu

    count, index = int(torch_npu.npu.device_count()), _index(device)
    visible, hidden = environ.get("ASCEND_RT_VISIBLE_DEVICES"), max(0, len(_numbered(root)) - count)
    by = "" if visible is None else f"; ASCEND_RT_VISIBLE_DEVICES={visible} hides {hidden}"
    if not count:
        hint = "`npu-smi info` must list it as OK; ASCEND_RT_VISIBLE_DEVICES must name cards that are here"
        return failed(f"torch_npu sees no NPU{by}", hint)
    found = f"{count} visible{by}"
    if index >= count:
        hint = f"visible devices are counted from 0: npu:0 to npu:{count - 1}"
        return failed(f"{device} is not among them: {found}", hint)
    return ok(found)


def chip(device: str) -> Finding:
    import torch_npu

    name = str(torch_npu.npu.get_device_name(_index(device)))
    if not name.startswith(CHIPS):
        hint = "whether the operators work on this chip is unknown; see the comparisons below"
        return warning(f"{name} is neither A2 (Ascend910B) nor A3 (Ascend910_93)", hint)
    return ok(name)


def graphs(root: Path) -> Finding:
    """Check that graphs can be captured and updated. Without them the server runs, slower."""
    version, otherwise = driver_version(root), "or serve with --enforce-eager"
    if version is None:
        return warning("the driver's version is unknown", f"graphs need HDK {GRAPH_DRIVER}: find out, {otherwise}")
    if _numbers(version) < _numbers(GRAPH_DRIVER):
        hint = f"update it, or captures may end in 'Alloc sq cq fail', {otherwise}"
        return warning(f"driver {version} is older than HDK {GRAPH_DRIVER}, which graphs need", hint)
    if npu := getattr(sys.modules.get("torch_npu"), "npu", None):
        arguments = inspect.signature(npu.graph.__init__).parameters
        if "auto_dispatch_capture" not in arguments or not hasattr(npu, "graph_task_update_begin"):
            return warning("this torch_npu cannot update attention in graphs", f"install {BEST_SET}, {otherwise}")
    return ok(f"driver {version}, at least {GRAPH_DRIVER}")


def operators() -> Finding:
    """Compare OPERATORS with the schemas that the loaded torch_npu registers. No operator runs."""
    import torch
    import torch_npu  # noqa: F401

    lacking = []
    for name, arguments in OPERATORS.items():
        operator = getattr(torch.ops.npu, name, None)
        known = {argument.name for argument in operator.default._schema.arguments} if operator else set()
        missing = [f"{name}({argument})" for argument in arguments.split() if argument not in known]
        if missing:
            lacking += missing if operator else [name]
    if lacking:
        return failed(f"torch_npu has no {', '.join(lacking)}", f"install {BEST_SET}")
    return ok(f"all {len(OPERATORS)} are registered with the arguments that are passed")


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _numbered(root: Path) -> list[Path]:
    return sorted((root / "dev").glob("davinci[0-9]*"))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers: 2.10.0.post4+git1 -> (2, 10, 0), 8.3.RC1 -> (8, 3)."""
    parts = [re.match(r"\d*", part) for part in version.split(".")[:3]]
    return tuple(int(part.group()) for part in takewhile(lambda part: part and part.group(), parts) if part)


def _driver_folder(root: Path) -> Path:
    place = _entry(root / "etc/ascend_install.info", "Driver_Install_Path_Param") or "/usr/local/Ascend"
    return root / place.lstrip("/") / "driver"


def driver_version(root: Path) -> str | None:
    """Return the version by the installer's note, or by torch_npu if that is loaded."""
    return _entry(_driver_folder(root) / "version.info", "version|package_version") or _reported("DRIVER")


def cann_version(environ: Mapping[str, str]) -> str | None:
    """Return the version by the installer's note where set_env.sh says, or by torch_npu if that is loaded."""
    arch = f"{platform.machine()}-linux"
    homes = [Path(environ[name]) for name in CANN_HOMES if environ.get(name)]
    for folder in (folder for home in homes for folder in (home / arch, home)):
        for note in sorted(folder.glob("ascend_*_install.info"), reverse=True):  # the toolkit's before the operators'
            if version := _entry(note, "version"):
                return version
    return _reported("CANN")


def _entry(path: Path, keys: str) -> str | None:
    """Return the value of the first line `key=value`, None without such a line or a readable file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^\s*(?:{keys})\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return match.group(1) if match else None


def _reported(module: str) -> str | None:
    """Return the version of "CANN" or "DRIVER" by torch_npu, None if that is not loaded or does not know."""
    if "torch_npu" not in sys.modules:
        return None
    from torch_npu.npu.utils import get_cann_version

    try:
        return str(get_cann_version(module)) or None
    except (RuntimeError, ValueError):
        return None
