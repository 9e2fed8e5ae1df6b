# The commands of this repository. `make` lists those of a reader and operator, `make help-all` all.
# What a user types is passed on unexpanded, and in the environment: it may contain any character.
typed = ARGS EDIT FILE SCRIPT NODES GPUS CPUS MEM PARTITION ACCOUNT TIME FROM DEVICE TORCH PYTHON VENV ONLY
$(foreach x,$(typed) NPROC WORKERS,$(if $(filter-out undefined,$(origin $x)),\
	$(eval override $x := $$(value $x))$(eval export $x)))
PYTHON ?= python3
VENV ?= .venv
python := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
READY := $(if $(VENV),$(VENV)/.installed,packages)
folders := $(patsubst %/train.py,%,$(sort $(wildcard [0-9][0-9]_*/train.py)))
# the folder of stage $*, or one line on stderr and status 2
folder = $(or $(filter $*_%,$(folders)),$(error Stage $* does not exist; the stages: $(folders)))
.DEFAULT_GOAL := help
.SECONDEXPANSION: # for the prerequisite $$(folder)/train.py, which is checked before the environment
.PHONY: FORCE packages $(shell sed -n 's/^\([a-z0-9 -]*\):.*\#\#.*/\1/p' Makefile)

help help-all: ### this list
	@awk -F ': .*##+ ' '/^[^#\t].*: $(if $(filter %-all,$@),.*##,(.*[^#])?##) / { sub("%", "NN", $$1); \
		printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo; awk -F '# ' '/^# [A-Z]+=/ { printf "  %s\n", $$2 }' Makefile
	@echo; grep -H '^title = ' [0-9][0-9]_*/stage.toml | tr -d '"' | sed 's/^/  /; s|/stage.toml:title =|:|'
# NPROC=4     processes of run-02 and later; by default one per GPU, or two without a GPU
# ARGS="..."  flags of what the target runs: make run-01 ARGS="--data sample --steps 100"; ARGS=--help lists them
# EDIT="..."  an expression for sed: run-NN trains with this change to the script, and prints it
# FILE=       the file that EDIT changes in place of the script, beside it: FILE=pipeline.py for 07
# NODES= GPUS= CPUS= MEM= PARTITION= ACCOUNT= TIME=    of a job: make submit-02 NODES=4 GPUS=8 MEM=0
# FROM=01     the stage that diff-NN compares with; by default the one that its stage.toml names
# DEVICE=cuda dry-run-NN on fake GPU tensors: memory as on a GPU, and where the host waits for it
# TORCH=keep  setup uses the PyTorch that PYTHON= imports; TORCH=2.14.1 installs this version
# PYTHON=...  the python3 that creates the virtual environment
# VENV=       (empty) run-NN with PYTHON= itself, of a cluster's module or image, without setup
others := $(filter-out run-%,$(MAKECMDGOALS))
$(if $(EDIT),$(if $(others),$(error EDIT= is for run-NN: it does not change what $(others) does)))
unexport PYTHONSAFEPATH # with it, `python -m tools.X` would not find tools/
unexport CDPATH
# ---- set-up ----
setup: $(READY) ## create a virtual environment in .venv and install requirements.txt
	@echo "$(or $(VENV),$(PYTHON)) is ready: $$($(python) --version), PyTorch" \
		"$$($(python) -c 'from importlib.metadata import version; print(version("torch"))')"
packages: # with VENV=: are those of requirements.txt there?
	@$(python) -c 'import sys; from tools.pool import missing; sys.exit(missing() or 0)'
$(VENV)/.installed: requirements.txt $(if $(TORCH),$(if $(filter setup,$(MAKECMDGOALS)),FORCE))
	@sh tools/setup.sh "$(PYTHON)" "$(VENV)" "$(TORCH)"
data: $(READY) ## download and prepare WikiText-2, once, where there is internet access
	$(python) -m common.job.corpus
# ---- run ----
quickstart: $(READY) ## train every stage for 50 steps and compare the losses; on GPUs, write gpu-check.md
	@$(python) -m tools.quickstart $(ARGS)
run-%: $$(folder)/train.py $(READY) ## train stage NN here
	@sh tools/run.sh $(python) $< $(ARGS)
# ---- Slurm ----
submit-%: ## submit stage NN to Slurm, by NN_*/train.sbatch
	@slurm/jobs.sh submit $(folder) $(ARGS)
