#!/usr/bin/env bash
# Trains on all hosts of a TPU slice, by ssh: each finds its place by its metadata server.
#   scripts/clusters/tpu_pod.sh NAME ZONE configs/llama3_8b.yaml --output /shared/llama3
# On each host: this package with jax[tpu], the configuration, and a file system of all at /shared.
set -euo pipefail
name=${1:?name of the TPU}; zone=${2:?its zone}; shift 2

# Without a secret, whoever reaches the port of process 0 can join the run. It goes as a file:
# a command line is seen by everyone on the host.
secret=$(mktemp)
trap 'rm -f "$secret"' EXIT
openssl rand -hex 32 > "$secret"
gcloud compute tpus tpu-vm scp "$secret" "$name:.fsdp-jax-secret" --zone "$zone" --worker all

# One process on each host, which drives the host's chips. A host that ends with an error ends all.
printf -v arguments ' %q' "$@"
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all \
    --command "fsdp-jax train$arguments --cluster.secret ~/.fsdp-jax-secret"
