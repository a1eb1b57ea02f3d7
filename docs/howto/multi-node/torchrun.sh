#!/usr/bin/env bash
# Start this host's ranks of a job on several hosts. The same line on every host, NODE_RANK apart:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 ./torchrun.sh train.py --tp 8 --checkpoints /shared/run1
#
# NODE_RANK      0 .. NNODES-1; host 0 is the one that MASTER_ADDR names
# NPROC_PER_NODE ranks on this host (default: one per GPU, else 4)
# GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME  the interface to use, where a host has several
set -euo pipefail

: "${NNODES:?how many hosts}" "${MASTER_ADDR:?address of host 0}"
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:?number of this host, or run under srun}}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 4))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# No restarts here: a job that lost a host starts again as a whole, from its last checkpoint.
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" --max-restarts 0 \
  "$@"
