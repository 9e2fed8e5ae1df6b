# shellcheck shell=bash
# Unset what a user may have set for a command whose output these scripts read, or that they start.
# env.sh, jobs.sh and cluster.sh source it. (A relative cd needs CDPATH unset before it.)

# formats, filters and order of squeue, sinfo and scontrol
unset SLURM_TIME_FORMAT SLURM_BITSTR_LEN "${!SQUEUE_@}" "${!SINFO_@}" "${!SCONTROL_@}"
# torchrun's flags; PET_MAX_RESTARTS=3 is the way to let it restart the ranks
for setting in "${!PET_@}"; do
  if [[ $setting != PET_MAX_RESTARTS ]]; then unset "$setting"; fi
done
unset setting
