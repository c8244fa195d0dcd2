"""The meanings of torch_npu's errors are found in texts that it really raises."""

import pytest

from app.engine.npu.error_codes import FAMILIES, MEANINGS, explain

SYNCHRONIZE = (
    "npuSynchronizeDevice:torch_npu/csrc/core/npu/NPUStream.cpp:506 NPU function error: "
    "AclrtSynchronizeDeviceWithTimeout, error code is {}\n"
    "[ERROR] 2026-11-08-21:35:27 (PID:507035, Device:0, RankID:-1) ERR00100 PTA call acl api failed\n"
    "[Error]: The aicore execution is abnormal."
)


@pytest.mark.parametrize("code", MEANINGS)
def test_every_code_is_found_in_an_error_of_torch_npu(code: int) -> None:
    assert explain(SYNCHRONIZE.format(code)) == f"{code}: {MEANINGS[code]}"


@pytest.mark.parametrize(
    "text",
    [
        "ACL stream synchronize failed, error code:507035",
        "rtMemcpy:ErrCode=507035, desc=[vector core exception]",
        "wait for compute device to finish failed, runtime result = 507035.[FUNC:ReportCallError]",
        "Warning: NPU warning, error code is 507035[Error]:",
    ],
)
def test_a_code_is_found_however_it_is_written(text: str) -> None:
    assert (explain(text) or "").startswith("507035: a vector core stopped")


def test_codes_that_are_not_in_the_table_get_the_meaning_of_their_family() -> None:
    assert explain("error code is 507036") == f"507036: {FAMILIES[507]}"
    assert explain("error code is 561112") == f"561112: {FAMILIES[561]}"


def test_a_known_code_goes_before_an_unknown_one() -> None:
    assert (explain("error code is 507036, inner error code is 507015") or "").startswith("507015:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[SqCqManage]Alloc sq cq fail, stream_id=7 ... error code is 207005", "--max-graphs"),
        ("AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is 207008", "HCCL_OP_EXPANSION_MODE=AIV"),
        ("Insufficient_Stream_Resources(EL0009): The stream resources are insufficient.", "--max-graphs"),
        (
            "error code is 507048 ... EI0002: The wait execution of the Notify register times out.",
            "a rank did not come",
        ),
        ("Getting socket times out (EI0006)", "HCCL_IF_IP"),
        ("[HCCL] ra init failed, ret 19. HcclGetRootInfo, error code is 4", "/etc/passwd"),
        ("record event failed, runtime result = 507009", "HCCL_OP_EXPANSION_MODE"),
        ("AclmdlRICaptureEnd, error code is 107041", "--enforce-eager"),
        ("libhccl.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        ("libascend_hal.so: cannot open shared object file: No such file or directory", "driver/lib64"),
        ("libtorch_npu.so: undefined symbol: aclrtGetDeviceInfo", "2.10.0.post4"),
        ("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total)", "--kv-cache-memory"),
        ("EL0004: Failed to allocate memory requested by RUNTIME module.", "--memory-utilization"),
    ],
)
def test_errors_that_are_known_by_their_text(text: str, said: str) -> None:
    assert said in (explain(text) or "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a bad step",
        "PID:507015",
        "507015",
        "error code is 12",
        "error code is 5070150",
        "CUDA out of memory",
        "code 404",
    ],
)
def test_what_is_no_error_of_cann_gets_no_meaning(text: str) -> None:
    assert explain(text) is None
