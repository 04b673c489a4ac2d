#!/usr/bin/env bash
# with_simulator.sh COMMAND...: run a command where torch_npu finds simulated devices.
# PYTHON names the interpreter, NPU_SIM the folder that is built, PIP_FLAGS go to pip.
set -euo pipefail
project="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-$project/.venv/bin/python}"
folder="${NPU_SIM:-$project/.npu-sim}"

# shellcheck disable=SC2086  # PIP_FLAGS is a list of words
"$python" "$project/tests/npu_sim/build.py" "$folder" ${PIP_FLAGS:-}
export PYTHONPATH="$folder/site:$project/tests/npu_sim/site${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 NPU_SIMULATOR=1
exec "$@"
