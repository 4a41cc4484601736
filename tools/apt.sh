#!/bin/sh
# apt.sh PACKAGE...: install Debian packages, or say exactly what to type.
set -eu

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "please run: sudo apt-get install $*" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh machine are empty or old; asking for new ones is the second attempt, not the first.
apt-get install -y --no-install-recommends "$@" >&2 || {
  apt-get update >&2
  apt-get install -y --no-install-recommends "$@" >&2
}
