#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# aarch64_python.sh FOLDER: Python and NumPy for 64-bit ARM, as this machine's Debian has them, in FOLDER/root, to be run
# under qemu-user. Nothing is installed: apt keeps its lists and what it knows of packages in FOLDER too. Where Debian is
# out of reach, it says so and leaves no FOLDER/root.
set -euo pipefail
folder=$(realpath -m "$1")
[ ! -e "$folder/complete" ] || exit 0
rm -rf "$folder"
mkdir -p "$folder"/{state/lists/partial,cache/archives/partial}
: >"$folder/state/status"
cat >"$folder/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State "$folder/state";
Dir::State::status "$folder/state/status";
Dir::Cache "$folder/cache";
Acquire::Languages "none";
CONF
export APT_CONFIG=$folder/apt.conf
if ! { apt-get -qq update && apt-get -qq --yes --no-install-recommends --download-only install python3-numpy libstdc++6; } \
  >"$folder/apt.log" 2>&1; then
  echo "skipped: Debian's packages for arm64 are out of reach ($folder/apt.log), so no Python on aarch64 is tested"
  exit 0
fi
mkdir -p "$folder/root/usr/lib"
ln -s usr/lib "$folder/root/lib"  # from Debian 13 on, packages leave this to the base system; older ones have a folder
for package in "$folder"/cache/archives/*.deb; do
  dpkg-deb --extract "$package" "$folder/root"
done
rm -r "$folder"/cache "$folder"/state
touch "$folder/complete"
