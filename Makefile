# Everything runs in .venv, which is made on first use. `make help` lists the targets.

.DEFAULT_GOAL := help
SHELL := /bin/bash

MODEL ?= resnet18
DATA ?=
STORE ?= model_store
DEVICE ?= auto
MEASURE ?= auto
# The run's name; by default the commands make it of MODEL and DATA.
RUN ?=
# Options that are handed as they are to the command of a target: make optimize ARGS="--seed 3 --json".
ARGS ?=
# Options of `optimize run` (make optimize) by their names in capitals: those that take a value, and those that take none.
RUN_VALUES := CHECKPOINT CLASSES CLASS_ORDER VAL_IMAGES AUGMENT RECIPE IMAGE_SIZE WEIGHTS WEIGHTS_KEY OUTPUTS RESIZE CROP MEAN STD \
	INTERPOLATION PIXEL_MAX SEED PROCESSES TENSORBOARD OBJECTIVE MAX_DROP CONFIDENCE
RUN_FLAGS := SKIP_UNREADABLE ACCEPT_GAPS REPLACE REMEASURE TRUST_CHECKPOINT
# Models, and options of `benchmarks.zoo`: make zoo ZOO='resnet18 --again'.
ZOO ?=
# Of `make bench-quant` and `make table-cifar`: see there.
CIFAR ?=
RESNET20 ?=
RESNET56 ?=
TABLE ?=
MOBILENET ?=
QUANT ?=
# Options of `serve start` (make serve) by their names in capitals: those that take a value, several words, or none.
ARTIFACTS ?=
SERVE_VALUES := HOST PORT MANAGEMENT_PORT METRICS_PORT GRPC_INFERENCE_PORT GRPC_MANAGEMENT_PORT QUEUE BODY_MB HELD_MB \
	RECEIVE_S DRAIN_S CONNECTIONS WORKERS THREADS BATCH_SIZE MAX_BATCH_DELAY_MS DECODE_THREADS DECODER QUEUE_LIMIT BUCKETS K ACCEPT INSTANCE_LIMIT \
	RESPONSE_TIMEOUT_S STARTUP_TIMEOUT_S
SERVE_LISTS := ENGINE OPTION BUDGET REQUIRE_SIGNED
SERVE_FLAGS := EXPOSE STRICT STRICT_START ACCESS_LOG FOREIGN_CODE REQUIRE_KNOWN
# Some shells say by it where they are.
ifeq ($(origin HOST),environment)
override HOST :=
endif
option = --$(shell echo '$(1)' | tr 'A-Z_' 'a-z-')
# Those of a command's options that are given: $(call options,RUN) or $(call options,SERVE).
options = $(foreach name,$($(1)_VALUES),$(if $($(name)),$(call option,$(name)) '$($(name))')) \
	$(foreach name,$($(1)_LISTS),$(foreach word,$($(name)),$(call option,$(name)) '$(word)')) \
	$(foreach name,$($(1)_FLAGS),$(if $($(name)),$(call option,$(name))))
SERVE_OPTIONS = $(foreach word,$(ARTIFACTS),--artifact '$(word)') $(call options,SERVE) $(ARGS)
OF_DATA = $(if $(DATA), --data '$(DATA)')
THE_RUN = $(if $(RUN),'$(RUN)','$(MODEL)'$(OF_DATA))
# Several in one server: NAME=RUN/ARTIFACT each, or less.
RUNS ?=
THE_RUNS = $(if $(RUNS),$(foreach run,$(RUNS),'$(run)'),$(THE_RUN))

# What is given on the command line and stands nowhere here is a slip, such as one letter too few in CHECKPOINT, and make
# would train for an hour what has its weights. A make that calls this one hands its own variables down.
ifeq ($(MAKELEVEL),0)
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
ifneq ($(strip $(GIVEN)),)
UNKNOWN := $(filter-out $(shell grep -oE '\b[A-Z][A-Z0-9_]+\b|\bK\b' $(firstword $(MAKEFILE_LIST))) MAKEFLAGS,$(GIVEN))
ifneq ($(strip $(UNKNOWN)),)
$(error there is no variable $(UNKNOWN); `make help` lists those that there are)
endif
endif
endif

# The first Python 3.12 or 3.11 that really starts (a pyenv shim may exist and not).
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Test files that run at a time. Of two on two cores, a fifth of the time is waiting: for servers, processes, time-outs.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install install-dev optimize serve add replace remove stop status package test lint
.PHONY: bench bench-cpu bench-gpu bench-quant bench-data bench-serve bench-attacks bench-decoding bench-intervals bench-models table-cifar zoo
.PHONY: soak audit fuzz prose docs reference clean check-workarounds