# stages with a model of their own, which need other flags than all the others
alike = $(filter-out $(patsubst %/stage.toml,%,$(shell grep -l '^flags = "--model ' */stage.toml)),$(folders))
submit-all: ## submit all stages, each to start when the previous one has succeeded
	@slurm/jobs.sh submit "$(alike)" $(ARGS)
	@$(foreach x,$(filter-out $(alike),$(folders)),echo "left out: $x, which needs --model and --data";)
status: ## the jobs from here: pending, running, recently ended, and why
	@slurm/jobs.sh status
logs-%: ## follow the log of stage NN's newest job to its end
	@slurm/jobs.sh logs $(folder)
cancel: ## cancel the jobs from here
	@slurm/jobs.sh cancel
cluster: ### start a Slurm cluster of NODES= nodes on this machine, to try things out
	@slurm/cluster.sh up
cluster-down: ### stop it
	@slurm/cluster.sh down
# ---- look ----
tensorboard: $(READY) ## show the metrics of all runs in a browser
	$(python) -m tensorboard.main --logdir runs
export: $(READY) ## write the weights of a run or checkpoint (ARGS=; default: the last) to one file
	@$(python) -m tools.export $(ARGS)
# ---- read ----
diff-%: $$(folder)/train.py ## compare stage NN with an earlier one, definition by definition
	@$(or $(wildcard $(python)),$(PYTHON)) -m tools.diff $* $(if $(FROM),--from $(FROM))
lessons: $(READY) ## lessons/: each stage's README, code and comparisons as web pages, from disk
	@$(python) -m tools.lessons
schedule-06: $(READY) ### draw time lines of pipelines: ARGS="--schedule zero-bubble --pp 4 --micro 8"
	@$(python) -m tools.pictures.pipeline_schedule $(ARGS)
dry-run-%: $$(folder)/train.py $(READY) ## what a rank would hold and send in stage NN: ARGS="--ranks 512 ..."
	@$(python) -m tools.dry_run $* $(if $(DEVICE),--device $(DEVICE)) $(ARGS)
dry-run-all: $(READY) ### every stage on 8 to 4096 ranks, in one table
	@$(python) -m tools.dry_run all
plan: $(READY) ## the fastest layouts of a model on your GPUs: see RUNNING.md
	@$(python) -m tools.planner.plan $(ARGS)
# ---- write ----
copies: ### write the files beside train.py anew, which a stage takes unchanged from earlier ones
	@$(or $(wildcard $(python)),$(PYTHON)) -m tools.copies
exercise-%: $$(folder)/train.py $(READY) ## write stage NN yourself: its script with blanks, in exercises/
	@$(python) -m tools.exercise $* $(ARGS)
check-%: $$(folder)/train.py $(READY) ## check that exercise, or SCRIPT= a changed copy of the stage's script
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(python) tests/check.py $* $${SCRIPT:+"$$SCRIPT"}
first-difference: $(READY) ### where two runs begin to differ: ARGS="RUN REFERENCE"
	@$(python) -m tools.first_difference $(or $(ARGS),--help)
# ---- check ----
pytest = $(python) -m pytest tests -n $(or $(WORKERS),auto) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: $(READY) ## the tests to run after every change, in at most three minutes on two cores
	$(pytest) -m "quick or not slow" $(ARGS)
test-all: $(READY) ### all tests: every topology, launcher and signal, and jobs on Slurm
	$(pytest) $(ARGS)
chaos: $(READY) ### kill -9 runs of every stage at any time: they must end with the same bits
	$(python) -m tests.chaos $(ARGS)
	CHAOS=1 $(python) -m pytest tests/test_survival.py -k lost_node
mutants: $(READY) ### break the code on purpose: the tests must fail
	$(python) tests/mutants.py $(ARGS)
lint: $(READY) ### ruff, and shellcheck where it is installed
	$(python) -m ruff check && $(python) -m ruff format --check
	@! command -v shellcheck >/dev/null || shellcheck */*.sh */*.sbatch .ci/run
experiments: $(READY) ### run the experiments of the READMEs and check the figures they state; ONLY=02
	@$(python) -m tools.experiments $(ONLY)
bench: $(READY) ### compare speed and memory with PyTorch's own classes, in ten minutes
	$(python) -m benchmarks.bench $(ARGS)
clean: ### remove caches; .venv, data and runs stay
	find . -path ./.venv -prune -o '(' -name __pycache__ -o -name '.*_cache' ')' -prune -exec rm -rf {} +
