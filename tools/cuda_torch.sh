#!/bin/sh
# cuda_torch.sh PYTHON FOLDER [RELEASE]: make the virtual environment FOLDER with torch's CUDA build (2.13.0), which
# fakecuda runs on a machine without a GPU. Nothing is done where it is there already.
set -eu
python=$1
folder=$2
torch=${3-2.13.0}

if "$folder/bin/python" -c "import torch; assert torch.version.cuda and torch.__version__.startswith('$torch')" 2>/dev/null; then
  exit 0
fi
"$python" -m venv "$folder" 2>/dev/null || "$(dirname "$0")/venv.sh" "$python" "$folder"

# PyPI's torch for Linux is the CUDA build. A configuration of pip on this machine may pin torch or redirect it, so it
# is left out. The headers of CUDA's runtime need those of nvidia-cuda-crt, of the same release.
export PIP_CONFIG_FILE=/dev/null
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT
"$folder/bin/python" -m pip install --quiet "torch==$torch" numpy
release=$("$folder/bin/python" -c 'import importlib.metadata as m; print(".".join(m.version("nvidia-cuda-runtime").split(".")[:2]))')
"$folder/bin/python" -m pip install --quiet "nvidia-cuda-crt==$release.*"
