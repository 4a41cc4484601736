# The Pythons that matrix.sh and wheels.sh build for, and the environment of their builds. Both source this file.
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export CMAKE_BUILD_PARALLEL_LEVEL

# interpreter MINOR: print the path of a Python of that version that can make an environment and build a module.
interpreter() {
  asked="import ensurepip, os, sys, sysconfig, venv
os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')) or sys.exit(1)
'%d.%d' % sys.version_info[:2] == '$1' or sys.exit(1)
print(sys.executable)"
  for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [ -x "$candidate" ] && "$candidate" -c "$asked" 2>/dev/null; then return 0; fi
  done
  return 1
}
