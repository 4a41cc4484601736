#!/bin/sh
# cuda_torch.sh PYTHON FOLDER: make the virtual environment FOLDER with torch's CUDA build, which fakecuda runs on a
# machine without a GPU. Nothing is done where it is there already.
set -eu
python=$1
folder=$2
torch=2.13.0

if "$folder/bin/python" -c "import torch; assert torch.version.cuda and torch.__version__.startswith('$torch')" 2>/dev/null; then
  exit 0
fi
"$python" -m venv "$folder" 2>/dev/null || "$(dirname "$0")/venv.sh" "$python" "$folder"

# PyPI's torch for Linux is the CUDA build. A pip configuration or PIP_FIND_LINKS may name another one, so neither is
# used here. The headers of CUDA's runtime need those of nvidia-cuda-crt, of the same release.
export PIP_CONFIG_FILE=/dev/null
env -u PIP_FIND_LINKS "$folder/bin/python" -m pip install --quiet "torch==$torch" numpy
release=$("$folder/bin/python" -c 'import importlib.metadata as m; print(".".join(m.version("nvidia-cuda-runtime").split(".")[:2]))')
env -u PIP_FIND_LINKS "$folder/bin/python" -m pip install --quiet "nvidia-cuda-crt==$release.*"
