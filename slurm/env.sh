# shellcheck shell=bash
# The environment of every job; each train.sbatch sources it at the root of the repository.
# A site's own lines go into slurm/site.env (untracked), which is read first and wins:
#
#     module load CUDA Python
#     VENV=$HOME/venvs/torch                # or VENV= where the modules bring PyTorch
#     DATA_ROOT=$SCRATCH/wikitext           # prepared corpora, seen by all nodes; default data/
#     NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
#
if [[ -f slurm/site.env ]]; then
  set -a # what it sets reaches the processes that srun starts
  # shellcheck source=/dev/null
  source slurm/site.env
  set +a
fi

# compute nodes have no internet: do not try it, say at once that `make data` was not run
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE-1}
# srun (22.05 and later) does not inherit --cpus-per-task from sbatch
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

if [[ -n ${VENV=.venv} ]]; then
  # shellcheck source=/dev/null
  source "$VENV/bin/activate"
fi
