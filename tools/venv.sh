#!/bin/sh
# venv.sh PYTHON FOLDER: make the virtual environment FOLDER unless it is there. It sees PYTHON's own packages when torch
# is one of them, so that a torch which is installed already is the torch that is used.
set -eu
python=$1
folder=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "cudafuture needs Python 3.10 or newer; choose one: make PYTHON=..." >&2
  exit 1
}
if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

packages=
if "$python" -c 'import torch' 2>/dev/null; then
  packages=--system-site-packages
fi

# Debian keeps the module that puts pip into a virtual environment in a package of its own.
if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  "$python" -m venv $packages "$folder"
elif "$python" -m pip --version >/dev/null 2>&1; then
  "$python" -m pip install --quiet --target build/virtualenv virtualenv
  PYTHONPATH=build/virtualenv "$python" -m virtualenv $packages "$folder"
else
  "$(dirname "$0")/apt.sh" "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  "$python" -m venv $packages "$folder"
fi

# --system-site-packages means the packages of the system. Where PYTHON is a virtual environment itself, torch is in
# that one, which has to be named.
if [ -n "$packages" ] && ! "$folder/bin/python" -c 'import torch' 2>/dev/null; then
  "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/chosen_python.pth"
fi
