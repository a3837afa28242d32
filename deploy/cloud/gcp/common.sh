# Sourced by the cell scripts: what a cell is called, and how a command is run or, with --dry-run, printed.
# shellcheck shell=bash
CELL=${CELL:-openrl}
PROJECT=${PROJECT:-}
REGION=${REGION:-us-central1}
ZONE=${ZONE:-$REGION-a}
H100_NODES=${H100_NODES:-1}
L4_NODES=${L4_NODES:-2}
FILESTORE_TIB=${FILESTORE_TIB:-1}
REGISTRY=${REGISTRY:-}
TAG=${TAG:-latest}
DRY_RUN=0

usage() { # first comment block of the calling script
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

parse() {
  while [[ $# -gt 0 ]]; do
    case $1 in
    --dry-run) DRY_RUN=1 ;;
    --project) PROJECT=${2:?--project needs a value}; shift ;;
    --region) REGION=${2:?--region needs a value}; ZONE=$REGION-a; shift ;;
    --zone) ZONE=${2:?--zone needs a value}; shift ;;
    --cell) CELL=${2:?--cell needs a value}; shift ;;
    --help | -h) usage; exit 0 ;;
    --) shift; REST=("$@"); return ;;
    -*) echo "$(basename "$0"): unknown option $1; see --help" >&2; exit 2 ;;
    *) REST+=("$1") ;;
    esac
    shift
  done
  if [[ -z $PROJECT ]]; then
    echo "$(basename "$0"): no project: give --project ID or set PROJECT" >&2
    exit 2
  fi
  # shellcheck disable=SC2034 # by the scripts that source this
  GC=(gcloud --project "$PROJECT" --quiet)
  REGISTRY=${REGISTRY:-$REGION-docker.pkg.dev/$PROJECT/$CELL}
}
REST=()

run() { # run a command that changes something, or print it so that it can be pasted
  if [[ $DRY_RUN = 1 ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    printf '+ %s\n' "$*" >&2
    "$@"
  fi
}

exists() { # whether a describe succeeds; nothing exists in a dry run, so that every command is shown
  [[ $DRY_RUN = 0 ]] && "$@" >/dev/null 2>&1
}
