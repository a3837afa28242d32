#!/usr/bin/env bash
# A base image for the services' Dockerfiles where no image registry answers but a Debian mirror does: Debian's own Python 3.11.
#   scripts/base_image.sh [NAME]      as root, with debootstrap, tar and a Docker engine; about 170 MB, two minutes
#   OPENRL_TEST_BASE_IMAGE=NAME pytest tests/kube -m docker
# DEBIAN_MIRROR: another mirror. PIP_CERT: a bundle of certificates that builds have to trust, as behind a proxy.
set -euo pipefail

name=${1:-openrl-base:bookworm}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
for tool in debootstrap docker tar; do
  if ! command -v "$tool" >/dev/null; then
    echo "base_image: $tool is missing (apt-get install debootstrap docker.io)" >&2
    exit 2
  fi
done
if [[ $(id -u) != 0 ]]; then
  echo "base_image: debootstrap has to run as root" >&2
  exit 2
fi

root=$(mktemp -d -t openrl-base.XXXXXX)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root" # the image's own root directory
debootstrap --variant=minbase --include=python3,python3-dev,python3-venv,ca-certificates bookworm "$root" "$mirror" >&2
ln -sf python3 "$root/usr/bin/python"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
changes=()
if [[ -n ${PIP_CERT:-} ]]; then
  bundle=/etc/ssl/certs/ca-certificates.crt
  cp "$PIP_CERT" "$root$bundle"
  changes=(--change "ENV PIP_CERT=$bundle")
fi
tar -C "$root" -c . | docker import "${changes[@]}" - "$name" >/dev/null
echo "$name"