help: ## this list
	@echo "usage: make TARGET [MODEL=resnet18] [DATA=…] [STORE=model_store] [DEVICE=auto|cpu|cuda] [RUN=name]"
	@echo "                   [ARGS='options that the command of TARGET gets as they are, such as --help']"
	@echo "       make optimize [MEASURE=auto|cpu|cuda|cpu,cuda] and the options of \`optimize run\`, in capitals:"
	@echo '$(RUN_VALUES)' | fold -s -w 90 | sed 's/^/                   /'
	@echo "                   and with =1: $(RUN_FLAGS)"
	@echo "       make serve  [RUNS='run run/artifact name=run'] [ARTIFACTS=all|'name name'] [PORT=number] [WORKERS=number]"
	@echo "                   and each other option of \`serve start\`, in capitals: [BATCH_SIZE=8] [ENGINE=openvino] [EXPOSE=1 HOST=0.0.0.0]"
	@echo "       make add    [RUN=run/artifact] [RUNS='run name=run'] and options of \`serve add\`: [ARTIFACTS=all] [WORKERS=number]"
	@echo "       make replace MODEL=name [RUN=run/artifact], make remove MODEL='name name': names as \`make status\` says them"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## the environment, with pinned versions

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; name one with PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

install-dev: $(VENV)/.installed-dev ## the same, with what lint, the tests and these documents need

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# KServe's models say what its resources look like, and its client asks our server; the others what those of Prometheus'
	@# operator look like. Without what they run with, which is older than ours or not used.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps kserve==0.21.0 \
		cloudcoil.models.prometheus_operator==0.80.1.0
	@touch $@

optimize: $(VENV)/.installed ## build, measure and pack MODEL's artifacts
	@$(BIN)/python -m optimize run '$(MODEL)'$(OF_DATA) --store '$(STORE)' --device '$(DEVICE)' \
		--measure '$(MEASURE)' $(if $(RUN),--name '$(RUN)') $(call options,RUN) $(ARGS)

bench: REMEASURE := 1
bench: optimize ## as optimize, and time the artifacts anew

$(VENV)/.installed-peers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	@touch $@

$(VENV)/.installed-audit: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[audit]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs ## these documents as a site, in build/site
	@$(BIN)/python -m tools.site

reference: $(VENV)/.installed ## write docs/reference from the code
	@$(BIN)/python -m tools.reference

bench-cpu: $(VENV)/.installed-peers ## ours against NNCF, OpenVINO and ONNX Runtime; writes docs/benchmarks/cpu.md
	$(BIN)/python -m benchmarks.cpu --store '$(STORE)' --write docs/benchmarks/cpu.md

bench-models: $(VENV)/.installed-dev ## `make optimize` for models of several kinds; writes docs/benchmarks/models.md
	$(BIN)/python -m benchmarks.models --store '$(STORE)' --write docs/benchmarks/models.md

# CIFAR=imagefolder:DIR with RESNET20=file and MOBILENET=file, of weights that were trained on it, add two more subjects.
# What is made stays in build/bench-quant. QUANT=--no-speed times nothing, as where others use the machine.
QUANT_OPTIONS = --store '$(STORE)' --write docs/benchmarks/quant.md $(QUANT)
bench-quant: $(VENV)/.installed-peers ## ours and the peers' quantization of one checkpoint; writes docs/benchmarks/quant.md
	$(BIN)/python -m benchmarks.quant resnet18 --data digits --title 'ResNet-18 on digits' $(QUANT_OPTIONS)
	$(if $(and $(CIFAR),$(RESNET20)),$(BIN)/python -m benchmarks.quant examples/cifar_resnet.py:resnet20 \
		--data '$(CIFAR)' --checkpoint '$(RESNET20)' --title 'ResNet-20 on CIFAR-10' $(QUANT_OPTIONS))
	$(if $(and $(CIFAR),$(MOBILENET)),$(BIN)/python -m benchmarks.quant examples/cifar_mobilenet.py:mobilenet_v2 \
		--data '$(CIFAR)' --checkpoint '$(MOBILENET)' --title 'MobileNetV2 on CIFAR-10' $(QUANT_OPTIONS))

# CIFAR=imagefolder:DIR, with RESNET20=file and RESNET56=file where there are weights; without CIFAR only the page is
# written. TABLE='--seeds 3' and other options; TABLE=--short takes a few steps on the digits.
table-cifar: $(VENV)/.installed ## fewer bits, pruning, merging against a float control on CIFAR-10; writes docs/benchmarks/cifar.md
	$(BIN)/python -m benchmarks.cifar --store '$(STORE)' --device '$(DEVICE)' $(if $(CIFAR),--data '$(CIFAR)') \
		$(if $(RESNET20),--resnet20 '$(RESNET20)') $(if $(RESNET56),--resnet56 '$(RESNET56)') $(TABLE) \
		$(if $(findstring --short,$(TABLE)),--write build/cifar.md,--write docs/benchmarks/cifar.md)

zoo: $(VENV)/.installed-dev ## all of torchvision's classifiers through the int8 passes; goes on where it stopped
	$(BIN)/python -m benchmarks.zoo $(ZOO) --known benchmarks/records/zoo.json --write docs/benchmarks/zoo.md

# nvImageCodec and TorchCodec, where there is a GPU to decode on.
$(VENV)/.installed-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gpu]'
	@touch $@

bench-gpu: $(VENV)/.installed$(if $(shell command -v nvidia-smi),-gpu) ## every way to run a network on this machine's GPU; writes docs/benchmarks/gpu.md
	$(BIN)/python -m benchmarks.gpu --write docs/benchmarks/gpu.md

