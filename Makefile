# The demo and the tests share one build profile.
CARGO ?= cargo
BIN = $(or $(CARGO_TARGET_DIR),target)/release/right-reset

.PHONY: build model demo test faults fuzz lint bench study audit

build:
	$(CARGO) build --release --locked

model: build
	$(BIN) models fetch smollm2-135m

demo: build
	@$(BIN) models show smollm2-135m >/dev/null 2>&1 || $(BIN) models fetch smollm2-135m
	@$(BIN) run pipelines/demo.toml --show 12

test: model
	$(CARGO) test --release --locked

# The faults of tests/it/faults.rs ten times as often as in `make test`: kills, full disks, flipped bytes.
faults: build
	RIGHT_RESET_FAULTS=10 $(CARGO) test --release --locked --test it faults -- --nocapture

# Needs cargo-fuzz; each target runs for five minutes. Without a nightly toolchain RUSTC_BOOTSTRAP=1 must be set.
fuzz:
	for target in jsonl codec manifest edges; do $(CARGO) fuzz run $$target -- -max_total_time=300 || exit 1; done

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --release --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --no-deps

# The table of docs/performance.md, PyTorch beside it where that can be installed, and the parts one by one.
bench: model
	RIGHT_RESET_PEER="$${RIGHT_RESET_PEER-$$(benches/scoring/peer.sh)}" $(CARGO) bench --locked --bench scoring
	$(CARGO) bench --locked --bench parts --bench warm --bench cache

# Needs RIGHT_RESET_STUDY_DATA, a folder with records.jsonl, streams_calibration.jsonl and streams_dev.jsonl.
study: model
	$(BIN) models fetch minilm-l6
	$(CARGO) bench --locked --bench study

audit:
	$(CARGO) deny check
