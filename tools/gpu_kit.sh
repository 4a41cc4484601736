#!/bin/sh
# gpu_kit.sh VENV: make the folder .whl, which takes this checkout to a machine with a GPU and no network.
#
# It gets the package's wheel for the versions below, pytest and its plugins, and KvikIO where the index has it. They are
# made in the environment VENV, which stays (6 GB). tools/gpu_check.sh installs what is in .whl.
#
#   PYTHON312=...  the Python to use; otherwise one on the PATH or in pyenv
set -eu

TORCH=2.11.0 # for CUDA 13.0
PYTHON=3.12
# pytest, its plugins and what they import
TESTING="pytest pluggy iniconfig pytest-xdist execnet pytest-timeout hypothesis sortedcontainers"
KVIKIO="kvikio-cu13 libkvikio-cu13 rapids-logger"

[ $# = 1 ] || {
  echo "usage: gpu_kit.sh VENV" >&2
  exit 2
}
cd "$(dirname "$0")/.."
python=${PYTHON312-}
for candidate in "$(command -v python$PYTHON)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$PYTHON".*/bin/python; do
  if [ -z "$python" ] && [ -x "$candidate" ]; then python=$candidate; fi
done
[ -n "$python" ] || {
  echo "gpu_kit.sh: there is no python$PYTHON on the PATH or in pyenv; name one: PYTHON312=..." >&2
  exit 1
}

tools/cuda_torch.sh "$python" "$1" $TORCH
venv=$(cd "$1" && pwd)
export PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1
python tools/environment.py build test demo
rm -rf .whl
python -m pip wheel --quiet --no-build-isolation --no-deps --config-settings 'build-dir=build/gpu-{wheel_tag}' \
  --wheel-dir .whl .
# shellcheck disable=SC2086 # words, every one
versions=$(python -c 'import sys, importlib.metadata as m; print(*(f"{n}=={m.version(n)}" for n in sys.argv[1:]))' $TESTING)
# shellcheck disable=SC2086 # words, every one
{
  python -m pip download --quiet --no-deps --dest .whl $versions
  python -m pip download --quiet --no-deps --dest .whl $KVIKIO || echo "gpu_kit.sh: going on without KvikIO" >&2
}
du -sh .whl