bench-serve: $(VENV)/.installed-peers ## our servers, the stock one and none at all; writes docs/benchmarks/serve.md
	$(BIN)/python -m benchmarks.serve --store '$(STORE)' $(if $(RUN),--run '$(RUN)') $(if $(PHOTOS),--photos '$(PHOTOS)') \
		--write docs/benchmarks/serve.md

soak: $(VENV)/.installed-dev ## MINUTES (15) of mixed load and faults for each server; writes docs/benchmarks/reliability.md
	$(BIN)/python -m benchmarks.soak --store '$(STORE)' $(if $(RUN),--run '$(RUN)') $(if $(PHOTOS),--photos '$(PHOTOS)') \
		$(if $(MINUTES),--minutes '$(MINUTES)') --write docs/benchmarks/reliability.md

bench-attacks: $(VENV)/.installed ## what hostile requests cost the own server; writes into docs/explanations/security.md
	$(BIN)/python -m benchmarks.attacks --write docs/explanations/security.md

bench-decoding: $(VENV)/.installed ## what the costliest images cost, against each format's bound; writes docs/benchmarks/decoding.md
	$(BIN)/python -m benchmarks.decoding --write docs/benchmarks/decoding.md

# What is compared is of the run of `make optimize MODEL=resnet18`.
bench-intervals: $(VENV)/.installed ## how often intervals of speed hold, by comparing again and again; writes docs/benchmarks/intervals.md
	$(BIN)/python -m benchmarks.intervals --store '$(STORE)' $(foreach name,fuse ptq onnx onnx-int8,resnet18/$(name)) \
		--write docs/benchmarks/intervals.md

bench-data: $(VENV)/.installed ## open and read a folder of ImageNet's size; writes docs/benchmarks/data.md
	$(BIN)/python -m benchmarks.imagenet_scale --write docs/benchmarks/data.md

package: $(VENV)/.installed ## pack the archives of a run again
	@$(BIN)/python -m serve package $(THE_RUN) --store '$(STORE)' $(ARGS)

serve: $(VENV)/.installed ## serve what the run recommends over REST, on loopback
	@$(BIN)/python -m serve start $(THE_RUNS) --store '$(STORE)' --device '$(DEVICE)' $(SERVE_OPTIONS)

# None of these installs anything: without an environment nothing was started from here.
NO_SERVER := no server is running: there is no environment here ($(VENV)) that could have started one
serve_command = if [ -x $(BIN)/python ]; then $(BIN)/python -m serve $(1); else echo "$(NO_SERVER)"; exit $(2); fi

# MODEL is here what `make status` calls a model that is served; its default is a network.
SERVED = $(if $(filter-out file default undefined,$(origin MODEL)),$(MODEL))
UNNAMED = echo "error: say which: make $@ MODEL=NAME, as make status names it" >&2; exit 2

add: ## serve more while the server goes on
	@$(call serve_command,add $(THE_RUNS) --store '$(STORE)' --device '$(DEVICE)' $(SERVE_OPTIONS),1)

replace: ## serve another artifact by the name of one that is served
	@$(if $(SERVED),$(call serve_command,replace '$(SERVED)' $(if $(RUN),'$(RUN)') --store '$(STORE)' \
		--device '$(DEVICE)' $(SERVE_OPTIONS),1),$(UNNAMED))

remove: ## serve a model no more while the server goes on
	@$(if $(SERVED),$(call serve_command,remove $(foreach name,$(SERVED),'$(name)') --store '$(STORE)' $(ARGS),1),$(UNNAMED))

stop: ## stop the server
	@$(call serve_command,stop $(if $(RUN),'$(RUN)') --store '$(STORE)' $(ARGS),0)

status: ## how the server and its models are; fails where one has no ready worker
	@$(call serve_command,status --store '$(STORE)' $(ARGS),1)

audit: $(VENV)/.installed-audit ## what is known against the Python packages and TorchServe's jar (needs a network)
	@$(BIN)/python -m serve audit $(ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check optimize serve tests examples benchmarks tools
	$(BIN)/ruff format --check optimize serve tests examples benchmarks tools
	$(BIN)/mypy

test: $(VENV)/.installed-dev ## the tests, on this machine's cores
	@# With bytecode kept, also where the environment says not to: a hundred processes would compile the same sources.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

fuzz: $(VENV)/.installed-dev ## examples that the tests have not seen yet, for what parses: other ones at each run
	HYPOTHESIS_PROFILE=searching $(BIN)/python -m pytest -m hypothesis -n $(JOBS) --dist loadfile

check-workarounds: $(VENV)/.installed ## which workarounds of libraries' faults the installed versions still need
	@$(BIN)/python -m benchmarks.workarounds

prose: $(VENV)/.installed ## how documents, docstrings and comments read: words in a sentence, semicolons; fails if an aim is missed
	@$(BIN)/python -m tools.prose; pages=$$?; $(BIN)/python -m tools.prose --python && exit $$pages

clean: ## remove the environment and caches; runs in model_store stay
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find optimize serve tests -name __pycache__ -type d -prune -exec rm -rf {} +
