#!/bin/sh
# Installs the missing packages of the native core's checks, and the browser and Redis of tests: as root on Debian or Ubuntu.
# Elsewhere, it lists them.
# Targets whose tool is missing say that they are skipped.
set -eu
packages=$(cat "$(dirname "$0")/debian-packages.txt")
command -v dpkg-query >/dev/null || { echo "not Debian: please install the equivalents of" $packages >&2; exit 0; }
missing=
for package in $packages; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
  echo "missing:$missing" >&2
  echo "  sudo apt install$missing" >&2
  exit 0
fi
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
