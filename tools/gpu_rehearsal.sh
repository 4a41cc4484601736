#!/bin/sh
# gpu_rehearsal.sh VENV [OUT]: run both parts of tools/gpu_check.sh on one fake device, with the wheels and the environment
# of tools/gpu_kit.sh, and print their summaries. Exits with 1 when a phase failed, or when too many files are in OUT.
#
#   LIMIT=...  the seconds that a part may take (3600)
set -u
[ $# = 1 ] || [ $# = 2 ] || {
  echo "usage: gpu_rehearsal.sh VENV [OUT]" >&2
  exit 2
}
cd "$(dirname "$0")/.." || exit 2
python=$(cd "$1" && pwd)/bin/python
out=${2:-build/gpu-rehearsal}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --target "$site" .whl/cudafuture-*.whl || exit 1
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHON="$python" LIMIT="${LIMIT:-3600}"
# Variables that a caller's own run of the tests sets would reach these: `make soak` asks for the long form.
unset CUDAFUTURE_SOAK
failed=0
for part in tests figures; do
  # -P: fakecuda comes from the wheel, not from the checkout
  "$python" -P -m cudafuture.testing.fakecuda --devices 1 --schedule jitter -- \
    tools/gpu_check.sh "$part" "$out/$part" || failed=1
  if [ "$(find "$out/$part" -type f | wc -l)" -gt 8 ]; then
    echo "gpu_rehearsal.sh: more than eight files in $out/$part" >&2
    failed=1
  fi
done
exit $failed
