.DEFAULT_GOAL := help
PYTHON ?= python

.PHONY: help
help: ## print this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: ## install stowplan with torch (CPU build) and the development tools
	$(PYTHON) -m pip install torch==2.13.0
	$(PYTHON) -m pip install -e '.[torch,integrations,dev]'

.PHONY: lint
lint: ## ruff and oxlint: style and common faults
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	oxlint src/stowplan/report/assets

.PHONY: types
types: ## mypy --strict over source, tests and benchmarks
	$(PYTHON) -m mypy

# Processes that run tests side by side share two cores: one thread each, and none waits for the other's last test.
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist worksteal

.PHONY: test
test: test-timing test-untimed ## the test suite: first the tests that compare seconds, then all others

.PHONY: test-timing
test-timing: ## the tests that compare seconds, one at a time; each has three tries
	$(PYTHON) -m pytest -m timing

.PHONY: test-untimed
test-untimed: ## all other tests
	$(SIDE_BY_SIDE) -m "not timing"

.PHONY: test-fast
test-fast: ## the tests that need neither half a second each, a quiet machine, several processes nor a browser
	$(SIDE_BY_SIDE) -m "not slow and not timing and not distributed and not browser"

.PHONY: test-device
test-device: ## the tests on the stand-in accelerator, with 2,000 iterations of offloading and torch.compile
	STAND_IN=long $(PYTHON) -m pytest tests/device

.PHONY: hollow-card
hollow-card: ## the tests on PyTorch's CUDA build without a card; makes its environment once, 555 MB; needs g++
	$(PYTHON) -m tests.hollow_card $(TESTS)

.PHONY: test-card
test-card: ## those tests of hollow-card that fit into some minutes: the card itself, and projections
	$(PYTHON) -m tests.hollow_card -q -n 2 tests/hollow_card/test_card.py tests/hollow_card/test_projection.py

.PHONY: accuracy
accuracy: ## docs/accuracy.md: what is projected for cards, held to PyTorch's own requests; goes on with docs/accuracy.jsonl
	$(PYTHON) -m tests.hollow_card.accuracy

.PHONY: terminals
terminals: ## every command and a slow fit in terminals, wide and narrow, in pipes, logs and notebooks
	TERMINALS=whole $(PYTHON) -m pytest tests/test_terminals.py

.PHONY: coverage
coverage: ## the test suite under branch coverage, with the processes it starts; all but the tests that compare seconds
	$(PYTHON) -m coverage erase
	OMP_NUM_THREADS=1 $(PYTHON) -m coverage run -m pytest -n 2 -m "not timing"
	$(PYTHON) -m coverage combine
	$(PYTHON) -m coverage report --skip-covered

.PHONY: bench
bench: ## all studies and their page, build/bench/index.html: hours, or five minutes with SIZE=short; ONLY="tiles peers" runs a part
	$(PYTHON) -m benchmarks.suite $(or $(SIZE),long) $(if $(ONLY),--only $(ONLY))

.PHONY: pictures
pictures: ## screenshots of reports on three screens, into build/pictures
	$(PYTHON) -m pytest tests/report/test_page_looks.py

.PHONY: docs-pictures
docs-pictures: ## the reports shown in docs/pictures, from real plans and a real run; needs Chromium
	$(PYTHON) -m tools.pictures

.PHONY: docs
docs: ## the documentation as a site, build/site, with the reference from the code; a warning is an error
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/site

.PHONY: wheel-test
wheel-test: ## the built wheel in clean environments: without torch on files, beside torch through the tutorial
	PYTHON=$(PYTHON) tools/wheel_test.sh

.PHONY: wheels
wheels: ## what goes to an index, in dist: the source and this system's wheel, tried in a clean environment
	$(PYTHON) -m tools.wheels

VERSIONS ?= 2.6 2.8 2.10 2.12 2.13 2.14 2.15

.PHONY: compatibility
compatibility: ## try every feature on VERSIONS of PyTorch, one environment after another, and write docs/compatibility.md
	$(PYTHON) -m tools.compatibility $(VERSIONS)

.PHONY: databases
databases: ## run samples of PyTorch's own databases, and write docs/databases.md (SIZE=short: fewer, long: all, none: the page alone); RESULTS=FILE goes on with a run
	SIZE=$(SIZE) ONLY="$(ONLY)" RESULTS="$(RESULTS)" $(PYTHON) -m benchmarks.databases

.PHONY: zoo
zoo: ## plan tiny models of all installed packages, compare them with eager, and write docs/zoo.md
	$(PYTHON) -m benchmarks.zoo

.PHONY: repositories
repositories: ## train public repositories' own models by plans, compare them with eager, and write docs/repositories.md; FOLDER has the snapshots
	REPOSITORIES="$(FOLDER)" $(PYTHON) -m benchmarks.repositories $(ONLY)

.PHONY: mutants
mutants: ## plant faults in the judges of plans and the rules of regions, and count those that their tests see
	$(PYTHON) -m benchmarks.mutate

CASES ?= 200

.PHONY: budgets
budgets: ## train CASES random loops under budgets, and count their bytes below PyTorch; needs gcc
	$(PYTHON) -m benchmarks.budgets $(CASES)

FROM ?= 0

.PHONY: hunt-plans
hunt-plans: ## CASES small random steps: search, judges and values agree on right and on damaged schedules
	$(PYTHON) -m tests.hunt.plans --cases $(CASES) --from $(FROM)

MINUTES ?= 60

.PHONY: hunt
hunt: ## look for faults by chance for MINUTES: random training loops against eager, then damaged files
	status=0; \
	$(PYTHON) -m tests.hunt --minutes $$(( $(MINUTES) / 2 )).$$(( $(MINUTES) % 2 * 5 )) --from $(FROM) || status=1; \
	$(PYTHON) -m tests.hunt.files --seconds $$(( $(MINUTES) * 30 )) --seed $(FROM) || status=1; \
	exit $$status

.PHONY: news
news: ## what changes/ will add to the changelog
	$(PYTHON) -m towncrier build --draft --version next

.PHONY: release
release: ## check everything, set VERSION, date the changelog, commit and tag; pushes nothing
	$(MAKE) check wheel-test
	$(PYTHON) -m tools.release $(VERSION)

.PHONY: check
check: lint types test ## lint, types and tests, as CI runs them
