#!/usr/bin/env bash
# Bring up a whole cell: cluster, node pools with DRA, shared file system, registry and images, OpenRL itself.
#   cell_up.sh --project ID [--region us-central1] [--zone us-central1-a] [--cell openrl] [--dry-run]
# H100_NODES, L4_NODES, FILESTORE_TIB, REGISTRY and TAG change sizes and image names. Repeatable: what is there stays.
# --dry-run prints every command instead of running it. Needs gcloud, kubectl, helm, docker, and quota for the GPUs.

set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$here/common.sh"
parse "$@"

run "${GC[@]}" services enable container.googleapis.com file.googleapis.com artifactregistry.googleapis.com

if ! exists "${GC[@]}" container clusters describe "$CELL" --region "$REGION"; then
  run "${GC[@]}" container clusters create "$CELL" --region "$REGION" --node-locations "$ZONE" --release-channel rapid \
    --num-nodes 3 --machine-type e2-standard-4 --enable-ip-alias --workload-pool "$PROJECT.svc.id.goog" \
    --enable-dataplane-v2 --addons GcpFilestoreCsiDriver,GcePersistentDiskCsiDriver
fi

pool() { # name, nodes, machine, accelerator, device size in whole GiB
  if exists "${GC[@]}" container node-pools describe "$1" --cluster "$CELL" --region "$REGION"; then
    return
  fi
  # The device plugin is off: the DRA driver (installed below) is what tells the cluster of the devices.
  run "${GC[@]}" container node-pools create "$1" --cluster "$CELL" --region "$REGION" --node-locations "$ZONE" \
    --num-nodes "$2" --machine-type "$3" --accelerator "$4,gpu-driver-version=latest" \
    --node-labels "openrl.io/enabled=true,openrl.io/device-gib=$5,gke-no-default-nvidia-gpu-device-plugin=true,nvidia.com/gpu.present=true" \
    --node-taints "nvidia.com/gpu=present:NoSchedule"
}
[[ $H100_NODES = 0 ]] || pool h100 "$H100_NODES" a3-highgpu-8g type=nvidia-h100-80gb,count=8 80
[[ $L4_NODES = 0 ]] || pool l4 "$L4_NODES" g2-standard-48 type=nvidia-l4,count=4 23

run "${GC[@]}" container clusters get-credentials "$CELL" --region "$REGION"
run helm upgrade --install nvidia-dra-driver-gpu nvidia-dra-driver-gpu --repo https://helm.ngc.nvidia.com/nvidia \
  --namespace nvidia-dra-driver-gpu --create-namespace --set nvidiaDriverRoot=/home/kubernetes/bin/nvidia \
  --set gpuResourcesEnabledOverride=true --set resources.computeDomains.enabled=false

if ! exists "${GC[@]}" artifacts repositories describe "$CELL" --location "$REGION"; then
  run "${GC[@]}" artifacts repositories create "$CELL" --location "$REGION" --repository-format docker
fi
run "${GC[@]}" auth configure-docker "$REGION-docker.pkg.dev"
for service in ledger placement launcher trainer sampler; do
  run docker build -f "$root/services/$service/Dockerfile" -t "$REGISTRY/$service:$TAG" "$root"
  run docker push "$REGISTRY/$service:$TAG"
done

# An overlay of this cell's own beside the repository's: image names and the size of the file system.
overlay=$root/deploy/overlays/cell-$CELL
run mkdir -p "$overlay"
images=$(for service in ledger placement launcher trainer sampler; do
  printf -- '- {name: openrl/%s, newName: %s/%s, newTag: "%s"}\n' "$service" "$REGISTRY" "$service" "$TAG"
done)
kustomization="apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../gke]
images:
$images
configMapGenerator:
- name: openrl-launcher
  namespace: openrl
  behavior: merge
  literals:
  - OPEN_RL_TRAINER_IMAGE=$REGISTRY/trainer:$TAG
  - OPEN_RL_SAMPLER_IMAGE=$REGISTRY/sampler:$TAG
patches:
- target: {kind: PersistentVolumeClaim, name: openrl-shared}
  patch: |-
    - {op: replace, path: /spec/resources/requests/storage, value: ${FILESTORE_TIB}Ti}"
if [[ $DRY_RUN = 1 ]]; then
  printf 'cat >%q <<EOF\n%s\nEOF\n' "$overlay/kustomization.yaml" "$kustomization"
else
  printf '%s\n' "$kustomization" >"$overlay/kustomization.yaml"
fi

run kubectl apply --server-side -k "$overlay"
run kubectl --namespace openrl rollout status statefulset/openrl-nats --timeout 10m
for service in ledger placement launcher; do
  run kubectl --namespace openrl rollout status "deployment/openrl-$service" --timeout 10m
done
echo "cell $CELL is up: seed models with $here/cell_seed_hf.sh, then see docs/kubernetes.md" >&2
