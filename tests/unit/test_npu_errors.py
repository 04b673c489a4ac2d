"""Ascend's error texts, as torch_npu writes them, become a kind of trouble and advice."""

import pytest

from engine.backends.npu_errors import read_trouble
from engine.errors import WorkerFailure


def acl_error(code: int, call: str = "AclrtSynchronizeDeviceWithTimeout") -> str:
    """Return a text like those of torch_npu 2.13.0, which were seen on a simulated device."""
    return (
        f"npuSynchronizeDevice:../torch_npu/csrc/core/npu/NPUStream.cpp:748 NPU function error: "
        f"{call}, error code is {code}\n[ERROR] 2026-11-30-19:59:01 (PID:27375, Device:0, "
        "RankID:-1) ERR00100 PTA call acl api failed\n[Error]: Something is abnormal. \n"
        "        Rectify the fault based on the error information in the ascend log.\nEZ9999: Inner"
    )


@pytest.mark.parametrize(
    ("code", "failure", "words"),
    [
        (507015, WorkerFailure.DEVICE_LOST, "AI Core exception"),
        (507018, WorkerFailure.DEVICE_LOST, "AI CPU exception"),
        (507899, WorkerFailure.DEVICE_LOST, "internal error of the driver"),
        (507010, WorkerFailure.DEVICE_LOST, "heartbeat"),
        (507014, WorkerFailure.TIMEOUT, "too long"),
        (107020, WorkerFailure.TIMEOUT, "too long"),
        (207001, WorkerFailure.OUT_OF_MEMORY, "no memory left"),
        (107001, WorkerFailure.OTHER, "invalid device id"),
        (999999, WorkerFailure.OTHER, "a call of ACL failed"),
    ],
)
def test_code_of_the_runtime_says_what_kind_of_trouble_it_is(
    code: int, failure: WorkerFailure, words: str
):
    trouble = read_trouble(acl_error(code))
    assert trouble.failure is failure
    assert words in trouble.words
    assert str(code) in trouble.words


@pytest.mark.parametrize(
    ("code", "failure", "words"),
    [
        ("ERR01001", WorkerFailure.OTHER, "an operator): invalid parameter"),
        ("ERR00006", WorkerFailure.OUT_OF_MEMORY, "framework): memory error"),
        ("ERR02011", WorkerFailure.TIMEOUT, "collective communication): timeout"),
        ("ERR02200", WorkerFailure.OTHER, "a call of HCCL failed"),
        ("ERR03007", WorkerFailure.OTHER, "GRAPH): feature not supported"),
        ("ERR99777", WorkerFailure.OTHER, "unknown reason"),
    ],
)
def test_module_and_reason_of_an_err_code_are_spelt_out(
    code: str, failure: WorkerFailure, words: str
):
    trouble = read_trouble(f"it went wrong\n[ERROR] (PID:1, Device:0, RankID:0) {code} XYZ")
    assert (trouble.failure, words in trouble.words) == (failure, True)


def test_allocator_out_of_memory_is_known_by_its_words_and_by_its_type():
    text = "NPU out of memory. Tried to allocate 9.00 GiB (NPU 0; 8.00 GiB total capacity)"
    assert read_trouble(text).failure is WorkerFailure.OUT_OF_MEMORY
    assert "max_num_batched_tokens" in read_trouble(text).words
    # An error of the type OutOfMemoryError needs no words of which we know.
    assert read_trouble("?", is_memory_error=True).failure is WorkerFailure.OUT_OF_MEMORY
    assert read_trouble("?").failure is WorkerFailure.OTHER


def test_memory_error_is_not_taken_for_a_lost_device():
    text = "NPU out of memory. " + acl_error(507899)
    assert read_trouble(text).failure is WorkerFailure.OUT_OF_MEMORY


def test_fault_of_the_hardware_comes_before_the_code_beside_it():
    text = acl_error(507014).replace("AclrtSynchronize", "HBM MULTI BIT ECC ERROR Aclrt")
    trouble = read_trouble(text)
    assert trouble.failure is WorkerFailure.DEVICE_LOST
    assert "several bits at once" in trouble.words
    assert "npu-smi info" in trouble.words


def test_kernel_that_failed_advises_a_true_stack():
    words = read_trouble(acl_error(507015)).words
    assert "ASCEND_LAUNCH_BLOCKING=1" in words
    assert "NPU function error" in words  # the original follows


@pytest.mark.parametrize(
    "text",
    [
        "token id 507015 is out of the vocabulary",
        "shape [2, 507899] is invalid for input of size 107020",
        "this may PRODUCE ERROR after error",
        "",
    ],
)
def test_number_or_word_that_is_no_code_means_nothing(text: str):
    assert read_trouble(text).failure is WorkerFailure.OTHER


def test_message_is_one_line_and_bounded():
    words = read_trouble(acl_error(507015) + "x" * 5000).words
    assert "\n" not in words
    assert len(words) < 1500
