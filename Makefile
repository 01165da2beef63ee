# Each target is one line; the command behind it works without make as well.
ARGS ?=
INVENTORY ?= lab

.DEFAULT_GOAL := help
.PHONY: help lab site plan lab-down fullkernel fullkernel-down test test-all lint sanity unit format docs release pages

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

lab: ## three hosts on this machine serve a model over a ring: build them, deploy, ask a question
	@tools/lab $(ARGS)

site: ## site.yml on the running lab; ARGS="--tags fabric --check"
	@tools/run ansible-playbook -i inventories/lab playbooks/site.yml $(ARGS)

plan: ## print the whole plan of an inventory as JSON, no host needed; INVENTORY=ring3
	@tools/run ansible-playbook -i inventories/$(INVENTORY) playbooks/plan.yml $(ARGS)

lab-down: ## end the lab and leave nothing behind
	@tools/run python -m tests.lab down

fullkernel: ## three hosts with kernels of their own (RDMA, ZFS, NFS); the first time builds the kernel, half an hour and more
	@GB10_LAB=$${GB10_LAB:-fullkernel} tools/run python -m tests.lab prepare --backend uml --profile lab-tiny $(ARGS)

fullkernel-down: ## end that lab and leave nothing behind
	@GB10_LAB=$${GB10_LAB:-fullkernel} tools/run python -m tests.lab down

test: ## lint, ansible-test sanity, unit tests and the lab scenario
	@tools/test short

test-all: ## make test and then the long suites
	@tools/test short long

lint: ## ansible-lint, ruff, yamllint, shellcheck, changelog fragments
	@tools/lint

sanity: ## ansible-test sanity on a copy of the working tree; ARGS="--test pep8"
	@tools/sanity $(ARGS)

unit: ## unit tests; ARGS="-k topology"
	@tools/run pytest $(ARGS)

format: ## ruff's formatter and its safe fixes
	@tools/run ruff format . && tools/run ruff check --fix .

docs: ## the reference of all modules, filters, lookups and roles, as HTML in build/reference
	@tools/release reference

pages: ## what docs/ and the READMEs have of data and code, written anew
	@tools/pages

release: ## the tarball, installed offline and planned from; documentation, galaxy-importer, ansible-builder
	@tools/release
