#!/usr/bin/env bash
# Tear a cell down: workers first, then OpenRL, cluster, registry. Weights on the shared volume go with it: copy them first.
#   cell_down.sh --project ID [--region us-central1] [--cell openrl] [--dry-run]
# KEEP_REGISTRY=1 keeps the images. Asks for the cell's name before it deletes, unless CONFIRM is the cell's name.

set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$here/common.sh"
parse "$@"

if [[ $DRY_RUN = 0 && ${CONFIRM:-} != "$CELL" ]]; then
  read -r -p "Delete cell $CELL of project $PROJECT with all its data? Type its name: " answer
  if [[ $answer != "$CELL" ]]; then
    echo "cell_down.sh: nothing deleted" >&2
    exit 1
  fi
fi

run "${GC[@]}" container clusters get-credentials "$CELL" --region "$REGION"
run kubectl --namespace openrl delete deployment openrl-placement openrl-ledger openrl-launcher --ignore-not-found
run kubectl --namespace openrl delete pods,resourceclaims --selector app.kubernetes.io/managed-by=openrl-launcher
run kubectl delete namespace openrl --ignore-not-found   # volumes too: the file system and the disks of NATS are deleted
run "${GC[@]}" container clusters delete "$CELL" --region "$REGION"
if [[ ${KEEP_REGISTRY:-0} != 1 ]]; then
  run "${GC[@]}" artifacts repositories delete "$CELL" --location "$REGION"
fi
