# To be sourced: a Docker engine of one's own for as long as a script runs, where none is named in DOCKER_HOST.
#   trap close_engine EXIT; start_engine || …
# shellcheck shell=bash
engine_dir=""
engine_pid=""

close_engine() {
  if [[ -n $engine_pid ]] && kill -0 "$engine_pid" 2>/dev/null; then
    kill "$engine_pid" 2>/dev/null || true
    for _ in $(seq 100); do
      kill -0 "$engine_pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -9 "$engine_pid" 2>/dev/null || true
  fi
  if [[ -n $engine_dir ]]; then
    # a build that was interrupted leaves its file system mounted
    awk -v dir="$engine_dir/" 'index($2, dir) == 1 {print $2}' /proc/mounts | xargs -r umount --lazy || true
    rm -rf "$engine_dir" 2>/dev/null || true
  fi
}

without_engine() {
  echo "no Docker engine: $1" >&2
}

# Prints why not and returns 1 where no engine can be had; sets DOCKER_HOST otherwise.
start_engine() {
  if [[ -n ${DOCKER_HOST:-} ]]; then
    echo "using the Docker engine at $DOCKER_HOST"
    return 0
  fi
  if [[ $(id -u) != 0 ]]; then
    without_engine "not root"
    return 1
  fi
  if ! command -v dockerd >/dev/null; then
    if ! command -v apt-get >/dev/null; then
      without_engine "no dockerd and no apt-get"
      return 1
    fi
    echo "installing docker.io"
    if ! { timeout 120 apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends docker.io iptables; } >/dev/null 2>&1; then
      without_engine "docker.io could not be installed"
      return 1
    fi
  fi
  engine_dir=$(mktemp -d -t openrl-docker.XXXXXX)
  dockerd --host "unix://$engine_dir/docker.sock" --data-root "$engine_dir/data" --exec-root "$engine_dir/exec" \
    --pidfile "$engine_dir/docker.pid" >"$engine_dir/log" 2>&1 &
  engine_pid=$!
  for _ in $(seq 150); do
    if [[ -S $engine_dir/docker.sock ]] && curl -sf --unix-socket "$engine_dir/docker.sock" http://engine/_ping >/dev/null; then
      export DOCKER_HOST="unix://$engine_dir/docker.sock"
      echo "Docker engine at $DOCKER_HOST"
      return 0
    fi
    if ! kill -0 "$engine_pid" 2>/dev/null; then
      break
    fi
    sleep 0.2
  done
  without_engine "dockerd did not start: $(tail -n 1 "$engine_dir/log")"
  return 1
}
