# shellcheck shell=bash
# Sourced by the tools: stands in the checkout's root with .venv up to date and first in PATH.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
tools/bootstrap
export PATH=$PWD/.venv/bin:$PATH
# For what does not read ansible.cfg from here: molecule writes its own, ansible-lint changes folders.
export ANSIBLE_COLLECTIONS_PATH=$PWD/.ansible/collections
# In a log: no colours, and lines as long as they are.
[ -t 1 ] || export NO_COLOR=1 COLUMNS=120
