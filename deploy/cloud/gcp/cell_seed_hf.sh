#!/usr/bin/env bash
# Put models from the Hugging Face hub on the cell's shared volume, as /var/lib/openrl/models/<name>.
#   cell_seed_hf.sh --project ID [--region …] [--cell …] [--dry-run] Qwen/Qwen3-0.6B [google/gemma-3-4b-it …]
# For gated models set HF_TOKEN: it is kept in a secret of the namespace while the download runs.

set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$here/common.sh"
parse "$@"
if [[ ${#REST[@]} = 0 ]]; then
  echo "cell_seed_hf.sh: no model: name at least one, for example Qwen/Qwen3-0.6B" >&2
  exit 2
fi

run "${GC[@]}" container clusters get-credentials "$CELL" --region "$REGION"
if [[ -n ${HF_TOKEN:-} ]]; then
  if [[ $DRY_RUN = 1 ]]; then
    # shellcheck disable=SC2016 # printed as it is to be pasted, without the token
    echo 'kubectl --namespace openrl create secret generic openrl-hf-token --from-literal=token="$HF_TOKEN"'
  else
    kubectl --namespace openrl create secret generic openrl-hf-token --from-literal=token="$HF_TOKEN" \
      --dry-run=client -o yaml | kubectl apply --server-side -f -
  fi
fi

for model in "${REST[@]}"; do
  if [[ ! $model =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]]; then
    echo "cell_seed_hf.sh: $model is no model: write owner/name" >&2
    exit 2
  fi
  name=$(tr 'A-Z._/' 'a-z---' <<<"$model")
  job="apiVersion: batch/v1
kind: Job
metadata: {name: seed-$name, namespace: openrl}
spec:
  backoffLimit: 3
  ttlSecondsAfterFinished: 600
  template:
    spec:
      restartPolicy: OnFailure
      automountServiceAccountToken: false
      securityContext:
        {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: seed
        image: $REGISTRY/trainer:$TAG
        command: [python, -c]
        args: [\"import huggingface_hub as h; h.snapshot_download('$model', local_dir='/var/lib/openrl/models/${model##*/}', allow_patterns=['*.json', '*.safetensors', '*.txt', '*.jinja', '*.model'])\"]
        env:
        - {name: HOME, value: /tmp}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: openrl-hf-token, key: token, optional: true}}}
        resources: {requests: {cpu: \"1\", memory: 2Gi}, limits: {memory: 4Gi}}
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
        volumeMounts:
        - {name: home, mountPath: /var/lib/openrl}
      volumes:
      - {name: home, persistentVolumeClaim: {claimName: openrl-shared}}"
  if [[ $DRY_RUN = 1 ]]; then
    printf 'kubectl apply --server-side -f - <<EOF\n%s\nEOF\n' "$job"
  else
    kubectl apply --server-side -f - <<<"$job"
  fi
  run kubectl --namespace openrl wait --for=condition=complete "job/seed-$name" --timeout=2h
done
