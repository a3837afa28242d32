#!/usr/bin/env bash
# What `make test-images` runs: the services' images built from their Dockerfiles and run, vLLM's sampler and the trainer too.
# Brings what it lacks: an engine (as root), a base image (python:3.11-slim, or Debian's Python where no registry answers).
# A quarter of an hour and some twenty gigabytes of disk; nothing is left behind. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/docker_engine.sh
. scripts/docker_engine.sh
trap close_engine EXIT

start_engine
if [[ -z ${OPENRL_TEST_BASE_IMAGE:-} ]]; then
  if docker pull --quiet python:3.11-slim 2>/dev/null; then
    OPENRL_TEST_BASE_IMAGE=python:3.11-slim
  else
    OPENRL_TEST_BASE_IMAGE=$(scripts/base_image.sh)
  fi
  export OPENRL_TEST_BASE_IMAGE
fi
echo "base image: $OPENRL_TEST_BASE_IMAGE"
.venv/bin/python -m pytest tests/kube/test_images.py -m docker "$@"
